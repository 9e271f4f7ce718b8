"""Waiting for leases: order, timers, cancellation, abort."""

from __future__ import annotations

import asyncio

import pytest

from quantroute.client._dispatch import Dispatcher
from quantroute.clock import SystemClock
from quantroute.domain import Endpoint, Quantization
from quantroute.errors import AccountError
from quantroute.pricing import Pricing
from quantroute.routing import Candidate, Feedback, LimitSettings, Router


def candidate(tag: str, cost: int = 1) -> Candidate:
    endpoint = Endpoint(
        model="m/x",
        tag=tag,
        provider_name=tag,
        quantization=Quantization.INT4,
        pricing=Pricing.flat(input_usd_per_token="0", output_usd_per_token="0"),
    )
    return Candidate(endpoint=endpoint, expected_pusd=cost, worst_pusd=cost, max_tokens=1)


def dispatcher(*, max_in_flight: int, per_endpoint: int = 1_000) -> Dispatcher:
    limits = LimitSettings(initial=per_endpoint, ceiling=per_endpoint, pause_s=0.01)
    return Dispatcher(Router(max_in_flight, limits=limits), SystemClock())


async def test_never_more_in_flight_than_allowed_and_first_come_first_served() -> None:
    hand = dispatcher(max_in_flight=3)
    order: list[int] = []
    peak = 0

    async def row(number: int) -> None:
        nonlocal peak
        lease = await hand.acquire([candidate("a")])
        order.append(number)
        peak = max(peak, hand.router.in_flight)
        await asyncio.sleep(0)
        hand.release(lease, Feedback.SUCCESS)

    await asyncio.gather(*(row(number) for number in range(50)))
    assert order == list(range(50))
    assert peak == 3
    assert hand.router.in_flight == 0


async def test_a_full_endpoint_does_not_block_those_who_want_another() -> None:
    hand = dispatcher(max_in_flight=10, per_endpoint=1)
    await hand.acquire([candidate("a")])
    blocked = asyncio.ensure_future(hand.acquire([candidate("a")]))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        lease = await hand.acquire([candidate("b")])
    assert lease.candidate.endpoint.tag == "b"
    assert not blocked.done()
    blocked.cancel()


async def test_many_who_want_a_paused_endpoint_block_nobody_else() -> None:
    """Long prompts that fit one endpoint, which rests for a minute; the others fit both."""
    dispatcher = Dispatcher(Router(100, limits=LimitSettings(initial=8, ceiling=8)), SystemClock())
    paused, free = candidate("a"), candidate("b")
    lease = await dispatcher.acquire([paused])
    dispatcher.release(lease, Feedback.RATE_LIMITED, retry_after_s=60.0)
    long = [asyncio.ensure_future(dispatcher.acquire([paused])) for _ in range(20)]
    both = [asyncio.ensure_future(dispatcher.acquire([paused, free])) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [turn.done() for turn in both] == [True] * 8 + [False] * 2
    assert dispatcher.waiting == 22
    dispatcher.release(both[0].result(), Feedback.SUCCESS)
    await asyncio.sleep(0)
    assert sum(turn.done() for turn in both) == 9
    for turn in (*long, *both):
        turn.cancel()
    dispatcher.close()


async def test_a_pause_ends_by_itself() -> None:
    hand = dispatcher(max_in_flight=10)
    lease = await hand.acquire([candidate("a")])
    hand.release(lease, Feedback.RATE_LIMITED, retry_after_s=0.02)
    async with asyncio.timeout(1):
        await hand.acquire([candidate("a")])


async def test_a_cancelled_waiter_leaves_no_trace() -> None:
    hand = dispatcher(max_in_flight=1)
    lease = await hand.acquire([candidate("a")])
    waiting = [asyncio.ensure_future(hand.acquire([candidate("a")])) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    hand.release(lease, Feedback.SUCCESS)
    waiting[1].cancel()  # served in the same instant: the lease goes on to the next
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        hand.release(await waiting[2], Feedback.SUCCESS)
    assert hand.router.in_flight == 0
    assert hand.waiting == 0


async def test_abort_reaches_everybody_who_waits() -> None:
    hand = dispatcher(max_in_flight=1)
    lease = await hand.acquire([candidate("a")])
    waiting = [asyncio.ensure_future(hand.acquire([candidate("a")])) for _ in range(3)]
    feeder = asyncio.ensure_future(hand.slot())
    await asyncio.sleep(0)
    hand.abort(AccountError(problem="no funds", status=402))
    results = await asyncio.gather(*waiting, feeder, return_exceptions=True)
    assert all(isinstance(result, AccountError) for result in results)
    assert len({id(result) for result in results}) == 4
    hand.release(lease, Feedback.NEUTRAL)


async def test_slot_waits_for_room() -> None:
    hand = dispatcher(max_in_flight=1)
    await hand.slot()
    lease = await hand.acquire([candidate("a")])
    feeder = asyncio.ensure_future(hand.slot())
    await asyncio.sleep(0)
    assert not feeder.done()
    hand.release(lease, Feedback.SUCCESS)
    async with asyncio.timeout(1):
        await feeder


@pytest.mark.parametrize("count", [200])
async def test_random_traffic_returns_every_lease(count: int) -> None:
    hand = dispatcher(max_in_flight=7, per_endpoint=4)
    kinds = [Feedback.SUCCESS, Feedback.FAULT, Feedback.NEUTRAL]

    async def row(number: int) -> None:
        lease = await hand.acquire([candidate("a"), candidate("b")])
        assert hand.router.in_flight <= 7
        await asyncio.sleep(0.0001 * (number % 5))
        hand.release(lease, kinds[number % 3])

    async with asyncio.timeout(20):
        await asyncio.gather(*(row(number) for number in range(count)))
    assert hand.router.in_flight == 0
    assert all(report.in_flight == 0 for report in hand.router.reports(0.0))
