"""When to try again, decided by facts: kinds and numbers, never by the words of a message."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quantroute.client._classify import Classified, Kind
from quantroute.errors import ConfigurationError
from quantroute.routing import Feedback

__all__ = ["GiveUp", "Retry", "RetryPolicy", "backoff_s", "next_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long a row is worth trying.

    Args:
        max_attempts: attempts that may end in an error before the row is given up for this run.
        max_paid_attempts: attempts that cost, or may have cost, money without giving an answer.
        base_s, cap_s: full jitter, uniform in [0, min(cap_s, base_s * 2**n)] before error retry n.
        rate_limit_budget_s: total time a row may spend on 429s; those do not count as errors.
    """

    max_attempts: int = 6
    max_paid_attempts: int = 3
    base_s: float = 0.5
    cap_s: float = 60.0
    rate_limit_budget_s: float = 900.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.max_paid_attempts < 1:
            raise ConfigurationError("max_attempts and max_paid_attempts must be at least 1")
        if not all(item >= 0 for item in (self.base_s, self.cap_s, self.rate_limit_budget_s)):
            raise ConfigurationError("retry times must not be negative")


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again no sooner than `after_s` seconds from now."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop trying this row in this run."""

    reason: str


def backoff_s(attempt: int, *, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Full jitter: uniform in [0, min(cap_s, base_s * 2**attempt)], seconds; attempt from 0."""
    return rng.uniform(0.0, min(cap_s, base_s * 2.0 ** min(attempt, 30)))


def next_step(
    outcome: Classified,
    policy: RetryPolicy,
    *,
    errors: int,
    paid_errors: int,
    limited_for_s: float,
    rng: random.Random,
) -> Retry | GiveUp:
    """What to do after an attempt without an answer.

    Args:
        errors: attempts of this row that ended in an error so far, this one included.
        paid_errors: those among them that cost, or may have cost, money.
        limited_for_s: seconds since the row's first 429.
    """
    if outcome.kind in (Kind.RATE_LIMITED, Kind.ACCOUNT_LIMITED):
        if limited_for_s > policy.rate_limit_budget_s:
            return GiveUp(f"rate limited for {limited_for_s:.0f} s")
        # The endpoint's limiter holds the pause; the row itself may go elsewhere at once.
        return Retry(rng.uniform(0.0, min(0.1, policy.base_s)))
    if errors >= policy.max_attempts:
        return GiveUp(f"{errors} attempts failed")
    if paid_errors >= policy.max_paid_attempts:
        return GiveUp(f"{paid_errors} attempts cost money without an answer")
    own_s = backoff_s(errors - 1, base_s=policy.base_s, cap_s=policy.cap_s, rng=rng)
    if outcome.feedback is Feedback.FAULT:
        return Retry(own_s)  # a hint pauses the endpoint that gave it, not the row: see the router
    return Retry(max(own_s, outcome.retry_after_s or 0.0))
