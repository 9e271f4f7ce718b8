"""Billing to the last digit, credits, key limits, BYOK, generation records."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute.money import parse_reported_usd
from quantroute.pricing import TokenUsage
from quantroute.simulator import (
    AccountSpec,
    AnswerSpec,
    Faults,
    SimulatedAnswer,
    count_prompt_tokens,
    prompt_id,
)
from quantroute.simulator._pricing import charge, parse_pricing
from quantroute.testing import FakeClock


class Fixed:
    """A backend that always answers the same."""

    def __init__(self, output_tokens: int, reasoning_tokens: int = 0) -> None:
        self.answer_ = SimulatedAnswer(
            content="done", output_tokens=output_tokens, reasoning_tokens=reasoning_tokens
        )

    async def answer(self, request):
        return self.answer_


PRICE = st.decimals(min_value=0, max_value="0.01", places=13)
COUNT = st.integers(0, 300_000)


@given(p=PRICE, c=PRICE, r=PRICE, w=PRICE, n=COUNT, out=COUNT, parts=st.tuples(COUNT, COUNT))
def test_the_charge_is_the_published_formula_exactly(p, c, r, w, n, out, parts):
    """(prompt - cached - written) * p + cached * r + written * w + completion * c, no rounding."""
    cached, written = parts
    pricing = parse_pricing(
        {
            "prompt": format(p, "f"),
            "completion": format(c, "f"),
            "input_cache_read": format(r, "f"),
            "input_cache_write": format(w, "f"),
        }
    )
    usage = TokenUsage(
        input_tokens=n, output_tokens=out, cached_tokens=cached, cache_write_tokens=written
    )
    expected = (
        max(0, n - cached - written) * Fraction(p)
        + cached * Fraction(r)
        + written * Fraction(w)
        + out * Fraction(c)
    )
    assert Fraction(charge(pricing, usage, at_s=0.0).total_usd) == expected


@pytest.mark.parametrize(
    ("usage", "price", "expected"),
    [
        ((0, 202, 166), "0.0000022", "0.0004444"),
        ((0, 173, 165), "0.00000325", "0.00056225"),
    ],
)
def test_reasoning_is_inside_completion(usage, price, expected):
    """Two real bills: reasoning is not charged on top."""
    pricing = parse_pricing({"prompt": "0", "completion": price})
    tokens = TokenUsage(input_tokens=usage[0], output_tokens=usage[1], reasoning_tokens=usage[2])
    assert charge(pricing, tokens, at_s=0.0).total_usd == Decimal(expected)


def test_reasoning_has_its_own_price_where_one_is_published():
    pricing = parse_pricing({"prompt": "0", "completion": "1", "internal_reasoning": "3"})
    tokens = TokenUsage(input_tokens=0, output_tokens=10, reasoning_tokens=4)
    assert charge(pricing, tokens, at_s=0.0).total_usd == 18


@pytest.mark.parametrize(
    ("tokens", "hhmm", "price"),
    [(200_000, "1200", 1), (200_001, "1200", 2), (5, "2359", 3), (5, "0129", 3), (5, "0130", 1)],
)
def test_overrides_by_length_and_by_hour(tokens, hhmm, price):
    """The length bound is strict, the window is half-open and wraps midnight."""
    pricing = parse_pricing(
        {
            "prompt": "1",
            "completion": "0",
            "overrides": [
                {"min_prompt_tokens": 200_000, "prompt": "2"},
                {"utc_start": 2300, "utc_end": "0130", "prompt": "3"},
            ],
        }
    )
    at_s = int(hhmm[:2]) * 3600 + int(hhmm[2:]) * 60
    usage = TokenUsage(input_tokens=tokens, output_tokens=0)
    assert charge(pricing, usage, at_s=at_s).total_usd == tokens * price


async def test_every_reported_cost_equals_its_record(service):
    """200 answers from all endpoints: the JSON numbers lead back to the bill, pico for pico."""
    total_pusd = 0
    for number in range(200):
        got = await service.chat(f"p{number}", stream=bool(number % 2))
        usage = got.json["usage"] if number % 2 == 0 else got.events[-2]["usage"]
        record = service.bill.records[got.headers["X-Generation-Id"]]
        assert parse_reported_usd(repr(usage["cost"])) == record.cost_usd
        assert usage["completion_tokens"] == record.usage.output_tokens
        total_pusd += record.spend_pusd
    assert service.bill.total_pusd == total_pusd
    assert len(service.bill.by_provider()) > 5
    assert service.bill.total_usd == sum(service.bill.by_provider().values())


async def test_cost_noise_stays_within_fifteen_digits(open_service, small, endpoint):
    service = await open_service(small(endpoint("a"), faults=Faults(cost_noise=1.0)))
    got = await service.chat()
    cost = got.json["usage"]["cost"]
    record = service.bill.records[got.json["id"]]
    assert cost != float(record.cost_usd)
    assert parse_reported_usd(repr(cost)) == record.cost_usd


async def test_cache_reads_and_writes_take_their_prices(open_service, small, endpoint):
    pricing = {"input_cache_read": "1e-7", "input_cache_write": "1e-5"}
    scenario = small(
        endpoint("a", pricing=pricing),
        answers=AnswerSpec(cache_read_probability=0.5, cache_write_probability=1.0),
    )
    service = await open_service(scenario)
    kinds = set()
    for number in range(20):
        usage = (await service.chat("x" * 400 + str(number))).json["usage"]
        details = usage["prompt_tokens_details"]
        cached, written = details["cached_tokens"], details["cache_write_tokens"]
        plain = usage["prompt_tokens"] - cached - written
        expected = (
            plain * Decimal("5e-7")
            + cached * Decimal("1e-7")
            + written * Decimal("1e-5")
            + usage["completion_tokens"] * Decimal("2.5e-6")
        )
        assert parse_reported_usd(repr(usage["cost"])) == expected
        kinds.add((bool(cached), bool(written)))
    assert kinds == {(True, False), (False, True)}


async def test_request_fee_is_part_of_the_cost(open_service, small, endpoint):
    service = await open_service(small(endpoint("a", "0", "0", pricing={"request": "0.005"})))
    assert (await service.chat()).json["usage"]["cost"] == 0.005


async def test_upstream_cost_is_a_breakdown_and_no_addend(service):
    usage = (await service.chat()).json["usage"]
    assert usage["is_byok"] is False
    assert usage["cost_details"]["upstream_inference_cost"] == usage["cost"] > 0


@pytest.mark.parametrize(("fee", "cost"), [("0", 0.0), ("0.05", 0.00000125)])
async def test_byok_costs_the_fee_and_spends_the_upstream_price(
    open_service, small, endpoint, fee, cost
):
    scenario = small(
        endpoint("a", "0", "2.5"),
        faults=Faults(byok=1.0),
        account=AccountSpec(byok_fee=fee, key_limit_usd="1"),
    )
    service = await open_service(scenario, backend=Fixed(10))
    got = await service.chat()
    usage = got.json["usage"]
    assert usage["is_byok"] is True
    assert usage["cost"] == cost
    assert usage["cost_details"]["upstream_inference_cost"] == 0.000025
    assert service.bill.total_usd == Decimal(fee) * Decimal("0.000025") + Decimal("0.000025")
    key = (await service.get("/key")).json["data"]
    assert (key["usage"], key["byok_usage"]) == (cost, 0.000025)
    generation = (await service.get("/generation", id=got.json["id"])).json["data"]
    assert generation["upstream_inference_cost"] == 0.000025


# -- credits and key limits ------------------------------------------------------------------------


async def test_402_says_what_is_affordable(open_service, small, endpoint):
    """Ten dollars per million out, one cent in the account: exactly 1,000 tokens minus input."""
    scenario = small(endpoint("a", "0", "10"), account=AccountSpec(credits_usd="0.01"))
    service = await open_service(scenario)
    got = await service.chat(max_tokens=1001)
    assert got.status == 402
    error = got.json["error"]
    assert "You requested up to 1001 tokens, but can only afford 1000." in error["message"]
    assert error["metadata"]["previous_errors"] == [{"code": 402, "message": error["message"]}]
    assert error["metadata"]["provider_name"] is None
    assert (await service.chat(max_tokens=1000)).status == 200


async def test_402_lists_one_affordability_per_provider(open_service, small, endpoint):
    scenario = small(
        endpoint("a", "0", "10"),
        endpoint("b", "0", "20"),
        account=AccountSpec(credits_usd="0.01"),
    )
    service = await open_service(scenario)
    error = (await service.chat(max_tokens=2000)).json["error"]
    messages = [entry["message"] for entry in error["metadata"]["previous_errors"]]
    assert any("afford 1000" in m for m in messages)
    assert any("afford 500" in m for m in messages)
    assert (await service.chat(max_tokens=1000)).json["provider"] == "A"


async def test_without_max_tokens_the_endpoint_maximum_is_reserved(open_service, small, endpoint):
    scenario = small(
        endpoint("a", "0", "10", max_completion_tokens=65536),
        account=AccountSpec(credits_usd="0.5"),
    )
    service = await open_service(scenario)
    got = await service.chat(max_tokens=None)
    assert (
        "You requested up to 65536 tokens, but can only afford 50000"
        in got.json["error"]["message"]
    )


async def test_prompt_alone_too_dear(open_service, small, endpoint):
    scenario = small(endpoint("a", "100", "1"), account=AccountSpec(credits_usd="0.001"))
    service = await open_service(scenario)
    got = await service.chat("x" * 4000)
    assert got.status == 402
    assert got.json["error"]["message"].startswith("Prompt tokens limit exceeded: 1007 > 10.")


async def test_key_limit_is_kept_current_and_stops(open_service, small, endpoint):
    scenario = small(endpoint("a", "0", "10"), account=AccountSpec(key_limit_usd="0.00105"))
    service = await open_service(scenario, backend=Fixed(100))
    assert (await service.chat(max_tokens=100)).status == 200
    key = (await service.get("/key")).json["data"]
    assert (key["limit"], key["usage"], key["limit_remaining"]) == (0.00105, 0.001, 0.00005)
    got = await service.chat(max_tokens=100)
    assert got.status == 402
    assert "afford 5." in got.json["error"]["message"]
    service.simulator.change(key_limit_usd="1")
    assert (await service.chat(max_tokens=100)).status == 200
    service.simulator.change(key_limit_usd=None)
    assert (await service.get("/key")).json["data"]["limit"] is None


async def test_credits_need_the_management_key(open_service, small, endpoint):
    scenario = small(endpoint("a"), account=AccountSpec(credits_usd="7"))
    service = await open_service(scenario)
    assert (await service.get("/credits")).status == 403
    await service.chat()
    headers = {"Authorization": f"Bearer {service.simulator.management_key}"}
    url = service.simulator.base_url + "/credits"
    async with service.session.get(url, headers=headers) as response:
        body = (await response.json())["data"]
    assert body["total_credits"] == 7.0
    assert body["total_usage"] == float(service.bill.total_usd) > 0


@pytest.mark.parametrize(("reserves", "admitted"), [(True, 1), (False, 5)])
async def test_requests_in_flight_may_count_against_credits(
    open_service, small, endpoint, reserves, admitted
):
    """Credits for one worst case, five at once: with reservations one passes, without all do."""
    scenario = small(
        endpoint("a", "0", "10"),
        account=AccountSpec(credits_usd="0.0015", reserve_in_flight=reserves),
        time_scale=0.05,
    )
    service = await open_service(scenario, backend=Fixed(10))
    got = await asyncio.gather(*(service.chat(f"p{n}", max_tokens=100) for n in range(5)))
    assert sorted(g.status for g in got).count(200) == admitted
    assert service.simulator.state.account.held_usd == 0


async def test_overdrawn_account_refuses_free_models_too(open_service, small, endpoint):
    scenario = small(
        endpoint("a", "0", "10"),
        endpoint("free", "0", "0"),
        account=AccountSpec(credits_usd="0.001"),
        time_scale=0.02,
    )
    service = await open_service(scenario, backend=Fixed(100))
    both = (service.chat(f"p{n}", max_tokens=100, provider={"only": ["a"]}) for n in range(2))
    assert [g.status for g in await asyncio.gather(*both)] == [200, 200]
    got = await service.chat(provider={"only": ["free"]})
    assert got.status == 402
    assert "Insufficient credits" in got.json["error"]["message"]


@pytest.mark.parametrize("key", ["", "sk-or-v1-somebody-else"])
@pytest.mark.parametrize("path", ["/key", "/credits", "/generation?id=gen-1", "/chat/completions"])
async def test_keys_are_checked(service, path, key):
    method = "POST" if "chat" in path else "GET"
    url = service.simulator.base_url + path
    headers = {"Authorization": f"Bearer {key}" if key else ""}
    body = service.body() if method == "POST" else None
    async with service.session.request(method, url, headers=headers, json=body) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == 401
    assert not service.bill.records


# -- generation records ----------------------------------------------------------------------------


async def test_generation_tells_the_bill(service):
    got = await service.chat()
    assert got.headers["X-Generation-Id"] == got.json["id"]
    record = (await service.get("/generation", id=got.json["id"])).json["data"]
    usage = got.json["usage"]
    assert record["total_cost"] == record["usage"] == usage["cost"]
    assert record["native_tokens_prompt"] == usage["prompt_tokens"]
    assert record["native_tokens_completion"] == usage["completion_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert record["native_tokens_reasoning"] == reasoning
    assert record["provider_name"] == got.json["provider"]
    assert record["streamed"] is False
    assert record["cancelled"] is False


async def test_generation_is_late_by_lookups(open_service, small, endpoint):
    service = await open_service(small(endpoint("a"), generation_misses=2))
    generation_id = (await service.chat()).json["id"]
    statuses = [(await service.get("/generation", id=generation_id)).status for _ in range(4)]
    assert statuses == [404, 404, 200, 200]


async def test_generation_is_late_by_time(open_service, small, endpoint):
    clock = FakeClock()
    service = await open_service(small(endpoint("a"), generation_delay_s=5.0), clock=clock)
    generation_id = (await service.chat()).json["id"]
    clock.advance(4.9)
    assert (await service.get("/generation", id=generation_id)).status == 404
    clock.advance(0.2)
    assert (await service.get("/generation", id=generation_id)).status == 200


async def test_generation_of_an_unknown_id(service):
    assert (await service.get("/generation", id="gen-0")).status == 404
    assert (await service.get("/generation")).status == 400


async def test_a_price_rise_does_not_touch_a_running_answer(open_service, small, endpoint):
    """What was listed when the answer began is what a cancelled stream is billed at."""
    scenario = small(
        endpoint("fireworks", "0", "1"),
        answers=AnswerSpec(mean_tokens=200, sigma=0.0, chunk_tokens=5),
        time_scale=0.03,
    )
    service = await open_service(scenario)
    url = service.simulator.base_url + "/chat/completions"
    response = await service.session.post(url, json=service.body(stream=True))
    await response.content.readany()
    change = {"tag": "fireworks", "new_tag": "fireworks/fp4", "pricing": {"completion": "1"}}
    service.simulator.change(endpoints=[change])
    response.close()
    await service.idle()
    (record,) = service.bill.records.values()
    assert record.tag == "fireworks"
    assert record.cost_usd == record.usage.output_tokens * Decimal("1e-6") > 0


def test_tokens_of_parts_and_of_earlier_reasoning():
    parts = [{"type": "text", "text": "x" * 8}, {"type": "image_url"}]
    history = {"role": "assistant", "content": "y" * 4, "reasoning": "z" * 4}
    assert count_prompt_tokens([{"role": "user", "content": parts}]) == 3 + 4 + 2
    assert count_prompt_tokens([history]) == 3 + 4 + 1 + 1


async def test_bill_and_stats_over_http(service):
    got = await service.chat("only once")
    bill = (await service.get("/__sim/bill")).json
    assert bill["total_pusd"] == service.bill.total_pusd > 0
    assert Decimal(bill["total_usd"]) == service.bill.total_usd
    assert [record["generation_id"] for record in bill["records"]] == [got.json["id"]]
    assert "records" not in (await service.get("/__sim/bill", records="0")).json
    stats = (await service.get("/__sim/stats")).json
    assert stats["requests"] == 1
    assert stats["by_status"] == {"200": 1}
    assert stats["by_provider"] == {got.json["provider"]: 1}
    key = prompt_id([{"role": "user", "content": "only once"}])
    assert stats["answers_by_prompt"] == {key: 1}
    await service.chat("only once")
    assert (await service.get("/__sim/stats")).json["duplicate_answers"] == 1
    assert service.bill.paid_by_prompt()[key] == 2


@settings(max_examples=examples(50))
@given(st.lists(st.text(max_size=60), min_size=1, max_size=5))
def test_bytes_bound_the_tokens_of_a_prompt(texts):
    """Tokens never exceed the UTF-8 bytes plus four for each message plus three."""
    messages = [{"role": "user", "content": text} for text in texts]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    assert count_prompt_tokens(messages) <= size + 4 * len(texts) + 3
