"""Published prices to `Pricing`: exact, nothing guessed, nothing discounted twice."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from quantroute.money import parse_price
from quantroute.pricing import PriceOverride, Pricing

__all__ = ["parse_pricing"]

# `discount` is a number that the shown prices already contain: applying it again under-counts.
# Source: Novita, Kimi K2.5, 2026-08-22: 0.57 shown, base 0.60, discount 0.05.
_NOT_PRICES: Final = frozenset({"discount", "overrides"})
_CONDITIONS: Final = frozenset({"min_prompt_tokens", "utc_start", "utc_end", "utc_days"})
_WEEKDAYS: Final = {
    name: number
    for number, name in enumerate(
        ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    )
}

_UNREADABLE: Final = PriceOverride(prices={"overrides": None})
"""Stands for an override we cannot read: an unmetered dimension, so the endpoint has no bound."""


class _NotUnderstood(ValueError):
    """A condition in a form that was never published."""


def parse_pricing(published: Mapping[str, Any]) -> Pricing:
    """The price table of one endpoint or model; unusable prices become None, never zero.

    Source: OpenRouter field `pricing`, strings in USD per token.
    """
    prices = {"prompt": None, "completion": None} | _prices(published, besides=_NOT_PRICES)
    entries = published.get("overrides")
    if entries is None:
        return Pricing(prices=prices)
    if not isinstance(entries, list):
        return Pricing(prices=prices, overrides=(_UNREADABLE,))
    return Pricing(prices=prices, overrides=tuple(map(_override, entries)))


def _prices(published: Mapping[str, Any], *, besides: frozenset[str]) -> dict[str, Decimal | None]:
    return {name: parse_price(value) for name, value in published.items() if name not in besides}


def _override(entry: object) -> PriceOverride:
    """One conditional price table.

    A misread condition could charge the base price where a dearer one applies, so an override that
    is not understood makes the whole price list unbounded rather than being skipped.
    """
    if not isinstance(entry, dict):
        return _UNREADABLE
    try:
        start, end = _minute(entry.get("utc_start")), _minute(entry.get("utc_end"))
        if (start is None) != (end is None):
            return _UNREADABLE
        return PriceOverride(
            prices=_prices(entry, besides=_CONDITIONS),
            above_input_tokens=_whole(entry.get("min_prompt_tokens")),
            utc_start_minute=start,
            utc_end_minute=end,
            utc_weekdays=_weekdays(entry.get("utc_days")),
        )
    except _NotUnderstood:
        return _UNREADABLE


def _whole(value: object) -> int | None:
    """A condition's number as an int; the schema types it as a plain JSON number."""
    if value is None:
        return None
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _NotUnderstood
    return value


def _minute(value: object) -> int | None:
    """Minute of the day for an HHMM clock number: 1030 is 10:30, 0 is midnight, 2400 its end."""
    clock = _whole(value)
    if clock is None:
        return None
    hour, minute = divmod(clock, 100)
    if minute >= 60 or clock > 2400:
        raise _NotUnderstood
    return hour * 60 + minute


def _weekdays(value: object) -> frozenset[int] | None:
    """Weekday numbers (0 = Monday) for lower-case English names.

    Source: schema of the service's Python SDK 1.3.84, `PricingOverride.utc_days`; no archived list
    has used it, so an unknown spelling is refused rather than guessed.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise _NotUnderstood
    days = [_WEEKDAYS.get(day.lower()) if isinstance(day, str) else None for day in value]
    if None in days:
        raise _NotUnderstood
    return frozenset(day for day in days if day is not None)
