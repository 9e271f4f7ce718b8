"""The cheapest mix that is fast enough, and the router under its quotas."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.domain import Endpoint, EndpointKey, Quantization
from quantroute.pricing import Pricing
from quantroute.routing import (
    BreakerSettings,
    Candidate,
    Feedback,
    LimitSettings,
    Mix,
    Router,
    Supply,
    cheapest_mix,
    in_order,
)


def supply(tag: str, cost: float, slots: int, answer_s: float = 10.0) -> Supply:
    return Supply(key=EndpointKey("m/x", tag), cost=cost, slots=slots, answer_s=answer_s)


def quotas(mix: Mix) -> dict[str, int]:
    return {key.tag: slots for key, slots in mix.quotas.items()}


THREE = [supply("dear", 3.0, 1_000), supply("cheap", 1.0, 100), supply("middle", 2.0, 100)]


@pytest.mark.parametrize(
    ("needed_per_s", "expected"),
    [
        (0.0, {"cheap": 100}),
        (5.0, {"cheap": 100}),
        (10.0, {"cheap": 100}),
        (12.0, {"cheap": 100, "middle": 20}),
        (20.5, {"cheap": 100, "middle": 100, "dear": 5}),
    ],
)
def test_the_cheapest_are_filled_and_the_last_gets_what_is_missing(
    needed_per_s: float, expected: dict[str, int]
) -> None:
    mix = cheapest_mix(THREE, needed_per_s=needed_per_s, max_in_flight=2_000)
    assert mix.is_enough
    assert quotas(mix) == expected


def test_what_cannot_be_reached_uses_everything() -> None:
    mix = cheapest_mix(THREE, needed_per_s=1_000.0, max_in_flight=2_000)
    assert not mix.is_enough
    assert quotas(mix) == {"cheap": 100, "middle": 100, "dear": 1_000}
    assert mix.rate_per_s == pytest.approx(120.0)


def test_slots_that_a_slow_cheap_endpoint_would_waste_go_to_a_fast_one() -> None:
    both = [supply("slow", 1.0, 500, 50.0), supply("fast", 2.0, 500, 5.0)]
    assert quotas(cheapest_mix(both, needed_per_s=2.0, max_in_flight=100)) == {"slow": 100}
    assert quotas(cheapest_mix(both, needed_per_s=10.0, max_in_flight=100)) == {"fast": 100}


def test_an_endpoint_that_is_down_is_not_counted_on() -> None:
    mix = cheapest_mix(
        [supply("cheap", 1.0, 0), supply("dear", 3.0, 100)], needed_per_s=2.0, max_in_flight=100
    )
    assert quotas(mix) == {"dear": 100}
    assert not cheapest_mix([], needed_per_s=1.0, max_in_flight=5).is_enough


supplies = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=5
).map(
    lambda rows: [
        supply(f"e{n}", float(cost), slots, float(answer_s))
        for n, (cost, slots, answer_s) in enumerate(rows)
    ]
)


@given(supplies, st.floats(0.01, 20.0), st.integers(1, 80))
def test_a_mix_keeps_its_promises(
    found: list[Supply], needed_per_s: float, max_in_flight: int
) -> None:
    mix = cheapest_mix(found, needed_per_s=needed_per_s, max_in_flight=max_in_flight)
    by_key = {item.key: item for item in found}
    assert all(0 < slots <= by_key[key].slots for key, slots in mix.quotas.items())
    if mix.is_enough:
        assert sum(mix.quotas.values()) <= max_in_flight
        rate = sum(slots / by_key[key].answer_s for key, slots in mix.quotas.items())
        assert rate == pytest.approx(mix.rate_per_s)
        assert rate >= needed_per_s - 1e-8


@given(supplies, st.floats(0.01, 20.0))
def test_with_slots_to_spare_no_set_of_endpoints_is_cheaper(
    found: list[Supply], needed_per_s: float
) -> None:
    mix = cheapest_mix(found, needed_per_s=needed_per_s, max_in_flight=10_000)
    sets = [
        chosen
        for size in range(1, len(found) + 1)
        for chosen in combinations(found, size)
        if sum(item.slots / item.answer_s for item in chosen) >= needed_per_s - 1e-9
    ]
    assert mix.is_enough == bool(sets)
    if not sets:
        return
    by_key = {item.key: item for item in found}
    dearest_used = max(by_key[key].cost for key in mix.quotas)
    assert dearest_used <= min(max(item.cost for item in chosen) for chosen in sets)


# -- the router ------------------------------------------------------------------------------------


def candidate(tag: str, cost: int) -> Candidate:
    endpoint = Endpoint(
        model="m/x",
        tag=tag,
        provider_name=tag.title(),
        quantization=Quantization.INT4,
        pricing=Pricing.flat(input_usd_per_token="0", output_usd_per_token="0.000002"),
    )
    return Candidate(endpoint=endpoint, expected_pusd=cost, worst_pusd=cost, max_tokens=1)


CANDIDATES = in_order([candidate("cheap", 1), candidate("dear", 9)])
CHEAP = CANDIDATES[0].endpoint.key


def test_quotas_bound_each_endpoint_and_bench_the_others() -> None:
    router = Router(10)
    router.quotas = {CHEAP: 2}
    leases = [router.acquire(CANDIDATES, 0.0) for _ in range(4)]
    assert [lease is not None for lease in leases] == [True, True, False, False]
    assert router.retry_at_s(CANDIDATES, 0.0) is None  # only a return makes room
    router.quotas = None
    lease = router.acquire(CANDIDATES, 0.0)
    assert lease is not None


def test_whoever_can_only_go_where_no_quota_is_goes_all_the_same() -> None:
    router = Router(10)
    router.quotas = {CHEAP: 1}
    assert router.acquire(CANDIDATES[1:], 0.0) is not None


def test_supplies_are_what_endpoints_have_shown() -> None:
    router = Router(
        100,
        limits=LimitSettings(initial=8, ceiling=50),
        breakers=BreakerSettings(failures=1, pause_s=5.0),
    )
    costs = {item.endpoint.key: float(item.expected_pusd) for item in CANDIDATES}
    fresh = {item.key.tag: item for item in router.supplies(costs, 0.0, answer_s=7.0)}
    assert (fresh["cheap"].slots, fresh["cheap"].answer_s) == (50, 7.0)
    lease = router.acquire(CANDIDATES, 0.0)
    assert lease is not None
    router.release(lease, Feedback.SUCCESS, now_s=4.0)
    shown = {item.key.tag: item for item in router.supplies(costs, 4.0, answer_s=7.0)}
    assert (shown["cheap"].answer_s, shown["dear"].answer_s) == (4.0, 4.0)
    lease = router.acquire(CANDIDATES, 4.0)
    assert lease is not None
    router.release(lease, Feedback.RATE_LIMITED, now_s=5.0)
    limited = {item.key.tag: item for item in router.supplies(costs, 5.0, answer_s=7.0)}
    assert limited["cheap"].slots == 1
    lease = router.acquire(CANDIDATES[1:], 5.0)
    assert lease is not None
    router.release(lease, Feedback.FAULT, now_s=6.0, problem="503")
    down = {item.key.tag: item for item in router.supplies(costs, 6.0, answer_s=7.0)}
    assert down["dear"].slots == 0
