"""Money: decimal prices in, integer pico-dollars out, one conversion between them.

A *price* is a `Decimal` in USD per token, made from the published string. An *amount* is an `int`
of pico-dollars (1 pUSD = 1e-12 USD). Of 7,992 prices in two whole catalogues (2026-07-10 and
2026-08-22) 391 are not a whole number of nano-dollars per token, 59 not a whole number of
pico-dollars (all of them cache-write thirds): in pico-dollars a bill can be compared with `==`.
See docs/design/0001-money.md.
"""

from __future__ import annotations

import enum
from decimal import (
    ROUND_CEILING,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DecimalException,
    Inexact,
    InvalidOperation,
)
from typing import Final, Literal, NewType

from quantroute.errors import ConfigurationError

__all__ = [
    "MAX_AMOUNT_PUSD",
    "NO_CAP",
    "PUSD_PER_USD",
    "Cap",
    "NoCap",
    "PicoUSD",
    "cap_pusd",
    "cost_pusd",
    "format_usd",
    "parse_price",
    "parse_reported_usd",
    "plain_usd",
    "price_text",
    "to_pusd",
    "to_usd",
    "usd_per_million",
]

PicoUSD = NewType("PicoUSD", int)

PUSD_PER_USD: Final = 10**12
MAX_AMOUNT_PUSD: Final = PicoUSD(2**63 - 1)
"""Largest amount a journal column holds: $9,223,372.03."""

_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation])  # an inexact product is a bug
_DOUBLE_DIGITS: Final = Context(prec=15, rounding=ROUND_HALF_EVEN)
"""A JSON number that went through a double is faithful to 15 significant digits, no more."""


class NoCap(enum.Enum):
    """The only way to say that spending is not limited."""

    NO_CAP = "no cap"


NO_CAP: Final = NoCap.NO_CAP
Cap = PicoUSD | Literal[NoCap.NO_CAP]


def to_pusd(usd: Decimal) -> PicoUSD:
    """Pico-dollars for an amount in US dollars, rounded up; the only conversion there is.

    Raises:
        TypeError: not a Decimal; build one from the published string.
        ValueError: negative, not finite, or beyond what a journal can hold.
    """
    if not isinstance(usd, Decimal):
        raise TypeError(f"an amount must be a Decimal, not {type(usd).__name__}")
    if not usd.is_finite() or usd < 0:
        raise ValueError(f"an amount must be finite and not negative, not {usd}")
    pico = int(_EXACT.scaleb(usd, 12).to_integral_value(rounding=ROUND_CEILING))
    if pico > MAX_AMOUNT_PUSD:
        raise ValueError(f"an amount of {usd} USD is beyond {to_usd(MAX_AMOUNT_PUSD)} USD")
    return PicoUSD(pico)


def to_usd(amount_pusd: int) -> Decimal:
    """Exact US dollars of an amount in pico-dollars."""
    return Decimal(amount_pusd).scaleb(-12, _EXACT)


def plain_usd(usd: Decimal | None) -> str | None:
    """An amount or a price in digits, without an exponent; None stays None."""
    return None if usd is None else f"{usd:f}"


_LARGEST_EXPONENT: Final = 400
_FINEST_EXPONENT: Final = -48
_MAX_AMOUNT_USD: Final = to_usd(MAX_AMOUNT_PUSD)


def cost_pusd(tokens: int, usd_per_token: Decimal) -> PicoUSD:
    """Charge for `tokens` at one price, rounded up to a whole pico-dollar.

    Units: tokens, US dollars per token -> pico-dollars (1e-12 USD).
    Raises:
        TypeError: the price is a float; build it from the published string.
        ValueError: a negative count or price.
    Source: OpenRouter endpoint list, field `pricing.*`, a string in USD per token.
    """
    if not isinstance(usd_per_token, Decimal):
        raise TypeError("a price must be a Decimal built from the published string")
    if tokens < 0:
        raise ValueError(f"a token count cannot be negative: {tokens}")
    return to_pusd(_EXACT.multiply(Decimal(tokens), usd_per_token))


def parse_price(published: object) -> Decimal | None:
    """The published price, exactly as written; None if it is not a usable price.

    Missing, negative ("-1" means "depends" on router aliases), non-finite and non-numeric values
    are UNKNOWN, never zero.

    Raises:
        TypeError: a float; parse the JSON with `parse_float=Decimal`.
    """
    if isinstance(published, float):
        raise TypeError("a price must not pass through float; parse JSON with parse_float=Decimal")
    if isinstance(published, bool) or not isinstance(published, str | int | Decimal):
        return None
    try:
        price = Decimal(published.strip() if isinstance(published, str) else published)
    except InvalidOperation:
        return None
    if not price.is_finite() or not _is_exact(price):
        return None
    return _in_bounds(price)


def _is_exact(price: Decimal) -> bool:
    """Whether a price times any count of tokens is exact in our context, and no giant fraction."""
    _, digits, exponent = price.as_tuple()
    return len(digits) <= 40 and int(exponent) >= _FINEST_EXPONENT


def _in_bounds(amount: Decimal) -> Decimal | None:
    """A finite amount without its sign; None if it is negative or more than anything costs."""
    if (amount.is_signed() and amount != 0) or amount.adjusted() > 6:
        return None
    return amount.copy_abs()  # `abs` rounds to 28 digits


def parse_reported_usd(reported: object) -> Decimal | None:
    """A cost that the service reports as a JSON number, freed of binary-float noise.

    `0.00044440000000000004` is the double nearest to 0.0004444: digits past the fifteenth are
    noise and would otherwise be rounded up into a pico-dollar that nobody charged.
    None if it is absent, negative, not a finite number, or more than a journal can hold.
    """
    if isinstance(reported, bool) or not isinstance(reported, str | int | float | Decimal):
        return None
    try:
        usd = Decimal(repr(reported) if isinstance(reported, float) else reported)
        if not usd.is_finite() or abs(usd.adjusted()) > _LARGEST_EXPONENT:
            return None
        amount = _in_bounds(_DOUBLE_DIGITS.plus(usd))
    except DecimalException:
        return None
    return amount if amount is not None and amount <= _MAX_AMOUNT_USD else None


def cap_pusd(cap: object) -> Cap:
    """A cap in pico-dollars, or `NO_CAP`; amounts are rounded *down*, so a cap is never widened.

    Args:
        cap: US dollars as str, int, Decimal or float (taken as it prints), or `NO_CAP`.
    Raises:
        ConfigurationError: None, negative, NaN, infinite or not a number.
    """
    if isinstance(cap, NoCap):
        return cap
    if cap is None:
        raise ConfigurationError("a cap is required; say NO_CAP if spending shall be unlimited")
    if isinstance(cap, bool) or not isinstance(cap, str | int | float | Decimal):
        raise ConfigurationError(f"a cap is an amount in USD, not {type(cap).__name__}")
    text = repr(cap) if isinstance(cap, float) else str(cap).strip().removeprefix("$")
    try:
        usd = Decimal(text)
    except InvalidOperation:
        raise ConfigurationError(f"a cap is an amount like '5.00' USD, not {text!r}") from None
    if not usd.is_finite() or usd < 0:
        raise ConfigurationError(f"a cap must be finite and not negative, not {text}")
    if usd > to_usd(MAX_AMOUNT_PUSD):
        raise ConfigurationError(f"a cap of {text} USD is beyond {to_usd(MAX_AMOUNT_PUSD)} USD")
    return PicoUSD(int(usd.scaleb(12)))


def usd_per_million(usd_per_token: Decimal) -> Decimal:
    """The price per million tokens, without trailing zeros: the one place that changes the unit."""
    scaled = _EXACT.scaleb(usd_per_token, 6)
    return scaled.quantize(Decimal(1)) if scaled == scaled.to_integral() else scaled.normalize()


def format_usd(amount_pusd: int, *, places: int = 4) -> str:
    """Money for people, rounded half-even for display only: `$86.0213`."""
    usd = to_usd(amount_pusd).quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_EVEN)
    return f"-${-usd:f}" if usd < 0 else f"${usd:f}"


def price_text(usd_per_token: Decimal | None) -> str:
    """A price per million tokens for people, all its digits; "?" where nobody says."""
    return "?" if usd_per_token is None else f"{usd_per_million(usd_per_token):f}"
