"""How many requests one endpoint is given at once: learnt, since nobody publishes it.

A time-based ramp first: a rejection comes back in a fraction of a second while an answer takes
many, so doubling every `ramp_interval_s` until the first 429 finds a generous provider's room in
about a second and a strict one's with few wasted requests. After a cut: multiplicative decrease,
then additive increase, which hastens once the room before the cut has been found again.

One cut per episode. An episode is defined by sending order, not by a timer: a 429 for a request
that was sent *before* the last cut is an echo of the same overload and changes nothing.

No cut for strays. Some providers refuse a few percent of requests however few there are, and cuts
for those would bring any limit down to a handful. So one refusal per eight answers (during the
ramp: per eight requests, since answers take longer than refusals) is taken as weather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quantroute.errors import ConfigurationError

__all__ = ["AdaptiveLimit", "LimitSettings"]

#: Strays in a row that a long good time excuses.
_MOST_STRAYS: Final = 8.0
#: The room that was found before is looked for with care; where it is gone by, growth doubles with
#: each window, three times: a limit of three that is lifted is left after minutes, not an hour.
_CAREFUL_WINDOWS: Final = 4
_MOST_DOUBLINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Bounds and speeds of the adaptive limit.

    Args:
        initial: requests in flight at the start of the ramp.
        ceiling: never more than this many in flight at one endpoint.
        ramp_interval_s: the ramp doubles once per interval while nothing is refused.
        decrease: factor of a cut, applied to what was really in flight.
        increase_share: growth per full window of answers, as a share of the limit (at least 1), in
            the first windows after a cut; later ones double it, up to eight times.
        pause_s: first pause after a 429 without Retry-After; doubles per episode without an answer.
        max_pause_s: the longest such pause; beyond a minute, since limits are often per minute.
        stray_share: 429s that are no sign of overload, per answer; 0 takes every one as a sign.
    """

    initial: int = 256
    ceiling: int = 4_000
    ramp_interval_s: float = 0.25
    decrease: float = 0.7
    increase_share: float = 0.05
    pause_s: float = 0.5
    max_pause_s: float = 75.0
    stray_share: float = 0.125

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.ceiling:
            raise ConfigurationError(
                f"limits need 1 <= initial <= ceiling, not {self.initial} and {self.ceiling}"
            )
        if not 0 < self.decrease < 1:
            raise ConfigurationError(f"decrease must lie between 0 and 1, not {self.decrease}")
        if not 0 <= self.stray_share < 1:
            raise ConfigurationError(f"stray_share must lie in [0, 1), not {self.stray_share}")
        if min(self.ramp_interval_s, self.pause_s, self.max_pause_s) <= 0:
            raise ConfigurationError("ramp_interval_s, pause_s and max_pause_s must be positive")


@dataclass(slots=True)
class AdaptiveLimit:
    """The limit of one endpoint, or of the whole account. Times are monotonic seconds."""

    settings: LimitSettings = field(default_factory=LimitSettings)
    in_flight: int = 0
    paused_until_s: float = 0.0
    episodes: int = 0
    _limit: float = field(init=False)
    _is_ramping: bool = field(default=True, init=False)
    _next_double_s: float | None = field(default=None, init=False)
    _last_cut_s: float = field(default=float("-inf"), init=False)
    _fruitless_episodes: int = field(default=0, init=False)
    _strays_allowed: float = field(default=0.0, init=False)
    _windows: float = field(default=0.0, init=False)
    """Full windows of answers since the last cut."""

    def __post_init__(self) -> None:
        self._limit = float(self.settings.initial)

    @property
    def limit(self) -> int:
        """Requests that may be in flight at once, now."""
        return max(1, int(self._limit))

    @property
    def is_ramping(self) -> bool:
        """Whether the endpoint has never refused for a rate: how much it bears is not known."""
        return self._is_ramping

    def has_room(self, now_s: float) -> bool:
        """Whether one more request may be sent at `now_s`."""
        self._ramp(now_s)
        return now_s >= self.paused_until_s and self.in_flight < self.limit

    def grows_soon(self, now_s: float) -> bool:
        """Whether only the ramp keeps the next request: a wait of a fraction of a second."""
        return (
            self._is_ramping
            and self._limit < self.settings.ceiling
            and (now_s >= self.paused_until_s)
        )

    def retry_at_s(self, now_s: float) -> float | None:
        """When room may appear by the mere passing of time; None if only an answer can make it."""
        if now_s < self.paused_until_s:
            return self.paused_until_s
        if self._is_ramping and self._next_double_s is not None:
            return self._next_double_s
        return None

    def sent(self, now_s: float) -> None:
        """Count a request that is about to be sent."""
        if self._is_ramping and self._next_double_s is None:
            self._next_double_s = now_s + self.settings.ramp_interval_s
        if self._is_ramping:
            self._strays_allowed += self.settings.stray_share
        self.in_flight += 1

    def returned(self) -> None:
        """Count a request that is over, whatever came of it."""
        self.in_flight -= 1

    def succeeded(self) -> None:
        """Learn from an answer: grow, if the limit was really in use. Call before `returned`."""
        self._fruitless_episodes = 0
        if self._strays_allowed < _MOST_STRAYS:
            self._strays_allowed += self.settings.stray_share
        # Beside the whole number that can be in flight: 1 of 1.4 is all there is room for.
        if not self._is_ramping and self.in_flight >= 0.9 * self.limit:
            self._windows += 1.0 / self.limit
            haste = 2.0 ** min(_MOST_DOUBLINGS, max(0, int(self._windows) - _CAREFUL_WINDOWS))
            step = haste * max(1.0, self.settings.increase_share * self._limit) / self._limit
            self._limit = min(self._limit + step, float(self.settings.ceiling))

    def rate_limited(self, *, sent_at_s: float, now_s: float, retry_after_s: float | None) -> None:
        """Learn from a 429: cut and pause, once per episode. Call before `returned`."""
        if sent_at_s <= self._last_cut_s:
            self.pause(now_s, retry_after_s)  # the server's word is a minimum, even in an echo
            return
        if self._strays_allowed >= 1.0:
            self._strays_allowed -= 1.0
            self.pause(now_s, retry_after_s)
            return
        own_pause_s = min(
            self.settings.max_pause_s, self.settings.pause_s * 2.0**self._fruitless_episodes
        )
        self._is_ramping = False
        self._strays_allowed = self._windows = 0.0
        self._limit = max(1.0, min(self._limit, self.in_flight) * self.settings.decrease)
        self._last_cut_s = now_s
        self.episodes += 1
        self._fruitless_episodes = min(self._fruitless_episodes + 1, 30)
        self.pause(now_s, retry_after_s or own_pause_s)

    def pause(self, now_s: float, wait_s: float | None) -> None:
        """Send nothing for at least `wait_s` seconds; a pause that lasts longer stands."""
        if wait_s is not None:
            self.paused_until_s = max(self.paused_until_s, now_s + wait_s)

    def _ramp(self, now_s: float) -> None:
        if not self._is_ramping or self._next_double_s is None:
            return
        while now_s >= self._next_double_s and self._is_ramping:
            self._limit = min(self._limit * 2, float(self.settings.ceiling))
            self._next_double_s += self.settings.ramp_interval_s
            self._is_ramping = self._limit < self.settings.ceiling
