"""Price tables of the simulated service, and the exact charge for one answer.

Deliberately written apart from the client's arithmetic: the two bills are compared digit by digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final

from quantroute.money import parse_price
from quantroute.pricing import PriceOverride, Pricing, TokenUsage

__all__ = ["Charge", "charge", "parse_pricing", "worst_case_usd"]

_EXACT: Final = Context(prec=60, traps=[Inexact, InvalidOperation])
_ZERO: Final = Decimal(0)
_CONDITIONS: Final = frozenset({"min_prompt_tokens", "utc_start", "utc_end", "utc_days"})
_NOT_PRICES: Final = frozenset({"discount", "overrides"})
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class Charge:
    """What one answer costs, exactly: USD for input, output and the request fee."""

    prompt_usd: Decimal
    completion_usd: Decimal
    request_usd: Decimal

    @property
    def total_usd(self) -> Decimal:
        """The sum, still exact."""
        return _EXACT.add(_EXACT.add(self.prompt_usd, self.completion_usd), self.request_usd)


FREE: Final = Charge(_ZERO, _ZERO, _ZERO)


def parse_pricing(wire: Mapping[str, Any]) -> Pricing:
    """The price table of a wire `pricing` object; unusable prices become None."""
    overrides = wire.get("overrides") or ()
    return Pricing(
        prices={
            name: parse_price(price) for name, price in wire.items() if name not in _NOT_PRICES
        },
        overrides=tuple(_override(entry) for entry in overrides if isinstance(entry, Mapping)),
    )


def _override(entry: Mapping[str, Any]) -> PriceOverride:
    days = entry.get("utc_days")
    return PriceOverride(
        prices={
            name: parse_price(price)
            for name, price in entry.items()
            if name not in _CONDITIONS | _NOT_PRICES
        },
        above_input_tokens=entry.get("min_prompt_tokens"),
        utc_start_minute=_minute(entry.get("utc_start")),
        utc_end_minute=_minute(entry.get("utc_end")),
        utc_weekdays=None if days is None else frozenset(_weekday(day) for day in days),
    )


def _minute(hhmm: Any) -> int | None:
    """Minutes after midnight of 1430 or "1430"; None if absent."""
    if hhmm is None:
        return None
    hours, minutes = divmod(int(hhmm), 100)
    return hours * 60 + minutes


def _weekday(day: Any) -> int:
    """0 = Monday, from 0-6 or an English name."""
    return _DAYS.index(day[:3].lower()) if isinstance(day, str) else int(day)


def table_in_force(
    pricing: Pricing, *, input_tokens: int, at_s: float
) -> Mapping[str, Decimal | None]:
    """The prices for a prompt of `input_tokens` at `at_s` seconds since the epoch."""
    if not pricing.overrides:
        return pricing.prices
    return pricing.at(input_tokens=input_tokens, when=datetime.fromtimestamp(at_s, UTC))


def charge(pricing: Pricing, usage: TokenUsage, *, at_s: float) -> Charge:
    """The exact charge for `usage` at `at_s` seconds since the epoch.

    Cached and written tokens lie inside the input and take their own price where there is one;
    reasoning lies inside the output and takes the output's price unless one is published for it.
    """
    table = table_in_force(pricing, input_tokens=usage.input_tokens, at_s=at_s)
    plain = table.get("prompt") or _ZERO
    output = table.get("completion") or _ZERO
    cached, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    prompt = _EXACT.multiply(max(0, usage.input_tokens - cached - written), plain)
    for tokens, name in ((cached, "input_cache_read"), (written, "input_cache_write")):
        if tokens:
            price = table.get(name)
            prompt = _EXACT.add(prompt, _EXACT.multiply(tokens, plain if price is None else price))
    reasoning = min(usage.reasoning_tokens or 0, usage.output_tokens)
    thinking = table.get("internal_reasoning")
    if thinking is None:
        completion = _EXACT.multiply(usage.output_tokens, output)
    else:
        completion = _EXACT.add(
            _EXACT.multiply(usage.output_tokens - reasoning, output),
            _EXACT.multiply(reasoning, thinking),
        )
    return Charge(prompt, completion, table.get("request") or _ZERO)


def worst_case_usd(
    pricing: Pricing, *, input_tokens: int, output_tokens: int, at_s: float
) -> tuple[Decimal, Decimal, Decimal]:
    """What must be affordable before an attempt: (whole, input and fee alone, per output token)."""
    table = table_in_force(pricing, input_tokens=input_tokens, at_s=at_s)
    per_input = max(
        table.get(name) or _ZERO for name in ("prompt", "input_cache_read", "input_cache_write")
    )
    per_output = max(table.get("completion") or _ZERO, table.get("internal_reasoning") or _ZERO)
    fixed = _EXACT.add(_EXACT.multiply(input_tokens, per_input), table.get("request") or _ZERO)
    return _EXACT.add(fixed, _EXACT.multiply(output_tokens, per_output)), fixed, per_output
