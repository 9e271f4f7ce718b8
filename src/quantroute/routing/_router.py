"""Which allowed endpoint takes the next request: the cheapest that has room.

Pure: the caller brings the time and reports what came of each request. Waiting, timers and wake-ups
live in `quantroute.client`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from quantroute.domain import Endpoint, EndpointKey
from quantroute.routing._breaker import Breaker, BreakerSettings, BreakerState
from quantroute.routing._limit import AdaptiveLimit, LimitSettings
from quantroute.routing._mix import Supply

__all__ = [
    "Candidate",
    "EndpointReport",
    "Feedback",
    "Lease",
    "Router",
    "RoutingMode",
    "in_order",
]


_SMOOTHING: Final = 0.05


class RoutingMode(enum.Enum):
    """Who chooses the endpoint of a request among those that the policy allows."""

    PINNED = "pinned"  # we do; one endpoint per request
    DELEGATED = "delegated"  # the service does


class Feedback(enum.Enum):
    """What a finished request says about the endpoint that had it."""

    SUCCESS = "success"
    RATE_LIMITED = "rate limited"  # the endpoint's own limit
    ACCOUNT_LIMITED = "account limited"  # the service's limit on the account: nobody's fault
    FAULT = "fault"
    NEUTRAL = "neutral"  # cancelled, or the row's own fault


class Candidate(Struct, frozen=True, kw_only=True):
    """An endpoint that may serve a request, with what the request would cost there.

    Units: pico-dollars. `expected_pusd` orders candidates: what one *accepted* row is expected to
    cost. `attempt_pusd` is what the price list lets one expect of one attempt, 0 if nobody learns
    from it; `worst_pusd` is what is reserved. `max_tokens` is the output limit to send. `members`
    are given if the service may choose among several; then `endpoint` stands for all of them.
    """

    endpoint: Endpoint
    expected_pusd: int
    worst_pusd: int
    max_tokens: int
    attempt_pusd: int = 0
    members: tuple[EndpointKey, ...] = ()


class Lease(Struct, frozen=True):
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
    answer_s: float | None = None

    def has_room(self, now_s: float) -> bool:
        return self.breaker.admits(now_s) and self.limit.has_room(now_s)

    def is_worth_waiting_for(self, now_s: float) -> bool:
        """Asked of one without room."""
        return self.breaker.state is BreakerState.CLOSED and self.limit.grows_soon(now_s)


@dataclass(slots=True)
class Router:
    """Limits and breakers of every endpoint, and of the account as a whole.

    `own_limits` are of endpoints whose limits are known instead of learnt. Local endpoints count
    among the requests in flight, but what the service says to the account does not concern them.
    `quotas`, if set, are the most requests each endpoint may have in flight, none if not named:
    the mix that a deadline needs.
    """

    max_in_flight: int
    limits: LimitSettings = field(default_factory=LimitSettings)
    breakers: BreakerSettings = field(default_factory=BreakerSettings)
    own_limits: Mapping[EndpointKey, LimitSettings] = field(default_factory=dict)
    quotas: Mapping[EndpointKey, int] | None = None
    _local_in_flight: int = field(default=0, init=False)
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
        return self._account.in_flight + self._local_in_flight

    def acquire(self, candidates: Sequence[Candidate], now_s: float) -> Lease | None:
        """A lease at the cheapest candidate with room, healthy before degraded; None if none has.

        None too if a cheaper one than those with room has only yet to ramp up.

        `candidates` must be in order of preference, as `in_order` gives.
        """
        candidate = next(self._takers(candidates, now_s), None)
        if candidate is None:
            return None
        state = self._states[candidate.endpoint.key]
        if candidate.endpoint.is_local:
            self._local_in_flight += 1
        else:
            self._account.sent(now_s)
        state.limit.sent(now_s)
        state.breaker.sent()
        return Lease(candidate, now_s)

    def with_room(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """Those among `candidates` that would take one more request now, in their order."""
        return list(self._takers(candidates, now_s))

    def _takers(self, candidates: Sequence[Candidate], now_s: float) -> Iterator[Candidate]:
        if self.in_flight >= self.max_in_flight:
            return
        has_account = self._account.has_room(now_s)
        quotas = self._quotas_for(candidates)
        for candidate in candidates:
            key = candidate.endpoint.key
            if not (has_account or candidate.endpoint.is_local):
                continue
            state = self._state(key)
            if quotas is not None and state.limit.in_flight >= quotas.get(key, 0):
                continue
            if state.has_room(now_s):
                yield candidate
            elif state.is_worth_waiting_for(now_s):
                return  # a dearer one would be paid for what the next doubling takes

    def retry_at_s(self, candidates: Sequence[Candidate], now_s: float) -> float | None:
        """When `acquire` may succeed without any request returning; None if time alone won't do."""
        if self.in_flight >= self.max_in_flight:
            return None  # whatever an endpoint may have room for, only a return makes room here
        moments = []
        quotas = self._quotas_for(candidates)
        is_full = self._account.in_flight >= self._account.limit
        for candidate in candidates:
            key = candidate.endpoint.key
            if quotas is not None and self._state(key).limit.in_flight >= quotas.get(key, 0):
                continue  # a return, or another mix
            at_s = self._reopens_at_s(candidate.endpoint.key, now_s)
            if not candidate.endpoint.is_local:
                if now_s < self._account.paused_until_s:
                    at_s = self._account.paused_until_s
                elif is_full:
                    at_s = None
            moments.append(at_s)
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
                took_s = now_s - lease.sent_at_s
                before_s = took_s if state.answer_s is None else state.answer_s
                state.answer_s = before_s + _SMOOTHING * (took_s - before_s)
                state.limit.succeeded()
                state.breaker.succeeded()
                if not lease.candidate.endpoint.is_local:
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
        if lease.candidate.endpoint.is_local:
            self._local_in_flight -= 1
        else:
            self._account.returned()
        return opened

    def supplies(
        self, costs: Mapping[EndpointKey, float], now_s: float, *, answer_s: float
    ) -> tuple[Supply, ...]:
        """What each endpoint can give as far as it has shown; nothing while its breaker is open.

        One that never refused counts as boundless; where no answer has come yet, the mean of the
        others stands in, and `answer_s` if there is none at all.
        """
        states = {key: self._state(key) for key in costs}
        known = [state.answer_s for state in states.values() if state.answer_s is not None]
        mean_s = sum(known) / len(known) if known else answer_s
        supplies = []
        for key, state in states.items():
            slots = state.limit.settings.ceiling if state.limit.is_ramping else state.limit.limit
            if state.breaker.state is not BreakerState.CLOSED:
                slots = 0
            took_s = mean_s if state.answer_s is None else state.answer_s
            supplies.append(
                Supply(key=key, cost=costs[key], slots=slots, answer_s=max(took_s, 1e-3))
            )
        return tuple(supplies)

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

    def _quotas_for(self, candidates: Sequence[Candidate]) -> Mapping[EndpointKey, int] | None:
        """The quotas, unless they leave nothing for these: better late than never."""
        quotas = self.quotas
        if quotas is None or not any(item.endpoint.key in quotas for item in candidates):
            return None
        return quotas

    def _state(self, key: EndpointKey) -> _State:
        state = self._states.get(key)
        if state is None:
            limits = self.own_limits.get(key, self.limits)
            state = self._states[key] = _State(AdaptiveLimit(limits), Breaker(self.breakers))
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
