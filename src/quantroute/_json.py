"""A service's JSON: no floats, numbers come in as `int` or `Decimal` and go out as written."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Final

__all__ = ["dumps", "loads"]

_NAN: Final = Decimal("NaN")
_LONGEST_INT: Final = 30
# A number like 1e999999999 is two bytes of JSON and a gigabyte as an int: it becomes NaN instead.
_LARGEST_EXPONENT: Final = 400


def loads(raw: str | bytes) -> object:
    """The value of a JSON text; NaN for numbers that no price or count can be.

    Raises:
        ValueError: not JSON, or nested beyond what can be read.
    """
    try:
        if isinstance(raw, bytes):
            raw = raw.decode(json.detect_encoding(raw), "surrogatepass")
        value: object = _decode(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def dumps(value: object) -> str:
    """JSON of what `loads` gave, each number with the digits it was published with."""
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else "null"
    return json.dumps(value)


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _LONGEST_INT else _decimal(digits)


def _decimal(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return _NAN
    if not number.is_finite() or abs(number.adjusted()) > _LARGEST_EXPONENT:
        return _NAN
    return number


# Made once: json.loads with options makes a decoder per call.
_decode: Final = json.JSONDecoder(
    parse_float=_decimal, parse_int=_integer, parse_constant=_decimal
).decode
