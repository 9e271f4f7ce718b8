"""What a key may spend, asked before a run: rejected, unreachable and limited are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from quantroute._headers import http_date
from quantroute._http import Service, SessionPool
from quantroute._json import loads
from quantroute.client._accounts import KeyUsage
from quantroute.client._transport import Timeouts, Transport
from quantroute.client._wire import WireKey
from quantroute.clock import SystemClock
from quantroute.errors import InvalidResponse, KeyRejected
from quantroute.money import parse_reported_usd
from quantroute.secrets import EnvKey

__all__ = ["KeyStatus", "check_key", "data_of", "key_usage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatus:
    """A key that the service accepts.

    `expires_at` and `limit_reset` ("daily", "weekly", "monthly") are None where the service does
    not say. `service_time` is its clock, from the answer's Date header; `asked_at` is ours.
    """

    usage: KeyUsage
    asked_at: datetime
    service_time: datetime | None = None
    expires_at: datetime | None = None
    limit_reset: str | None = None

    @property
    def clock_skew_s(self) -> float | None:
        """How far the clock of this machine is ahead of the service's."""
        if self.service_time is None:
            return None
        return (self.asked_at - self.service_time).total_seconds()


async def check_key(service: Service, key: EnvKey) -> KeyStatus:
    """Ask `/key` once.

    Raises:
        KeyRejected: none is set, or the service does not accept it.
        TransportError: no answer.
        InvalidResponse: an answer, but not about a key.
    """
    headers = key.headers()
    sessions = SessionPool(service)
    transport = Transport(
        service=service, sessions=sessions, timeouts=Timeouts(), clock=SystemClock(), key=key
    )
    try:
        status, body, date = await transport.get_dated("/key", headers=headers)
    finally:
        await sessions.close()
    if status in (401, 403):
        raise KeyRejected(
            problem=f"the service rejects the key in {key.variable} (status {status})",
            status=status,
        )
    usage = key_usage_of(body) if status == 200 else None
    if usage is None:
        raise InvalidResponse(
            problem=f"/key answered with status {status} and no usage; check base_url"
        )
    wire = WireKey.model_validate(data_of(body))
    return KeyStatus(
        usage=usage,
        asked_at=datetime.now(UTC),
        service_time=http_date(date or ""),
        expires_at=_iso_date(wire.expires_at),
        limit_reset=wire.limit_reset,
    )


def key_usage_of(body: bytes) -> KeyUsage | None:
    """The figures of a `/key` body; None if it has none."""
    wire = WireKey.model_validate(data_of(body))
    usage_usd = parse_reported_usd(wire.usage)
    if usage_usd is None:
        return None
    return KeyUsage(
        usage_usd=usage_usd + (parse_reported_usd(wire.byok_usage) or Decimal(0)),
        limit_usd=parse_reported_usd(wire.limit),
        remaining_usd=parse_reported_usd(wire.limit_remaining),
    )


def data_of(body: bytes) -> dict[str, object]:
    """The `data` object of an accounting answer; empty when it is not one."""
    try:
        decoded = loads(body)
    except ValueError:
        return {}
    data = decoded.get("data") if isinstance(decoded, dict) else None
    return data if isinstance(data, dict) else {}


def _iso_date(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
