"""What an answer's headers say to a client of any service; pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = ["header", "http_date", "media_type", "retry_after_s", "wait_of"]

_LONGEST_HINT_S: Final = 3_600.0


def header(headers: Mapping[str, str], name: str) -> str | None:
    """A header's value without blanks, None if absent or empty."""
    return headers.get(name, "").strip() or None


def media_type(headers: Mapping[str, str]) -> str:
    """`Content-Type` without its parameters, in lower case; "" if absent."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def retry_after_s(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Seconds the server asks to wait, from every form it may take; None if it does not say.

    `Retry-After` in seconds or as a date (RFC 1123, RFC 850, asctime), `Retry-After-Ms`, or
    `X-RateLimit-Reset` as epoch milliseconds when nothing is remaining. Moments are measured
    against the answer's own `Date` header where there is one, so that a wrong local clock does no
    harm. Never negative, never above an hour.
    """
    text = header(headers, "Retry-After")
    wait_s: float | None = None
    if text is not None:
        wait_s = _number(text)
        if wait_s is None:
            wait_s = _until(text, headers, now)
    if wait_s is None:
        milliseconds = _number(header(headers, "Retry-After-Ms") or "")
        wait_s = None if milliseconds is None else milliseconds / 1000
    if wait_s is None and header(headers, "X-RateLimit-Remaining") == "0":
        reset_ms = _number(header(headers, "X-RateLimit-Reset") or "")
        if reset_ms is not None:
            wait_s = reset_ms / 1000 - _sent_at(headers, now).timestamp()
    return _bounded(wait_s)


def wait_of(said: object) -> float | None:
    """Seconds that a body asks to wait, a number or text, within the bounds of `retry_after_s`."""
    if isinstance(said, bool) or not isinstance(said, str | int | float | Decimal):
        return None
    return _bounded(_number(str(said)))


def http_date(text: str) -> datetime | None:
    """A date in any form HTTP knows, one without a zone as UTC; None if it is none."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the latter for a year of twenty digits
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _bounded(wait_s: float | None) -> float | None:
    return None if wait_s is None else min(max(wait_s, 0.0), _LONGEST_HINT_S)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None


def _until(text: str, headers: Mapping[str, str], now: datetime) -> float | None:
    moment = http_date(text)
    if moment is None:
        return None
    return (moment - _sent_at(headers, now)).total_seconds()


def _sent_at(headers: Mapping[str, str], now: datetime) -> datetime:
    """When the answer was sent, by its sender's clock; `now` if it does not say."""
    return http_date(header(headers, "Date") or "") or now
