"""The journal in SQLite: an append-only table that is the truth, and sums kept beside it.

`journal` holds every record ever made and is never updated. `accounts`, `open_entries` and `notes`
are what replaying it gives; they are written in the same transaction, so that opening a ledger of a
million entries reads a handful of rows. `BudgetLedger.verify` replays and compares.

Several processes may share a file. Each transaction is IMMEDIATE, hence alone; `data_version` tells
when another process has written since ours, and then the cached working set is read again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, assert_never

from quantroute.domain import TokenUsage
from quantroute.ledger._records import (
    Account,
    Basis,
    CapSet,
    Charge,
    EntryId,
    EntryStatus,
    Held,
    Identified,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
    lineage,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.money import NO_CAP, PicoUSD
from quantroute.storage import Schema, Work

__all__ = ["SCHEMA", "Books", "read_accounts", "read_open_entries", "read_records"]

_SUMS: Final = tuple(item.name for item in fields(AccountState) if item.name != "cap")
_ENTRY_COLUMNS: Final = tuple(item.name for item in fields(OpenEntry))
_JOURNAL_COLUMNS: Final = (
    "at_s", "kind", "entry_id", "account", "endpoint", "amount_pusd", "basis", "input_tokens",
    "output_tokens", "reasoning_tokens", "cached_tokens", "cache_write_tokens", "generation_id",
    "request_id", "attempt", "owner", "reason", "flags",
)  # fmt: skip

SCHEMA: Final = Schema(
    application_id=0x716E7274,  # "qnrt"
    version=1,
    script=f"""
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, entry_id TEXT,
        account TEXT, endpoint TEXT, amount_pusd INTEGER, basis TEXT,
        input_tokens INTEGER, output_tokens INTEGER, reasoning_tokens INTEGER,
        cached_tokens INTEGER, cache_write_tokens INTEGER,
        generation_id TEXT, request_id TEXT, attempt INTEGER, owner TEXT, reason TEXT, flags TEXT
    ) STRICT;
    CREATE UNIQUE INDEX journal_posted ON journal (entry_id) WHERE kind = 'posted';
    CREATE TABLE accounts (
        path TEXT PRIMARY KEY, cap_pusd INTEGER,
        {", ".join(f"{name} INTEGER NOT NULL" for name in _SUMS)}
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE open_entries (
        entry_id TEXT PRIMARY KEY, account TEXT NOT NULL, endpoint TEXT NOT NULL,
        reserved_pusd INTEGER NOT NULL, status TEXT NOT NULL, owner TEXT NOT NULL,
        reserved_at_s REAL NOT NULL, request_id TEXT NOT NULL, attempt INTEGER NOT NULL,
        generation_id TEXT, reason TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID
    """,
)

_INSERT_RECORD: Final = (
    f"INSERT INTO journal ({', '.join(_JOURNAL_COLUMNS)}) "
    f"VALUES ({', '.join('?' * len(_JOURNAL_COLUMNS))})"
)
_SAVE_ENTRY: Final = (
    f"INSERT OR REPLACE INTO open_entries ({', '.join(_ENTRY_COLUMNS)}) "
    f"VALUES ({', '.join('?' * len(_ENTRY_COLUMNS))})"
)
_SAVE_ACCOUNT: Final = (
    f"INSERT OR REPLACE INTO accounts (path, cap_pusd, {', '.join(_SUMS)}) "
    f"VALUES (?, ?, {', '.join('?' * len(_SUMS))})"
)


@dataclass(slots=True)
class Books:
    """The working set of a ledger file: cached accounts and entries, kept true to the tables.

    A `storage.Participant`: everything but `published` is touched on the writer thread only.
    """

    state: LedgerState = field(default_factory=lambda: LedgerState(accounts={}))
    published: dict[Account, AccountState] = field(default_factory=dict)
    on_change: Callable[[], None] | None = None
    """Called on the writer thread after each transaction that changed an account."""
    _dirty: set[Account] = field(default_factory=set)
    _data_version: int | None = None

    def execute(
        self, connection: sqlite3.Connection, record: Record, also: Work[None] | None = None
    ) -> None:
        """Check, write and apply one record; `also` writes in the same savepoint.

        Raises:
            BudgetExceeded, EntryStateError, ValueError: from the check; nothing has changed.
        """
        account, endpoint = self._load(connection, record)
        self.state.check(record)
        record = self.state.flagged(record)
        if also is not None:
            also(connection)  # before memory changes: if it raises, the savepoint undoes it all
        connection.execute(_INSERT_RECORD, _encode(record, account, endpoint))
        self.state.apply(record)
        self._save_entry(connection, record)
        if account is not None and not isinstance(record, Identified):
            self._dirty.update(lineage(account))

    # -- Participant ------------------------------------------------------------------------------

    def on_begin(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:  # another process wrote: the cache may be wrong
            self.state.accounts.clear()
            self.state.entries.clear()
            self.published.update(read_accounts(connection))
            self._data_version = version

    def before_commit(self, connection: sqlite3.Connection) -> None:
        for path in self._dirty:
            state = self.state.accounts[path]
            cap = None if state.cap is NO_CAP else state.cap
            sums = (getattr(state, name) for name in _SUMS)
            connection.execute(_SAVE_ACCOUNT, (path, cap, *sums))

    def on_commit(self) -> None:
        if not self._dirty:
            return
        self.published.update({path: replace(self.state.accounts[path]) for path in self._dirty})
        self._dirty.clear()
        if self.on_change is not None:
            self.on_change()

    # -- loading and saving -----------------------------------------------------------------------

    def _load(
        self, connection: sqlite3.Connection, record: Record
    ) -> tuple[Account | None, str | None]:
        """Bring what `record` touches into the working set; its account and endpoint."""
        if isinstance(record, Noted):
            return None, None
        endpoint: str | None = None
        if isinstance(record, CapSet):
            account = record.account
        elif isinstance(record, Reserved):
            account, endpoint = record.account, record.endpoint
        else:
            entry = self._load_entry(connection, record.entry_id)
            if entry is None:
                return None, None  # `check` says why it cannot be
            account, endpoint = entry.account, entry.endpoint
        for path in lineage(account):
            if path not in self.state.accounts:
                self.state.accounts[path] = _read_account(connection, path) or AccountState()
        return account, endpoint

    def _load_entry(self, connection: sqlite3.Connection, entry_id: EntryId) -> OpenEntry | None:
        entry = self.state.entries.get(entry_id)
        if entry is None:
            entry = next(read_open_entries(connection, "entry_id = ?", (entry_id,)), None)
            if entry is not None:
                self.state.entries[entry_id] = entry
        return entry

    def _save_entry(self, connection: sqlite3.Connection, record: Record) -> None:
        match record:
            case Reserved() | Identified() | Held():
                entry = self.state.entries[record.entry_id]
                row = [getattr(entry, name) for name in _ENTRY_COLUMNS]
                row[_ENTRY_COLUMNS.index("status")] = entry.status.value
                connection.execute(_SAVE_ENTRY, row)
            case Posted() | Voided():
                connection.execute(
                    "DELETE FROM open_entries WHERE entry_id = ?", (record.entry_id,)
                )
            case Noted():
                connection.execute(
                    "INSERT OR REPLACE INTO notes VALUES (?, ?)", (record.key, record.value)
                )
            case CapSet():
                pass
            case _:
                assert_never(record)


def read_accounts(connection: sqlite3.Connection) -> dict[Account, AccountState]:
    """Every account with its sums."""
    paths = [Account(path) for (path,) in connection.execute("SELECT path FROM accounts")]
    found = {path: _read_account(connection, path) for path in paths}
    return {path: state for path, state in found.items() if state is not None}


def read_open_entries(
    connection: sqlite3.Connection, where: str = "1", arguments: tuple[Any, ...] = ()
) -> Iterator[OpenEntry]:
    """Entries that are not resolved, oldest first; `where` is ours, never a user's text."""
    rows = connection.execute(
        f"SELECT {', '.join(_ENTRY_COLUMNS)} FROM open_entries WHERE {where} "
        "ORDER BY reserved_at_s, entry_id",
        arguments,
    )
    for row in rows:
        values = dict(zip(_ENTRY_COLUMNS, row, strict=True))
        yield OpenEntry(**values | {"status": EntryStatus(values["status"])})


def read_records(connection: sqlite3.Connection) -> Iterator[Record]:
    """The journal from its first record to its last."""
    rows = connection.execute(f"SELECT {', '.join(_JOURNAL_COLUMNS)} FROM journal ORDER BY seq")
    for row in rows:
        yield _decode(dict(zip(_JOURNAL_COLUMNS, row, strict=True)))


def _read_account(connection: sqlite3.Connection, path: Account) -> AccountState | None:
    row = connection.execute(
        f"SELECT cap_pusd, {', '.join(_SUMS)} FROM accounts WHERE path = ?",
        (path,),
    ).fetchone()
    if row is None:
        return None
    cap, *sums = row
    return AccountState(
        cap=NO_CAP if cap is None else PicoUSD(cap), **dict(zip(_SUMS, sums, strict=True))
    )


def _encode(record: Record, account: Account | None, endpoint: str | None) -> tuple[Any, ...]:
    """A journal row. Posted and voided rows repeat account and endpoint, for sums by either."""
    row: dict[str, Any] = {"at_s": record.at_s, "kind": _KINDS[type(record)], "account": account}
    match record:
        case CapSet():
            row |= {"amount_pusd": None if record.cap is NO_CAP else record.cap}
        case Reserved():
            row |= {
                "entry_id": record.entry_id,
                "endpoint": endpoint,
                "amount_pusd": record.amount_pusd,
                "request_id": record.request_id,
                "attempt": record.attempt,
                "owner": record.owner,
            }
        case Identified():
            row |= {"entry_id": record.entry_id, "generation_id": record.generation_id}
        case Posted():
            row |= {"entry_id": record.entry_id, "endpoint": endpoint, **_encode_charge(record)}
        case Voided():
            row |= {"entry_id": record.entry_id, "endpoint": endpoint, "reason": record.reason}
        case Held():
            row |= {
                "entry_id": record.entry_id,
                "reason": record.reason,
                "generation_id": record.generation_id,
            }
        case Noted():
            row |= {"reason": record.key, "flags": record.value}
        case _:
            assert_never(record)
    return tuple(row.get(name) for name in _JOURNAL_COLUMNS)


def _encode_charge(record: Posted) -> dict[str, Any]:
    charge, usage = record.charge, record.charge.usage
    row: dict[str, Any] = {
        "amount_pusd": charge.amount_pusd,
        "basis": charge.basis.value,
        "generation_id": charge.generation_id,
        "flags": " ".join(charge.flags) or None,
    }
    if usage is not None:
        row |= {item.name: getattr(usage, item.name) for item in fields(usage)}
    return row


_KINDS: Final[dict[type[Any], str]] = {
    CapSet: "cap set",
    Reserved: "reserved",
    Identified: "identified",
    Posted: "posted",
    Voided: "voided",
    Held: "held",
    Noted: "noted",
}


def _decode(row: dict[str, Any]) -> Record:
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
