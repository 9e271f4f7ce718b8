"""What tokens cost, as immutable values: usage, price lists, ceilings.

Pure: no I/O, no clock, no randomness. Prices are Decimal USD per token, charges whole pico-dollars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Final

from quantroute.money import PUSD_PER_USD, PicoUSD, cost_pusd, to_pusd

__all__ = [
    "METERED_DIMENSIONS",
    "NOT_INCURRED_DIMENSIONS",
    "PriceOverride",
    "Pricing",
    "Quote",
    "TokenUsage",
]


_MOST_TOKENS: Final = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one answer, in the model's own tokenizer.

    Reasoning is *inside* output; cached and cache-write are *inside* input. None means that the
    service did not say, which is not zero.
    """

    input_tokens: int
    output_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None

    def __post_init__(self) -> None:
        for count in (
            self.input_tokens,
            self.output_tokens,
            self.reasoning_tokens,
            self.cached_tokens,
            self.cache_write_tokens,
        ):
            if count is not None and count < 0:
                raise ValueError(f"a token count cannot be negative: {self}")

    @property
    def is_possible(self) -> bool:
        """Whether an answer can have had so many tokens, and a journal can add them up."""
        return (
            self.input_tokens <= _MOST_TOKENS
            and self.output_tokens <= _MOST_TOKENS
            and (self.reasoning_tokens or 0) <= _MOST_TOKENS
            and (self.cached_tokens or 0) <= _MOST_TOKENS
            and (self.cache_write_tokens or 0) <= _MOST_TOKENS
        )

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Parts that exceed their whole, as the service reported them; empty when consistent."""
        found = []
        if (self.reasoning_tokens or 0) > self.output_tokens:
            found.append(f"reasoning {self.reasoning_tokens} > output {self.output_tokens}")
        if (self.cached_tokens or 0) + (self.cache_write_tokens or 0) > self.input_tokens:
            found.append(
                f"cached {self.cached_tokens or 0} + written {self.cache_write_tokens or 0} "
                f"> input {self.input_tokens}"
            )
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOverride:
    """Prices that replace the base under conditions, all of which must hold.

    Source: OpenRouter `pricing.overrides[]`: `min_prompt_tokens` is strict, the UTC window is
    half-open HHMM and may wrap midnight, later entries win per key, missing keys inherit.
    """

    prices: Mapping[str, Decimal | None]
    above_input_tokens: int | None = None
    utc_start_minute: int | None = None
    utc_end_minute: int | None = None
    utc_weekdays: frozenset[int] | None = None  # 0 = Monday

    def applies(self, *, input_tokens: int, at: datetime) -> bool:
        """Whether every condition holds for a prompt of `input_tokens` at `at` (UTC)."""
        if self.above_input_tokens is not None and input_tokens <= self.above_input_tokens:
            return False
        if self.utc_weekdays is not None and at.weekday() not in self.utc_weekdays:
            return False
        if self.utc_start_minute is None or self.utc_end_minute is None:
            return True
        minute = at.hour * 60 + at.minute
        if self.utc_start_minute <= self.utc_end_minute:
            return self.utc_start_minute <= minute < self.utc_end_minute
        return minute >= self.utc_start_minute or minute < self.utc_end_minute


#: Price dimensions that a chat request of text can incur, by their published names.
METERED_DIMENSIONS: Final = frozenset(
    {
        "prompt",
        "completion",
        "request",
        "web_search",
        "internal_reasoning",
        "input_cache_read",
        "input_cache_write",
        "input_cache_write_1h",
    }
)
#: Published dimensions that text-only requests, the only ones we send, can never incur.
NOT_INCURRED_DIMENSIONS: Final = frozenset(
    {"image", "image_token", "image_output", "audio", "audio_output", "input_audio_cache"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """Ceilings of one endpoint in pico-dollars per token (exact), and fees per request."""

    input_pusd: Fraction
    output_pusd: Fraction
    fee_pusd: PicoUSD
    _parts: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = (*self.input_pusd.as_integer_ratio(), *self.output_pusd.as_integer_ratio())
        object.__setattr__(self, "_parts", parts)

    def cost_pusd(self, *, input_tokens: int, output_tokens: int) -> PicoUSD:
        """The most that so many tokens can cost, each part rounded up to a whole pico-dollar."""
        # Integer arithmetic by hand: this runs for every endpoint and request, and Decimal or
        # Fraction products take twenty times as long.
        per_input, of_input, per_output, of_output = self._parts
        return PicoUSD(
            self.fee_pusd
            - (-input_tokens * per_input // of_input)
            - (-output_tokens * per_output // of_output)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What an endpoint charges, USD per token (per request for fees), discounts already in.

    `prices` maps the published dimension to its price; None means "published but unusable".
    `prompt` and `completion` are always present as keys.
    """

    prices: Mapping[str, Decimal | None]
    overrides: tuple[PriceOverride, ...] = ()

    @classmethod
    def flat(cls, *, input_usd_per_token: str, output_usd_per_token: str) -> Pricing:
        """Plain input and output prices, from strings in USD per token."""
        return cls(
            prices={
                "prompt": Decimal(input_usd_per_token),
                "completion": Decimal(output_usd_per_token),
            }
        )

    @property
    def input_usd_per_token(self) -> Decimal | None:
        """Base input price, None if unknown."""
        return self.prices.get("prompt")

    @property
    def output_usd_per_token(self) -> Decimal | None:
        """Base output price, None if unknown."""
        return self.prices.get("completion")

    @property
    def unmetered(self) -> tuple[str, ...]:
        """Dimensions with a price (or an unusable one) that the ledger cannot meter."""
        return tuple(
            sorted(
                {
                    name
                    for table in self._tables()
                    for name, price in table.items()
                    if name not in METERED_DIMENSIONS | NOT_INCURRED_DIMENSIONS and price != 0
                }
            )
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Metered dimensions whose price is missing or unusable: no bound can be given."""
        missing = {name for name in ("prompt", "completion") if self.prices.get(name) is None}
        broken = {
            name
            for table in self._tables()
            for name, price in table.items()
            if name in METERED_DIMENSIONS and price is None
        }
        return tuple(sorted(missing | broken))

    @property
    def is_bounded(self) -> bool:
        """Whether a worst case can be computed, so that a cap can be promised."""
        return not self.unknown and not self.unmetered

    def ceiling_usd(self, dimension: str) -> Decimal:
        """The dearest published price of one dimension over base and overrides; 0 if absent.

        Raises:
            ValueError: the price is unknown somewhere.
        """
        dearest = Decimal(0)
        for table in self._tables():
            if dimension in table:
                price = table[dimension]
                if price is None:
                    raise ValueError(f"the price of {dimension} is unknown")
                dearest = max(dearest, price)
        return dearest

    def at(self, *, input_tokens: int, when: datetime) -> Mapping[str, Decimal | None]:
        """The price table in force for a prompt of `input_tokens` at `when` (UTC)."""
        table = dict(self.prices)
        for override in self.overrides:
            if override.applies(input_tokens=input_tokens, at=when):
                table.update(override.prices)
        return table

    def quote(self) -> Quote:
        """The ceilings as integers, for bounds that are computed per request.

        Every dimension counts at its ceiling; input at the dearest of plain, cache write and the
        longer-lived cache write; output at the dearer of completion and reasoning.
        Raises:
            ValueError: a price is unknown (check `is_bounded` first).
        """
        if not self.is_bounded:
            raise ValueError(f"no bound: unknown {self.unknown}, unmetered {self.unmetered}")
        per_input = max(
            self.ceiling_usd(name)
            for name in ("prompt", "input_cache_read", "input_cache_write", "input_cache_write_1h")
        )
        per_output = max(self.ceiling_usd("completion"), self.ceiling_usd("internal_reasoning"))
        fees = self.ceiling_usd("request") + self.ceiling_usd("web_search")
        return Quote(
            input_pusd=Fraction(per_input) * PUSD_PER_USD,
            output_pusd=Fraction(per_output) * PUSD_PER_USD,
            fee_pusd=to_pusd(fees),
        )

    def worst_case_pusd(self, *, input_tokens: int, output_tokens: int) -> PicoUSD:
        """An upper bound of the charge for at most so many tokens, in pico-dollars; see `quote`."""
        return self.quote().cost_pusd(input_tokens=input_tokens, output_tokens=output_tokens)

    def charge_pusd(self, usage: TokenUsage, *, when: datetime) -> PicoUSD:
        """The charge the price list implies for `usage`, in pico-dollars.

        For answers whose `cost` is missing. Where the reported parts contradict the whole, the
        dearest reading counts: every token of that side at the highest price it can have.
        """
        table = self.at(input_tokens=usage.input_tokens, when=when)
        plain = table.get("prompt")
        output = table.get("completion")
        if plain is None or output is None:
            raise ValueError("the price of input or output is unknown")

        def price(name: str, otherwise: Decimal) -> Decimal:
            found = table.get(name)
            return otherwise if found is None else found

        read, write = price("input_cache_read", plain), price("input_cache_write", plain)
        thought = price("internal_reasoning", output)
        written, cached = usage.cache_write_tokens or 0, usage.cached_tokens or 0
        if written + cached > usage.input_tokens:
            written = cached = 0
            plain = max(plain, read, write)
        reasoning = usage.reasoning_tokens or 0
        if reasoning > usage.output_tokens:
            reasoning, output = 0, max(output, thought)
        return PicoUSD(
            cost_pusd(usage.input_tokens - cached - written, plain)
            + cost_pusd(cached, read)
            + cost_pusd(written, write)
            + cost_pusd(usage.output_tokens - reasoning, output)
            + cost_pusd(reasoning, thought)
            + to_pusd(price("request", Decimal(0)))
        )

    def _tables(self) -> Iterable[Mapping[str, Decimal | None]]:
        yield self.prices
        for override in self.overrides:
            yield override.prices
