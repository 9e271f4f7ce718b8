"""A moment by which a run should be done, and what that asks of routing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from quantroute.errors import ConfigurationError
from quantroute.routing import Mix

__all__ = ["REPLAN_EVERY_S", "Deadline", "Pace", "deadline_s", "needed_per_s"]

#: Often enough for an endpoint that breaks down or is limited, seldom enough to cost nothing.
REPLAN_EVERY_S: Final = 2.0
#: Rates are estimates, and the slowest answers end last.
_MARGIN: Final = 1.15
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?[smh])+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)([smh])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Seconds from the start, and how many rows are wanted if no target says so.

    It steers which endpoints are used, nothing else: a run that is late goes on.
    """

    after_s: float
    rows: int | None = None

    def __post_init__(self) -> None:
        if not (self.after_s > 0 and math.isfinite(self.after_s)):
            raise ConfigurationError(f"a deadline is a positive time, not {self.after_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a run with a deadline stands. Negative `left_s`: it is late. Rates in answers/s."""

    left_s: float
    remaining_rows: float
    mix: Mix

    def __str__(self) -> str:
        mix = self.mix
        if self.left_s <= 0:
            return f"late by {-self.left_s:,.0f} s, every endpoint in use"
        if not mix.is_enough:
            return (
                f"too slow for the deadline: {mix.rate_per_s:,.1f} of {mix.needed_per_s:,.1f} "
                "answers/s, every endpoint in use"
            )
        count = len(mix.quotas)
        needed = "1 endpoint" if count == 1 else f"{count} endpoints"
        return f"deadline in {self.left_s:,.0f} s, {needed} needed"


def deadline_s(text: str) -> float:
    """Seconds from "45m", "1h30m", "90s".

    Raises:
        ConfigurationError: not such a time.
    """
    given = text.strip().lower()
    if not _DURATION.fullmatch(given):
        raise ConfigurationError(f"a deadline is a time like 45m, 1h30m or 90s, not {text!r}")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(given))


def needed_per_s(*, answers: float, left_s: float, answer_s: float) -> float:
    """Answers a second that are needed for so many more in the time left.

    The last answer has to be asked for one answer's time before the end, so that time is no longer
    there to ask in; but at least half of what is left counts, or a short run could never do.
    """
    if left_s <= 0:
        return math.inf
    return _MARGIN * answers / max(left_s - answer_s, left_s / 2)
