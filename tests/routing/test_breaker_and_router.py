"""The breaker's states, and the router's choice among endpoints."""

from __future__ import annotations

from quantroute.domain import Endpoint, Quantization
from quantroute.pricing import Pricing
from quantroute.routing import (
    Breaker,
    BreakerSettings,
    BreakerState,
    Candidate,
    Feedback,
    LimitSettings,
    Router,
    in_order,
)


def candidate(tag: str, cost: int, *, status: int = 0) -> Candidate:
    endpoint = Endpoint(
        model="m/x",
        tag=tag,
        provider_name=tag.title(),
        quantization=Quantization.INT4,
        pricing=Pricing.flat(input_usd_per_token="0.000001", output_usd_per_token="0.000002"),
        status=status,
    )
    return Candidate(endpoint=endpoint, expected_pusd=cost, worst_pusd=2 * cost, max_tokens=10)


def opened(breaker: Breaker, *, now_s: float = 1.0) -> Breaker:
    for _ in range(breaker.settings.failures):
        breaker.failed(sent_at_s=0.5, now_s=now_s, problem="503")
    return breaker


def test_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(BreakerSettings(failures=3, pause_s=5.0))
    results = [breaker.failed(sent_at_s=0.5, now_s=1.0, problem="503") for _ in range(3)]
    assert results == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits(5.9)
    assert breaker.admits(6.0)


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    breaker = Breaker(BreakerSettings(failures=2))
    breaker.failed(sent_at_s=0.5, now_s=1.0, problem="503")
    breaker.succeeded()
    breaker.failed(sent_at_s=0.5, now_s=1.0, problem="503")
    assert breaker.state is BreakerState.CLOSED


def test_fast_faults_among_slow_answers_are_no_outage() -> None:
    """Twenty in two thousand fail at once, while the first answer takes half a minute."""
    breaker = Breaker(BreakerSettings())
    for _ in range(2_000):
        breaker.sent()
    assert not any(breaker.failed(sent_at_s=0.0, now_s=0.2, problem="503") for _ in range(20))
    breaker.succeeded()
    for number in range(8):  # then nothing but faults: whatever is sent comes back as one
        breaker.sent()
        is_open = breaker.failed(sent_at_s=40.0, now_s=41.0, problem="503")
        assert is_open is (number == 7)


def test_what_tells_nothing_does_not_dilute_faults() -> None:
    breaker = Breaker(BreakerSettings())
    for _ in range(500):
        breaker.sent()
        breaker.abandoned(sent_at_s=0.0)  # 429s, cancelled requests
    for _ in range(8):
        breaker.sent()
        breaker.failed(sent_at_s=1.0, now_s=1.1, problem="503")
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time_and_longer_pauses_after_failed_probes() -> None:
    breaker = opened(Breaker(BreakerSettings(failures=1, pause_s=4.0, max_pause_s=100.0)))
    breaker.sent()
    assert not breaker.admits(5.0)
    breaker.failed(sent_at_s=5.0, now_s=6.0, problem="503")
    assert breaker.open_until_s == 6.0 + 8.0
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_echoes_of_an_outage_do_not_lengthen_it() -> None:
    breaker = opened(Breaker(BreakerSettings(failures=1, pause_s=4.0)))
    assert not breaker.failed(sent_at_s=0.9, now_s=3.0, problem="503")
    assert breaker.open_until_s == 5.0


def test_a_cancelled_probe_leaves_the_way_open_for_the_next() -> None:
    breaker = opened(Breaker(BreakerSettings(failures=1, pause_s=1.0)))
    breaker.sent()
    breaker.abandoned(sent_at_s=9.0)
    assert breaker.admits(10.0)


def test_order_is_health_then_cost() -> None:
    names = [
        item.endpoint.tag
        for item in in_order(
            [candidate("dear", 9), candidate("sick", 1, status=-2), candidate("a", 3)]
        )
    ]
    assert names == ["a", "dear", "sick"]


def test_cheapest_is_filled_first_then_spills_to_the_next() -> None:
    router = Router(10, limits=LimitSettings(initial=2, ceiling=2))
    candidates = in_order([candidate("dear", 9), candidate("cheap", 1)])
    leases = [router.acquire(candidates, 0.0) for _ in range(5)]
    tags = [lease.candidate.endpoint.tag if lease else None for lease in leases]
    assert tags == ["cheap", "cheap", "dear", "dear", None]


def test_the_first_wave_waits_for_the_cheapest_to_ramp_up() -> None:
    """It doubles in a quarter of a second; an answer of the dearer one is paid for good."""
    router = Router(max_in_flight=10, limits=LimitSettings(initial=4, ceiling=8))
    found = in_order([candidate("cheap", 1), candidate("dear", 5)])
    leases = [router.acquire(found, 0.0) for _ in range(4)]
    assert {lease.candidate.endpoint.tag for lease in leases if lease} == {"cheap"}
    assert router.acquire(found, 0.1) is None
    assert router.retry_at_s(found, 0.1) == 0.25
    assert router.with_room(found, 0.1) == []
    tags = [lease.candidate.endpoint.tag for _ in range(6) if (lease := router.acquire(found, 0.3))]
    assert tags == ["cheap"] * 4 + ["dear"] * 2


def test_nobody_waits_for_an_endpoint_that_refuses_or_fails() -> None:
    limits = LimitSettings(initial=1, ceiling=8, stray_share=0.0)
    router = Router(max_in_flight=10, limits=limits, breakers=BreakerSettings(failures=1))
    found = in_order([candidate("a", 1), candidate("b", 2), candidate("c", 3)])
    first = router.acquire(found, 0.0)
    assert first is not None
    router.release(first, Feedback.FAULT, now_s=0.1, problem="503")
    second = router.acquire(found, 0.1)
    assert second is not None
    router.release(second, Feedback.RATE_LIMITED, now_s=0.2)
    third = router.acquire(found, 0.2)
    assert third is not None
    assert third.candidate.endpoint.tag == "c"


def test_the_account_limit_holds_over_all_endpoints() -> None:
    router = Router(3, limits=LimitSettings(initial=2, ceiling=2))
    candidates = in_order([candidate("dear", 9), candidate("cheap", 1)])
    assert sum(router.acquire(candidates, 0.0) is not None for _ in range(5)) == 3


def test_one_endpoints_429_pauses_it_alone() -> None:
    router = Router(10)
    candidates = in_order([candidate("dear", 9), candidate("cheap", 1)])
    lease = router.acquire(candidates, 0.0)
    assert lease is not None
    router.release(lease, Feedback.RATE_LIMITED, now_s=1.0, retry_after_s=60.0)
    following = router.acquire(candidates, 2.0)
    assert following is not None
    assert following.candidate.endpoint.tag == "dear"


def test_the_services_own_429_pauses_everything_and_blames_nobody() -> None:
    router = Router(10)
    candidates = in_order([candidate("dear", 9), candidate("cheap", 1)])
    lease = router.acquire(candidates, 0.0)
    assert lease is not None
    router.release(lease, Feedback.ACCOUNT_LIMITED, now_s=1.0, retry_after_s=5.0)
    assert router.acquire(candidates, 2.0) is None
    assert router.retry_at_s(candidates, 2.0) == 6.0
    assert router.acquire(candidates, 6.0) is not None


def test_open_breaker_announces_when_it_may_be_tried() -> None:
    router = Router(10, breakers=BreakerSettings(failures=1, pause_s=7.0))
    only = in_order([candidate("cheap", 1)])
    lease = router.acquire(only, 0.0)
    assert lease is not None
    assert router.release(lease, Feedback.FAULT, now_s=1.0, problem="503")
    assert router.acquire(only, 2.0) is None
    assert router.retry_at_s(only, 2.0) == 8.0
    report = router.reports(2.0)[0]
    assert (report.faults, report.breaker, report.last_problem) == (1, BreakerState.OPEN, "503")
