"""Keeps requests away from an endpoint that fails, and finds out cheaply when it is back.

    CLOSED --failures in a row--> OPEN --pause over--> PROBING --answer--> CLOSED
                                    ^                     |
                                    +------ failure ------+   (each time with a longer pause)

Only the endpoint's own faults count: not the row's (400, too long), not the account's (401, 402),
not rate limits, which have the adaptive limit.

A fault comes back in a fraction of a second, an answer takes many: when a run begins, two thousand
requests to an endpoint that fails one in a hundred bring twenty faults before the first answer. So
faults in a row open the breaker only if they are an eighth of what was sent since the last answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from quantroute.errors import ConfigurationError

__all__ = ["Breaker", "BreakerSettings", "BreakerState"]


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


# Looked up once: until Python 3.12 a member of an enum is found four times as slowly as a constant.
_CLOSED: Final = BreakerState.CLOSED
_OPEN: Final = BreakerState.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When to open and for how long.

    Args:
        failures: faults in a row, without an answer between them, that open the breaker, if they
            are `fault_share` of the requests sent since then.
        pause_s: first pause; doubles with each failed probe up to `max_pause_s`.
    """

    failures: int = 8
    pause_s: float = 5.0
    max_pause_s: float = 120.0
    fault_share: float = 0.125

    def __post_init__(self) -> None:
        if self.failures < 1 or self.pause_s <= 0 or self.max_pause_s < self.pause_s:
            raise ConfigurationError(
                "a breaker needs failures >= 1 and 0 < pause_s <= max_pause_s, "
                f"not {self.failures}, {self.pause_s}, {self.max_pause_s}"
            )
        if not 0 <= self.fault_share <= 1:
            raise ConfigurationError(f"fault_share must lie in [0, 1], not {self.fault_share}")


@dataclass(slots=True)
class Breaker:
    """The breaker of one endpoint. Times are monotonic seconds."""

    settings: BreakerSettings = field(default_factory=BreakerSettings)
    state: BreakerState = BreakerState.CLOSED
    times_opened: int = 0
    open_until_s: float = 0.0
    last_problem: str = ""
    _faults_in_a_row: int = field(default=0, init=False)
    _sent_since_answer: int = field(default=0, init=False)
    _opened_at_s: float = field(default=float("-inf"), init=False)
    _failed_probes: int = field(default=0, init=False)

    def admits(self, now_s: float) -> bool:
        """Whether a request may be sent; while probing, one at a time."""
        state = self.state
        return state is _CLOSED or (state is _OPEN and now_s >= self.open_until_s)

    def sent(self) -> None:
        """Note a request: the first one after the pause is the probe."""
        self._sent_since_answer += 1
        if self.state is _OPEN:
            self.state = BreakerState.PROBING

    def succeeded(self) -> None:
        """An answer came: closed, whatever was before."""
        self.state = _CLOSED
        self._faults_in_a_row = self._failed_probes = self._sent_since_answer = 0

    def failed(self, *, sent_at_s: float, now_s: float, problem: str) -> bool:
        """Note a fault; True if this one opened the breaker."""
        self.last_problem = problem
        if self.state is BreakerState.OPEN or sent_at_s <= self._opened_at_s:
            return False  # sent before it opened: the same outage, already acted upon
        if self.state is BreakerState.PROBING:
            self._failed_probes += 1
            self._open(now_s)
            return True
        self._faults_in_a_row += 1
        settings = self.settings
        if self._faults_in_a_row < max(
            settings.failures, settings.fault_share * self._sent_since_answer
        ):
            return False
        self._open(now_s)
        return True

    def abandoned(self, *, sent_at_s: float) -> None:
        """A request ended without telling anything about the endpoint (cancelled, row refused)."""
        self._sent_since_answer = max(0, self._sent_since_answer - 1)
        if self.state is BreakerState.PROBING and sent_at_s > self._opened_at_s:
            self.state = BreakerState.OPEN  # the pause is over, so the next request probes again

    def _open(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        self.times_opened += 1
        self._faults_in_a_row = self._sent_since_answer = 0
        self._opened_at_s = now_s
        pause_s = self.settings.pause_s * 2.0 ** min(self._failed_probes, 30)
        self.open_until_s = now_s + min(pause_s, self.settings.max_pause_s)
