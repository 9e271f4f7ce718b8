"""Delegated routing: the service chooses among the allowed; we reserve the worst and check."""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_support import MODEL, opened
from policy_support import make_endpoint
from quantroute import ChatRequest, Client, ConfigurationError, Sampling
from quantroute.client import DELEGATED, Answered
from quantroute.client._delegated import Pauses, Pool, served_of
from quantroute.domain import Quantization
from quantroute.policy import ExclusionPolicy, Precision
from quantroute.simulator import Faults, kimi_mission_scenario

pytestmark = pytest.mark.usefixtures("key")

NATIVE = ["siliconflow/int4", "inceptron/int4", "chutes/int4", "atlas-cloud/int4"]


def request(text: str = "Hi", **changes: Any) -> ChatRequest:
    settings = {"model": MODEL, "max_output_tokens": 400, "request_id": text} | changes
    return ChatRequest(messages=({"role": "user", "content": text},), **settings)


async def ask(client: Client, rows: int) -> list[Answered]:
    found = await asyncio.gather(*(client.complete(request(str(n))) for n in range(rows)))
    assert all(isinstance(item, Answered) for item in found)
    return [item for item in found if isinstance(item, Answered)]


async def test_several_allowed_endpoints_serve_and_no_other() -> None:
    async with opened(routing="delegated") as (client, simulator):
        bound = await client.verdicts(MODEL)
        allowed = {item.key for item in bound.delegable}
        answers = [item.answer for item in await ask(client, 80)]
        await client.reconcile(quiet_s=0.0, patience_s=2.0)
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
        (line,) = await client.ledger.statement()
        assert line.endpoint == DELEGATED
    served = Counter(answer.provenance.endpoint.key for answer in answers)
    assert set(served) <= allowed
    assert len(served) > 1
    assert {answer.flags for answer in answers} == {()}
    for answer in answers:  # price and precision are those of whoever served
        source = answer.provenance
        assert source.served_provider == source.endpoint.provider_name
        assert source.precision.quantization is Quantization.INT4
        assert source.endpoint.pricing.is_bounded


async def test_the_dearest_allowed_endpoint_is_what_is_reserved() -> None:
    async with opened(routing="delegated", only=["inceptron", "parasail"]) as (client, _):
        offers = await client._opened().catalogue.offers(MODEL, Sampling())
        (pooled,) = client._opened().catalogue.candidates(offers, request())
        dearest = max(
            quote.cost_pusd(input_tokens=133 + 9, output_tokens=400) for _, quote in offers.quotes
        )
        assert pooled.worst_pusd >= dearest
        sent = offers.preferences(pooled)
    assert sent["only"] == ["inceptron/int4", "parasail/int4"]
    assert sent["allow_fallbacks"] is True
    assert Decimal(sent["max_price"]["completion"]) == Decimal("3.3")


async def test_an_answer_from_outside_is_flagged_as_in_pinned_routing() -> None:
    scenario = kimi_mission_scenario(faults=Faults(wrong_provider=1.0))
    async with opened(scenario, routing="delegated") as (client, _):
        (found,) = await ask(client, 1)
    assert "served_mismatch" in found.answer.flags


async def test_a_429_that_names_a_provider_does_not_close_the_account() -> None:
    """The service gives up after some refusals and names the last: that company alone rests."""
    scenario = kimi_mission_scenario(faults=Faults(upstream_429=0.5))
    async with opened(scenario, routing="delegated", only=NATIVE[:3]) as (client, _):
        await ask(client, 30)
        resting = client._opened().catalogue.pauses._noted_at_s
        (report,) = client.endpoint_reports()
    assert resting
    assert report.rate_limited < len(resting)  # at most when really all of them were resting
    assert report.limit > 100


def test_a_mode_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pinned"):
        Client(cap_usd="1", routing="random")


# -- who served ------------------------------------------------------------------------------------

HERE = ExclusionPolicy(accept=["fp8"])
LABEL = Precision(quantization=Quantization.INT4, source="label", native=Quantization.INT4)
ONE = make_endpoint("alpha/int4", "Alpha", usd_out="0.000002")
TWIN = make_endpoint("alpha/fast", "Alpha", usd_out="0.000004")
OTHER = make_endpoint("beta/int4", "Beta", usd_out="0.000003")


def pool_of(*endpoints: Any) -> Pool:
    from datetime import UTC, datetime

    return Pool.of(HERE.bind(endpoints, at=datetime(2026, 8, 1, tzinfo=UTC)), endpoints)


def test_of_a_company_with_two_endpoints_only_what_they_share_is_known() -> None:
    pool = pool_of(ONE, TWIN, OTHER)
    precisions = dict.fromkeys((ONE.key, TWIN.key, OTHER.key), LABEL)
    served = served_of(pool, precisions, provider_name="Alpha", model=None)
    assert served.flags == ("served_ambiguous",)
    assert served.endpoint.tag == "alpha/?"
    assert served.endpoint.pricing.output_usd_per_token is None
    assert served.precision == LABEL
    assert served.pricing.output_usd_per_token == Decimal("0.000004")
    alone = served_of(pool, precisions, provider_name="Beta", model=None)
    assert (alone.endpoint, alone.flags) == (OTHER, ())


def test_of_an_answer_that_names_nobody_nothing_is_known_but_the_ceilings() -> None:
    precisions = {ONE.key: LABEL, OTHER.key: LABEL}
    served = served_of(pool_of(ONE, OTHER), precisions, provider_name=None, model=None)
    assert served.flags == ("served_unknown",)
    assert served.endpoint.tag == DELEGATED
    assert served.pricing.output_usd_per_token == Decimal("0.000003")


@given(st.lists(st.integers(1, 9_000), min_size=1, max_size=5), st.integers(0, 50_000))
def test_the_pool_bounds_each_of_its_members(prices: list[int], tokens: int) -> None:
    members = [
        make_endpoint(f"p{n}/int4", f"P{n}", usd_out=f"{Decimal(price) / 10**9:f}")
        for n, price in enumerate(prices)
    ]
    pool = pool_of(*members)
    for item in members:
        assert pool.quote.cost_pusd(
            input_tokens=tokens, output_tokens=tokens
        ) >= item.pricing.worst_case_pusd(input_tokens=tokens, output_tokens=tokens)


# -- pauses ----------------------------------------------------------------------------------------


def test_a_company_rests_alone_and_comes_back() -> None:
    pauses = Pauses()
    pauses.note("Alpha", sent_at_s=0.0, now_s=1.0, retry_after_s=4.0)
    assert pauses.rested([ONE, OTHER], 2.0) == [OTHER]
    assert pauses.rested([ONE], 2.0) == []
    assert list(pauses.rested([ONE, OTHER], 5.0)) == [ONE, OTHER]


def test_a_burst_of_refusals_is_one_episode_and_the_next_one_lasts_longer() -> None:
    pauses = Pauses()
    for _ in range(50):
        pauses.note("Alpha", sent_at_s=0.5, now_s=1.0, retry_after_s=None)
    assert list(pauses.rested([ONE], 1.6)) == [ONE]
    pauses.note("Alpha", sent_at_s=1.7, now_s=2.0, retry_after_s=None)
    assert pauses.rested([ONE], 2.9) == []
    pauses.answered(ONE)
    pauses.note("Alpha", sent_at_s=3.5, now_s=4.0, retry_after_s=None)
    assert list(pauses.rested([ONE], 4.6)) == [ONE]
