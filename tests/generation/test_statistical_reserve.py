"""The statistical reserve: a target by expectation, a hard cap above it, nothing without a yes."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.fakes import COST_PUSD, ENDPOINT, FakeClient, make_config, make_prompts
from quantroute.errors import BudgetExceeded, ConfigurationError
from quantroute.generation import Prompt, Run, StatisticalReserve, StopReason, worst_request_pusd
from quantroute.ledger import BudgetLedger
from quantroute.money import PicoUSD


def reserve(
    *, target: int = 20_000, worst: int = 1_000, probability: float = 0.999
) -> StatisticalReserve:
    return StatisticalReserve(
        target_pusd=PicoUSD(target), worst_pusd=PicoUSD(worst), probability=probability
    )


def test_before_answers_are_seen_every_request_counts_at_its_worst() -> None:
    fresh = reserve()
    for _ in range(63):
        fresh.learn(duration_s=1.0, cost_pusd=10)
    assert fresh.bound_pusd(more=5, now_s=0.0) == 5_000
    fresh.learn(duration_s=1.0, cost_pusd=10)
    assert fresh.bound_pusd(more=5, now_s=0.0) == 50


async def test_what_is_under_way_for_long_is_expected_to_be_dear() -> None:
    """Half take one second and cost 1,000, half take three and cost 3,000."""
    async with BudgetLedger.in_memory(cap="1") as ledger, AsyncExitStack() as stack:
        seen = reserve(target=10**9, probability=0.5)
        for seconds in (1, 3) * 50:
            seen.learn(duration_s=seconds, cost_pusd=1_000 * seconds)
        for _ in range(20):
            await stack.enter_async_context(seen.place(ledger))
        began_s = asyncio.get_running_loop().time()
        # The mean of all, and one of them as dear as any; then only the long ones are left.
        assert seen.bound_pusd(more=0, now_s=began_s) == 19 * 2_000 + 3_000
        assert seen.bound_pusd(more=0, now_s=began_s + 2) == 19 * 3_000 + 1_000 + 3_000
        assert seen.bound_pusd(more=0, now_s=began_s + 99) == 19 * 3_000 + 1_000 + 3_000


@given(st.integers(0, 2**32), st.integers(1, 3_000))
def test_the_bound_grows_with_the_number_under_way(seed: int, requests: int) -> None:
    rng, seen = random.Random(seed), reserve()
    for _ in range(200):
        cost = round(rng.lognormvariate(8, 0.8))
        seen.learn(duration_s=float(cost), cost_pusd=cost)
    bounds = [seen.bound_pusd(more=requests + more, now_s=0.0) for more in (0, 1)]
    assert 0 < bounds[0] <= bounds[1]


async def test_a_run_spends_its_target_with_every_slot_busy_and_whole_limits() -> None:
    """With the worst case reserved, the last eight requests would need 8,000 to be in flight."""
    async with BudgetLedger.in_memory(cap="0.000000028") as ledger:  # 20,000 and 8,000 on top
        client = FakeClient(ledger)
        run = Run(client, make_config(), make_prompts(400), reserve=reserve())
        report = await run.execute()
        await ledger.verify()
        assert ledger.balance().pending_pusd == 0
    assert report.stop_reason is StopReason.CAP_REACHED
    assert report.spent_pusd == 20_000 == 200 * COST_PUSD
    assert {request.max_output_tokens for request in client.requests} == {256}
    assert client.peak_in_flight == client.max_in_flight


async def test_the_hard_cap_stands_whatever_the_reserve_believes() -> None:
    async with BudgetLedger.in_memory(cap="0.000000004") as ledger:
        optimist = reserve(target=10**9)
        report = await Run(
            FakeClient(ledger), make_config(), make_prompts(100), reserve=optimist
        ).execute()
    assert report.stop_reason is StopReason.CAP_REACHED
    assert report.spent_pusd <= 4_000


async def test_whoever_is_cancelled_in_line_leaves_nothing_behind() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        small = reserve(target=1_000)

        async def enter() -> None:
            async with small.place(ledger):
                pass

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(small.place(ledger))
            waiting = [asyncio.create_task(enter()) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[0].cancelled()
        assert waiting[1].exception() is None
        await enter()  # the place is free again


async def test_what_never_fits_is_refused_when_nothing_is_under_way() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        with pytest.raises(BudgetExceeded, match="raise the cap"):
            async with reserve(target=999).place(ledger):
                pass


def test_too_little_accepted_is_refused_with_the_figure() -> None:
    bold = reserve(worst=2 * 10**10)  # two cents
    assert bold.worst_overrun_pusd(100) == 2 * 10**12
    bold.check_accepted(accepted_pusd=2 * 10**12, requests=100)
    with pytest.raises(ConfigurationError, match=r"up to \$2\.0000 more .*overrun-usd 2\.00"):
        bold.check_accepted(accepted_pusd=2 * 10**12 - 1, requests=100)


@pytest.mark.parametrize("probability", [0.0, 0.49, 1.0, float("nan")])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ConfigurationError, match="probability"):
        reserve(probability=probability)


def test_the_worst_request_is_the_longest_prompt_at_its_limit() -> None:
    short = Prompt(id="a", dataset="d", turns=("x",))
    long = Prompt(id="b", dataset="d", turns=("x" * 1_000, "y"), system="z" * 10)
    worst = worst_request_pusd([ENDPOINT], [short, long], 256)
    assert worst == ENDPOINT.pricing.worst_case_pusd(
        input_tokens=1_000 + 1 + 2 * 12 + 128 + 10 + 256, output_tokens=256
    )
