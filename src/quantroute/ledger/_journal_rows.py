"""A record as a row of the journal, and back."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, assert_never

from quantroute.ledger._records import (
    Account,
    Basis,
    CapSet,
    Charge,
    EntryId,
    Held,
    Identified,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
)
from quantroute.money import NO_CAP, PicoUSD
from quantroute.pricing import TokenUsage

__all__ = ["JOURNAL_COLUMNS", "decode_record", "encode_record"]

JOURNAL_COLUMNS: Final = (
    "at_s", "kind", "entry_id", "account", "endpoint", "amount_pusd", "basis", "input_tokens",
    "output_tokens", "reasoning_tokens", "cached_tokens", "cache_write_tokens", "generation_id",
    "request_id", "attempt", "owner", "reason", "flags",
)  # fmt: skip
_USAGE_COLUMNS: Final = tuple(item.name for item in fields(TokenUsage))
_usage_values: Final = attrgetter(*_USAGE_COLUMNS)
_NO_USAGE: Final = (None,) * len(_USAGE_COLUMNS)


def encode_record(record: Record, account: Account | None, endpoint: str | None) -> tuple[Any, ...]:
    """A journal row. Posted and voided rows repeat account and endpoint, for sums by either."""
    if type(record) is Reserved:
        return _row(
            record.at_s,
            "reserved",
            account=account,
            entry_id=record.entry_id,
            endpoint=endpoint,
            amount_pusd=record.amount_pusd,
            request_id=record.request_id,
            attempt=record.attempt,
            owner=record.owner,
        )
    if type(record) is Posted:
        charge = record.charge
        return _row(
            record.at_s,
            "posted",
            account=account,
            entry_id=record.entry_id,
            endpoint=endpoint,
            amount_pusd=charge.amount_pusd,
            basis=charge.basis._value_,
            usage=charge.usage,
            generation_id=charge.generation_id,
            flags=" ".join(charge.flags) or None,
        )
    if type(record) is Identified:
        return _row(
            record.at_s,
            "identified",
            account=account,
            entry_id=record.entry_id,
            generation_id=record.generation_id,
        )
    if type(record) is Voided:
        return _row(
            record.at_s,
            "voided",
            account=account,
            entry_id=record.entry_id,
            endpoint=endpoint,
            reason=record.reason,
        )
    if type(record) is Held:
        return _row(
            record.at_s,
            "held",
            account=account,
            entry_id=record.entry_id,
            reason=record.reason,
            generation_id=record.generation_id,
        )
    if type(record) is CapSet:
        return _row(
            record.at_s,
            "cap set",
            account=account,
            amount_pusd=None if record.cap is NO_CAP else record.cap,
        )
    if type(record) is Noted:
        return _row(record.at_s, "noted", account=account, reason=record.key, flags=record.value)
    assert_never(record)


def _row(
    at_s: float,
    kind: str,
    *,
    account: Account | None,
    entry_id: EntryId | None = None,
    endpoint: str | None = None,
    amount_pusd: int | None = None,
    basis: str | None = None,
    usage: TokenUsage | None = None,
    generation_id: str | None = None,
    request_id: str | None = None,
    attempt: int | None = None,
    owner: str | None = None,
    reason: str | None = None,
    flags: str | None = None,
) -> tuple[Any, ...]:
    """The columns in the order of `JOURNAL_COLUMNS`."""
    tokens = _NO_USAGE if usage is None else _usage_values(usage)
    return (
        *(at_s, kind, entry_id, account, endpoint, amount_pusd, basis, *tokens),
        *(generation_id, request_id, attempt, owner, reason, flags),
    )


def decode_record(row: dict[str, Any]) -> Record:
    """The record that `encode_record` made these columns of."""
    at_s, entry_id = row["at_s"], EntryId(row["entry_id"] or "")
    match row["kind"]:
        case "cap set":
            cap = NO_CAP if row["amount_pusd"] is None else PicoUSD(row["amount_pusd"])
            return CapSet(account=Account(row["account"]), cap=cap, at_s=at_s)
        case "reserved":
            return Reserved(
                entry_id=entry_id,
                account=Account(row["account"]),
                amount_pusd=row["amount_pusd"],
                endpoint=row["endpoint"],
                request_id=row["request_id"],
                attempt=row["attempt"],
                owner=row["owner"],
                at_s=at_s,
            )
        case "identified":
            return Identified(entry_id=entry_id, generation_id=row["generation_id"], at_s=at_s)
        case "posted":
            return Posted(entry_id=entry_id, charge=_decode_charge(row), at_s=at_s)
        case "voided":
            return Voided(entry_id=entry_id, reason=row["reason"], at_s=at_s)
        case "held":
            return Held(
                entry_id=entry_id,
                reason=row["reason"],
                generation_id=row["generation_id"],
                at_s=at_s,
            )
        case "noted":
            return Noted(key=row["reason"], value=row["flags"], at_s=at_s)
        case kind:
            raise ValueError(f"unknown journal record {kind!r}")


def _decode_charge(row: dict[str, Any]) -> Charge:
    usage = None
    if row["input_tokens"] is not None:
        usage = TokenUsage(**{item.name: row[item.name] for item in fields(TokenUsage)})
    return Charge(
        amount_pusd=row["amount_pusd"],
        basis=Basis(row["basis"]),
        usage=usage,
        generation_id=row["generation_id"],
        flags=tuple((row["flags"] or "").split()),
    )
