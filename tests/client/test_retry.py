"""Retry decisions and every form of Retry-After."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute._headers import media_type, retry_after_s
from quantroute.client._classify import Classified, Kind
from quantroute.client._retry import (
    GiveUp,
    Retry,
    RetryPolicy,
    backoff_s,
    next_step,
)

NOW = datetime(2026, 9, 10, 6, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": " 1.5 "}, 1.5),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "1e9"}, 3600.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": ""}, None),
        ({"Retry-After": "Thu, 10 Sep 2026 06:02:00 GMT"}, 120.0),
        ({"Retry-After": "Thursday, 10-Sep-26 06:02:00 GMT"}, 120.0),
        ({"Retry-After": "Thu Sep 10 06:02:00 2026"}, 120.0),
        ({"Retry-After": "Thu, 10 Sep 2026 05:00:00 GMT"}, 0.0),
        # The server's clock is an hour ahead of ours: only its own Date makes sense of its date.
        (
            {
                "Retry-After": "Thu, 10 Sep 2026 07:00:30 GMT",
                "Date": "Thu, 10 Sep 2026 07:00:00 GMT",
            },
            30.0,
        ),
        ({"Retry-After-Ms": "1500"}, 1.5),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1789020010000"}, 10.0),
        # The local clock is an hour behind the service's.
        (
            {
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": "1789023610000",
                "Date": "Thu, 10 Sep 2026 07:00:00 GMT",
            },
            10.0,
        ),
        ({"X-RateLimit-Remaining": "4", "X-RateLimit-Reset": "1789020010000"}, None),
    ],
)
def test_retry_after_in_every_form(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, now=NOW) == expected


@given(st.text(max_size=40))
def test_retry_after_survives_rubbish(text: str) -> None:
    wait_s = retry_after_s({"Retry-After": text}, now=NOW)
    assert wait_s is None or 0.0 <= wait_s <= 3600.0


@given(st.integers(0, 10_000), st.integers(0, 2**32))
def test_backoff_stays_within_its_bounds(attempt: int, seed: int) -> None:
    wait_s = backoff_s(attempt, base_s=0.5, cap_s=60.0, rng=random.Random(seed))
    assert 0.0 <= wait_s <= min(60.0, 0.5 * 2.0 ** min(attempt, 30))


def decide(kind: Kind, **facts: float) -> Retry | GiveUp:
    settings = {"errors": 1, "paid_errors": 0, "limited_for_s": 0.0} | facts
    retry_hint_s = settings.pop("hint_s", None)
    is_endpoint_fault = bool(settings.pop("is_endpoint_fault", True))
    return next_step(
        Classified(kind=kind, retry_after_s=retry_hint_s, is_endpoint_fault=is_endpoint_fault),
        RetryPolicy(max_attempts=3, max_paid_attempts=2, rate_limit_budget_s=100.0),
        rng=random.Random(1),
        **settings,
    )


def test_errors_are_counted() -> None:
    assert isinstance(decide(Kind.TRANSIENT, errors=2), Retry)
    assert isinstance(decide(Kind.TRANSIENT, errors=3), GiveUp)


def test_attempts_that_cost_money_are_counted_apart() -> None:
    assert isinstance(decide(Kind.UNKNOWN, errors=2, paid_errors=1), Retry)
    assert isinstance(decide(Kind.UNKNOWN, errors=2, paid_errors=2), GiveUp)


def test_rate_limits_use_a_time_budget_and_no_error_count() -> None:
    assert isinstance(decide(Kind.RATE_LIMITED, errors=99, limited_for_s=99.0), Retry)
    assert isinstance(decide(Kind.RATE_LIMITED, limited_for_s=101.0), GiveUp)


def test_the_servers_hint_is_a_minimum() -> None:
    """For the service's own troubles; an endpoint's hint pauses the endpoint (see the router)."""
    step = decide(Kind.TRANSIENT, hint_s=42.0, is_endpoint_fault=False)
    assert isinstance(step, Retry)
    assert step.after_s >= 42.0
    elsewhere = decide(Kind.TRANSIENT, hint_s=42.0)
    assert isinstance(elsewhere, Retry)
    assert elsewhere.after_s < 1.0


@pytest.mark.parametrize(
    ("given", "media"),
    [
        ({"Content-Type": "Text/Event-Stream; charset=utf-8"}, "text/event-stream"),
        ({"Content-Type": " application/json"}, "application/json"),
        ({"Content-Type": ""}, ""),
        ({}, ""),
    ],
)
def test_what_kind_of_body_headers_name(given: dict[str, str], media: str) -> None:
    assert media_type(given) == media
