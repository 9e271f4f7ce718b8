"""What is said between a worker and the server: operations as JSON, sums as decimal digits.

Amounts travel as text: the server's script language has no integers beyond 2^53.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, TypeVar

from msgspec import structs

from quantroute.errors import BudgetExceeded, EntryStateError
from quantroute.ledger._journal_rows import JOURNAL_COLUMNS, decode_record, encode_record
from quantroute.ledger._records import (
    ROOT,
    Account,
    Basis,
    CapSet,
    EntryId,
    EntryStatus,
    Held,
    Identified,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.ledger._statement import StatementLine
from quantroute.ledger._waiting import Refusal
from quantroute.money import MAX_AMOUNT_PUSD, NO_CAP, PicoUSD
from quantroute.pricing import TokenUsage

__all__ = [
    "accounts_of",
    "cleaned",
    "difference",
    "entries_of",
    "operation",
    "record_of",
    "refusal_of",
    "refused_transition",
    "statement_of",
    "verified_at",
    "with_clean_texts",
]

Operation = dict[str, Any]
R = TypeVar("R", bound=Record)

_SUMS: Final = tuple(item.name for item in fields(AccountState) if item.name != "cap")
_TOKENS: Final = tuple(item.name for item in fields(TokenUsage))
_ENTRY_NUMBERS: Final = {"reserved_pusd": int, "attempt": int, "reserved_at_s": float}


def cleaned(text: str) -> str:
    """`text` as UTF-8 can carry it: services have been seen to send half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def operation(record: Record, *, keep: bool = False) -> Operation:
    """The operation that asks the server for `record`."""
    said: Operation = {"record": _to_line(record)}
    match record:
        case CapSet():
            cap = "" if record.cap is NO_CAP else str(record.cap)
            return said | {"op": "cap", "account": record.account, "cap": cap}
        case Reserved():
            return said | {"op": "reserve", "id": record.entry_id, "entry": _entry(record)}
        case Posted():
            return said | {"op": "post", "id": record.entry_id, **_charge(record)}
        case Voided():
            return said | {"op": "void", "id": record.entry_id}
        case Held():
            generation_id = record.generation_id or ""
            more = {"reason": record.reason, "generation_id": generation_id}
            return said | {"op": "hold", "id": record.entry_id, **more}
        case Identified():
            more = {"generation_id": record.generation_id}
            return said | {"op": "identify", "id": record.entry_id, **more}
        case Noted():
            more = {"key": record.key, "value": record.value, "keep": str(int(keep))}
            return said | {"op": "note", **more}


def _entry(record: Reserved) -> dict[str, str]:
    return {
        "account": record.account,
        "endpoint": record.endpoint,
        "reserved_pusd": str(record.amount_pusd),
        "status": EntryStatus.RESERVED.value,
        "owner": record.owner,
        "reserved_at_s": repr(record.at_s),
        "request_id": record.request_id,
        "attempt": str(record.attempt),
        "generation_id": "",
        "reason": "",
    }


def _charge(record: Posted) -> Operation:
    charge = record.charge
    usage = {} if charge.usage is None else asdict(charge.usage)
    return {
        "amount": str(charge.amount_pusd),
        "basis": charge.basis.value,
        "generation_id": charge.generation_id or "",
        "usage": {name: str(count) for name, count in usage.items() if count},
    }


def _to_line(record: Record) -> str:
    account, endpoint = getattr(record, "account", None), getattr(record, "endpoint", None)
    return json.dumps(encode_record(record, account, endpoint))


def record_of(line: bytes | str) -> Record:
    """The record of one line of the journal."""
    return decode_record(dict(zip(JOURNAL_COLUMNS, json.loads(line), strict=True)))


# -- answers --------------------------------------------------------------------------------------


def refusal_of(
    record: Reserved,
    facts: Iterable[Sequence[str]],
    *,
    lost_pusd: Mapping[Account, int] | None = None,
) -> Refusal:
    """Which cap refused, by the same rule as the pure machine's, and whether waiting can help.

    `lost_pusd` is what nobody is finding out about; see `LedgerState.may_admit_later`.
    """
    states: dict[Account, AccountState] = {}
    for path, limit, posted, pending, held in facts:
        states[Account(path)] = AccountState(
            cap=PicoUSD(int(limit)),
            posted_pusd=int(posted),
            pending_pusd=int(pending),
            held_pusd=int(held),
        )
    judge = LedgerState(accounts=states)
    try:
        judge.check(record)
    except BudgetExceeded as shortage:
        may_wait = judge.may_admit_later(record.account, record.amount_pusd, lost_pusd=lost_pusd)
        return Refusal(shortage.with_traceback(None), not may_wait)
    raise EntryStateError(
        entry_id=record.entry_id, state="refused for no reason", transition="reserve"
    )


def refused_transition(said: Operation, result: Mapping[str, Any]) -> Exception | None:
    """The error a result stands for; None if the operation was done."""
    if "impossible" in result:
        return ValueError(
            f"an amount must lie in [0, {MAX_AMOUNT_PUSD}] with the {result['impossible']} that "
            f"are posted, not {said['amount']}"
        )
    if "state" in result:
        return EntryStateError(
            entry_id=said["id"], state=result["state"], transition=str(said["op"])
        )
    return None


# -- what the server keeps ------------------------------------------------------------------------


def accounts_of(flat: Mapping[str, str]) -> dict[Account, AccountState]:
    """Accounts from fields such as `run/a<tab>posted_pusd`."""
    sums: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, value in flat.items():
        path, _, item = name.rpartition("\t")
        sums[path][item] = value
    return {
        Account(path): AccountState(
            cap=PicoUSD(int(found["cap"])) if "cap" in found else NO_CAP,
            **{name: int(found.get(name, 0)) for name in _SUMS},
        )
        for path, found in sums.items()
    }


def entries_of(found: Mapping[str, str]) -> dict[EntryId, OpenEntry]:
    """Open entries by id, oldest first."""
    entries = [_open_entry(name, json.loads(text)) for name, text in found.items()]
    entries.sort(key=lambda entry: (entry.reserved_at_s, entry.entry_id))
    return {entry.entry_id: entry for entry in entries}


def _open_entry(name: str, values: dict[str, str]) -> OpenEntry:
    more = {key: kind(values[key]) for key, kind in _ENTRY_NUMBERS.items()}
    return OpenEntry(
        **values
        | more
        | {
            "entry_id": EntryId(name),
            "status": EntryStatus(values["status"]),
            "generation_id": values["generation_id"] or None,
        }
    )


def statement_of(flat: Mapping[str, str]) -> tuple[StatementLine, ...]:
    """The statement from fields such as `run/a<tab>voided<tab>endpoint`."""
    found: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, value in flat.items():
        account, item, endpoint = name.split("\t", 2)
        found[account, endpoint][item] = int(value)
    return tuple(
        _line(Account(account), endpoint, sums)
        for (account, endpoint), sums in sorted(found.items())
    )


def _line(account: Account, endpoint: str, sums: Mapping[str, int]) -> StatementLine:
    by_basis = {basis: sums.get(basis.value, 0) for basis in Basis}
    return StatementLine(
        account=account,
        endpoint=endpoint,
        entries=sums.get("entries", 0),
        voided=sums.get("voided", 0),
        overruns=sums.get("overruns", 0),
        posted_pusd=sum(by_basis.values()),
        reported_pusd=by_basis[Basis.REPORTED],
        record_pusd=by_basis[Basis.RECORD],
        key_usage_pusd=by_basis[Basis.KEY_USAGE],
        priced_pusd=by_basis[Basis.PRICED],
        bound_pusd=by_basis[Basis.BOUND],
        **{name: sums.get(name, 0) for name in _TOKENS},
    )


# -- audit ----------------------------------------------------------------------------------------


def verified_at(state: LedgerState, lines: Iterable[bytes | str], number: int) -> str | None:
    """Apply these lines of the journal to `state`; what is wrong with one of them, or None."""
    for offset, line in enumerate(lines, start=number + 1):
        try:
            state.replay(record_of(line))
        except (BudgetExceeded, EntryStateError, ValueError, TypeError) as error:
            return f"journal record {offset}: {error}"
    return None


def difference(
    state: LedgerState,
    flat: Mapping[str, str],
    entries: Mapping[str, str],
    notes: Mapping[str, str],
) -> str | None:
    """Where what the server keeps differs from what replaying its journal gave."""
    accounts = accounts_of(flat)
    kept: dict[str, tuple[object, object]] = {
        "accounts": (accounts, state.accounts),
        "open entries": (entries_of(entries), state.entries),
        "notes": (dict(notes), state.notes),
    }
    for name, (found, replayed) in kept.items():
        if found != replayed:
            return f"the {name} kept beside the journal differ from what replaying it gives"
    for path, account in accounts.items():
        room = account.limit_pusd - account.posted_pusd - account.pending_pusd
        if int(flat[f"{path}\troom"]) != room:
            return f"account {path or ROOT!r} keeps a room that is not its cap minus what it used"
    return None


def with_clean_texts(record: R) -> R:
    """`record` with every text as UTF-8 can carry it."""
    if isinstance(record, Posted):
        named = record.charge.generation_id
        charge = structs.replace(
            record.charge, generation_id=None if named is None else cleaned(named)
        )
        return structs.replace(record, charge=charge)
    values = structs.asdict(record)
    texts: dict[str, Any] = {
        name: cleaned(value) for name, value in values.items() if isinstance(value, str)
    }
    return structs.replace(record, **texts)
