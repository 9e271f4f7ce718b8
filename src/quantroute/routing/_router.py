"""Which allowed endpoint takes the next request: the cheapest that has room.

Pure: the caller brings the time and reports what came of each request. Waiting, timers and wake-ups
live in `quantroute.client`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quantroute.domain import Endpoint, EndpointKey
from quantroute.routing._breaker import Breaker, BreakerSettings, BreakerState
from quantroute.routing._limit import AdaptiveLimit, LimitSettings

__all__ = ["Candidate", "EndpointReport", "Feedback", "Lease", "Router", "in_order"]


class Feedback(enum.Enum):
    """What a finished request says about the endpoint that had it."""

    SUCCESS = "success"
    RATE_LIMITED = "rate limited"  # the endpoint's own limit
    ACCOUNT_LIMITED = "account limited"  # the service's limit on the account: nobody's fault
    FAULT = "fault"
    NEUTRAL = "neutral"  # cancelled, or the row's own fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An endpoint that may serve a request, with what the request would cost there.

    Units: pico-dollars. `expected_pusd` orders candidates; `worst_pusd` is what is reserved.
    `max_tokens` is the output limit to send.
    """

    endpoint: Endpoint
    expected_pusd: int
    worst_pusd: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to have one request in flight at one endpoint, until it is released."""

    candidate: Candidate
    sent_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """A frozen view of one endpoint's state, for progress displays."""

    key: EndpointKey
    in_flight: int
    limit: int
    answered: int
    faults: int
    rate_limited: int
    breaker: BreakerState
    paused_for_s: float
    last_problem: str


@dataclass(slots=True)
class _State:
    limit: AdaptiveLimit
    breaker: Breaker
    answered: int = 0
    faults: int = 0
    rate_limited: int = 0

    def has_room(self, now_s: float) -> bool:
        return self.breaker.admits(now_s) and self.limit.has_room(now_s)


@dataclass(slots=True)
class Router:
    """Limits and breakers of every endpoint, and of the account as a whole."""

    max_in_flight: int
    limits: LimitSettings = field(default_factory=LimitSettings)
    breakers: BreakerSettings = field(default_factory=BreakerSettings)
    _states: dict[EndpointKey, _State] = field(default_factory=dict, init=False)
    _account: AdaptiveLimit = field(init=False)

    def __post_init__(self) -> None:
        self._account = AdaptiveLimit(
            LimitSettings(
                initial=self.max_in_flight,
                ceiling=self.max_in_flight,
                pause_s=self.limits.pause_s,
                max_pause_s=self.limits.max_pause_s,
            )
        )

    @property
    def in_flight(self) -> int:
        """Requests in flight at all endpoints together."""
        return self._account.in_flight

    def acquire(self, candidates: Sequence[Candidate], now_s: float) -> Lease | None:
        """A lease at the cheapest candidate with room, healthy before degraded; None if none has.

        `candidates` must be in order of preference, as `in_order` gives.
        """
        if not self._account.has_room(now_s):
            return None
        for candidate in candidates:
            state = self._state(candidate.endpoint.key)
            if state.has_room(now_s):
                self._account.sent(now_s)
                state.limit.sent(now_s)
                state.breaker.sent()
                return Lease(candidate, now_s)
        return None

    def with_room(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """Those among `candidates` whose endpoints would take one more request now."""
        return [item for item in candidates if self._state(item.endpoint.key).has_room(now_s)]

    def retry_at_s(self, candidates: Sequence[Candidate], now_s: float) -> float | None:
        """When `acquire` may succeed without any request returning; None if time alone won't do."""
        if now_s < self._account.paused_until_s:
            return self._account.paused_until_s
        if self._account.in_flight >= self._account.limit:
            return None  # whatever an endpoint may have room for, only a return makes room here
        moments = [self._reopens_at_s(candidate.endpoint.key, now_s) for candidate in candidates]
        return min((moment for moment in moments if moment is not None), default=None)

    def release(
        self,
        lease: Lease,
        feedback: Feedback,
        *,
        now_s: float,
        retry_after_s: float | None = None,
        problem: str = "",
    ) -> bool:
        """Give a lease back with what was learnt; True if the endpoint's breaker opened."""
        state = self._state(lease.candidate.endpoint.key)
        opened = False
        match feedback:
            case Feedback.SUCCESS:
                state.answered += 1
                state.limit.succeeded()
                state.breaker.succeeded()
                self._account.succeeded()
            case Feedback.RATE_LIMITED:
                state.rate_limited += 1
                state.breaker.abandoned(sent_at_s=lease.sent_at_s)
                state.limit.rate_limited(
                    sent_at_s=lease.sent_at_s, now_s=now_s, retry_after_s=retry_after_s
                )
            case Feedback.ACCOUNT_LIMITED:
                state.breaker.abandoned(sent_at_s=lease.sent_at_s)
                self._account.rate_limited(
                    sent_at_s=lease.sent_at_s, now_s=now_s, retry_after_s=retry_after_s
                )
            case Feedback.FAULT:
                state.faults += 1
                state.limit.pause(now_s, retry_after_s)
                opened = state.breaker.failed(
                    sent_at_s=lease.sent_at_s, now_s=now_s, problem=problem
                )
            case Feedback.NEUTRAL:
                state.breaker.abandoned(sent_at_s=lease.sent_at_s)
        state.limit.returned()
        self._account.returned()
        return opened

    def reports(self, now_s: float) -> tuple[EndpointReport, ...]:
        """One frozen row per endpoint that ever had a request."""
        return tuple(
            EndpointReport(
                key=key,
                in_flight=state.limit.in_flight,
                limit=state.limit.limit,
                answered=state.answered,
                faults=state.faults,
                rate_limited=state.rate_limited,
                breaker=state.breaker.state,
                paused_for_s=max(0.0, state.limit.paused_until_s - now_s),
                last_problem=state.breaker.last_problem,
            )
            for key, state in sorted(self._states.items())
        )

    def _state(self, key: EndpointKey) -> _State:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(AdaptiveLimit(self.limits), Breaker(self.breakers))
        return state

    def _reopens_at_s(self, key: EndpointKey, now_s: float) -> float | None:
        state = self._state(key)
        if state.breaker.state is BreakerState.PROBING:
            return None  # the probe's return decides
        limit_at_s = state.limit.retry_at_s(now_s)
        if state.breaker.state is BreakerState.OPEN:
            return max(state.breaker.open_until_s, limit_at_s or now_s)
        return limit_at_s


def in_order(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates by preference: healthy before degraded, then expected cost, then tag."""
    return tuple(
        sorted(
            candidates,
            key=lambda item: (
                item.endpoint.is_degraded,
                item.expected_pusd,
                item.endpoint.key,
            ),
        )
    )
