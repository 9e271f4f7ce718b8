"""The adaptive limit: ramp, cuts per episode, pauses, growth."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quantroute.errors import ConfigurationError
from quantroute.routing import AdaptiveLimit, LimitSettings


def settings(**given: Any) -> LimitSettings:
    """Settings that take every 429 as a sign of overload."""
    return LimitSettings(**({"stray_share": 0.0} | given))


def loaded(limit: AdaptiveLimit, count: int, *, at_s: float = 0.0) -> AdaptiveLimit:
    for _ in range(count):
        limit.sent(at_s)
    return limit


def test_ramp_doubles_with_time_until_the_ceiling() -> None:
    limit = AdaptiveLimit(settings(initial=10, ceiling=50, ramp_interval_s=1.0))
    loaded(limit, 1)
    seen = []
    for now_s in (0.5, 1.0, 2.5, 9.0):
        limit.has_room(now_s)
        seen.append(limit.limit)
    assert seen == [10, 20, 40, 50]


def test_no_room_beyond_the_limit_and_the_next_doubling_is_announced() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=2, ceiling=4, ramp_interval_s=1.0)), 2)
    assert not limit.has_room(0.5)
    assert limit.retry_at_s(0.5) == 1.0
    assert limit.has_room(1.0)


def test_many_429s_of_one_episode_cut_once() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=100, ceiling=100, decrease=0.5)), 100)
    for _ in range(60):
        limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=None)
        limit.returned()
    assert limit.limit == 50
    assert limit.episodes == 1


def test_a_429_for_a_request_sent_after_the_cut_is_a_new_episode() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=100, ceiling=100, decrease=0.5)), 100)
    limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=None)
    limit.rate_limited(sent_at_s=1.5, now_s=2.0, retry_after_s=None)
    assert limit.episodes == 2
    assert limit.limit == 25


def test_retry_after_is_a_minimum_even_in_an_echo() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=8, ceiling=8, pause_s=0.1)), 8)
    limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=None)
    limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=30.0)
    assert limit.paused_until_s == 31.0
    assert not limit.has_room(30.9)


def test_own_pauses_grow_past_a_minute_while_nothing_is_answered() -> None:
    limit = loaded(AdaptiveLimit(settings(pause_s=0.5, max_pause_s=75.0)), 1)
    now_s = 0.0
    for _ in range(12):
        limit.rate_limited(sent_at_s=now_s + 1, now_s=now_s + 2, retry_after_s=None)
        now_s = limit.paused_until_s
    assert limit.paused_until_s - 2 >= 60.0


def test_growth_needs_use() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=10, ceiling=100, decrease=0.5)), 10)
    limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=None)
    for _ in range(9):
        limit.returned()
    before = limit.limit
    for _ in range(50):
        limit.succeeded()  # one of ten places in use: nothing is learnt about the limit
    assert limit.limit == before
    loaded(limit, before)
    for _ in range(50):
        limit.succeeded()
    assert limit.limit > before


@pytest.mark.parametrize("in_flight", range(1, 13))
def test_a_cut_with_few_in_flight_is_grown_out_of(in_flight: int) -> None:
    """0.7 of two is 1.4, of which one can be in use; that is all of it."""
    limit = loaded(AdaptiveLimit(settings(initial=16, ceiling=100)), in_flight)
    limit.rate_limited(sent_at_s=0.0, now_s=0.1, retry_after_s=None)
    for _ in range(in_flight):
        limit.returned()
    for _ in range(10_000):  # an answer, and whatever there is room for
        loaded(limit, limit.limit - limit.in_flight)
        limit.succeeded()
        limit.returned()
    assert limit.limit == 100


def test_a_strict_time_that_is_over_is_left_within_minutes() -> None:
    """From three to two hundred in twenty windows of answers, half a minute each; not in eighty."""
    limit = loaded(AdaptiveLimit(settings(initial=16, ceiling=500)), 5)
    limit.rate_limited(sent_at_s=0.0, now_s=0.1, retry_after_s=None)
    for _ in range(5):
        limit.returned()
    seen = []
    for _ in range(20):
        for _ in range(limit.limit):
            loaded(limit, limit.limit - limit.in_flight)
            limit.succeeded()
        seen.append(limit.limit)
    assert seen[2] <= 6  # with care at first
    assert seen[-1] > 200
    limit.rate_limited(sent_at_s=1.0, now_s=2.0, retry_after_s=None)
    cut = limit.limit
    loaded(limit, cut - limit.in_flight)
    for _ in range(cut):
        limit.succeeded()
    assert limit.limit <= 1.06 * cut  # and with care again after the next cut


def test_the_limit_never_falls_below_one() -> None:
    limit = loaded(AdaptiveLimit(settings(initial=1, ceiling=1)), 1)
    for episode in range(5):
        limit.rate_limited(sent_at_s=2.0 * episode + 1, now_s=2.0 * episode + 2, retry_after_s=0.0)
    assert limit.limit == 1


def test_a_few_percent_of_429s_are_weather_and_do_not_bring_the_limit_down() -> None:
    """Five in a hundred refused at random: with a cut for each, the limit would end below ten."""
    rng, now_s = random.Random(1), 0.0
    limit = AdaptiveLimit(LimitSettings(initial=200, ceiling=200))
    for _ in range(20_000):
        now_s += 0.01
        while limit.in_flight < limit.limit:
            limit.sent(now_s)
        if rng.random() < 0.05:
            limit.rate_limited(sent_at_s=now_s, now_s=now_s, retry_after_s=None)
        else:
            limit.succeeded()
        limit.returned()
    assert limit.limit > 150


def test_an_overload_after_a_long_good_time_still_cuts_at_once() -> None:
    limit = AdaptiveLimit(LimitSettings(initial=100, ceiling=100, decrease=0.5))
    for now_s in range(1_000):
        loaded(limit, 1, at_s=float(now_s)).succeeded()
        limit.returned()
    before = loaded(limit, 100, at_s=1_000.0).episodes
    for _ in range(250):  # what the ramp's requests allow as well
        limit.rate_limited(sent_at_s=1_000.0, now_s=1_001.0, retry_after_s=None)
    assert (before, limit.episodes) == (0, 1)


def test_a_stray_with_retry_after_pauses_without_a_cut() -> None:
    limit = loaded(AdaptiveLimit(LimitSettings(initial=100, ceiling=100)), 100)
    limit.rate_limited(sent_at_s=0.0, now_s=1.0, retry_after_s=5.0)
    assert (limit.limit, limit.episodes, limit.paused_until_s) == (100, 0, 6.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"initial": 0},
        {"initial": 5, "ceiling": 4},
        {"decrease": 1.0},
        {"pause_s": 0.0},
        {"stray_share": 1.0},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        LimitSettings(**bad)
