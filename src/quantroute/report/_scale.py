"""Numbers on a page: round ticks, short forms, quantiles. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from quantroute.money import format_usd

__all__ = [
    "Spread",
    "log_ticks",
    "nice_ticks",
    "per_million_text",
    "seconds_text",
    "short_number",
    "span_text",
    "usd_text",
    "with_unit",
]

_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_TICKS: Final = 50
#: Less than this is nothing: a step of it could not be told from zero.
_LEAST: Final = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Quantiles of a sample, in the unit of its values."""

    low: float  # 5%
    first: float  # 25%
    median: float
    third: float  # 75%
    high: float  # 95%
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of the values; None if there are none."""
        ranked = sorted(values)
        if not ranked:
            return None
        low, first, median, third, high = (
            _quantile(ranked, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)
        )
        return cls(low=low, first=first, median=median, third=third, high=high, count=len(ranked))


def _quantile(ranked: Sequence[float], share: float) -> float:
    """Between the two neighbours, linearly."""
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def nice_ticks(highest: float, *, about: int = 4) -> list[float]:
    """Round numbers from zero to at least `highest`, some `about` steps apart."""
    if not math.isfinite(highest) or highest < _LEAST:
        return [0.0, 1.0]
    raw = highest / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * step for step in _STEPS if power * step >= raw * (1 - 1e-9))
    count = min(_MOST_TICKS, math.ceil(highest / step - 1e-9))
    return [step * index for index in range(count + 1)]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """Powers of ten, with their 2 and 5 where there are few, that span both; both positive."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    low = max((tick for tick in ticks if tick <= lowest), default=ticks[0])
    high = min((tick for tick in ticks if tick >= highest), default=ticks[-1])
    return [tick for tick in ticks if low <= tick <= high] if high > low else [low, low * 10]


def with_unit(value: float) -> tuple[float, str] | None:
    """A number from ten thousand on as one of thousands, millions or (G) billions."""
    if abs(value) < 10_000:
        return None
    # 999,960 would be 1000.0k.
    units = (("G", 1e9), ("M", 1e6), ("k", 1e3))
    return next((value / size, unit) for unit, size in units if round(abs(value) / size, 1) >= 1)


def short_number(value: float) -> str:
    """Three digits or so: 0.012, 1.5, 240, 12.5k, 6.8M."""
    if (found := with_unit(value)) is not None:
        return f"{found[0]:.1f}".removesuffix(".0") + found[1]
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds_text(value: float) -> str:
    """A short time, such as one answer takes: 45 ms, 1.2 s, 3.5 min."""
    if value < 0.9995:  # from there on it would be 1e+03 ms
        return f"{value * 1_000:.3g} ms"
    return f"{value:.3g} s" if value < 100 else span_text(value)


def span_text(seconds: float) -> str:
    """How long something went on: 45 s, 12 min, 3.4 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:,.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3_600:,.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.1f} days"


def usd_text(amount_pusd: int) -> str:
    """Money with cents where it is much, with four decimals where it is not."""
    return format_usd(amount_pusd, places=2 if abs(amount_pusd) >= 10**13 else 4)


def per_million_text(amount_pusd: int, tokens: int) -> str:
    """Dollars per million tokens, for display only."""
    return "-" if not tokens else f"${Decimal(amount_pusd) / tokens / 1_000_000:.2f}"
