"""The journal in SQLite: an append-only table that is the truth, and sums kept beside it.

`journal` holds every record ever made and is never updated. `accounts`, `open_entries` and `notes`
are what replaying it gives; they are written in the same transaction, so that opening a ledger of a
million entries reads a handful of rows. `BudgetLedger.verify` replays and compares.

Several processes may share a file. Each transaction is IMMEDIATE, hence alone; `data_version` tells
when another process has written since ours, and then the cached working set is read again.

Records are checked and applied in memory one by one, and written many at a time, before the
transaction commits: at 2,000 requests in flight that is one statement for some dozens of records.
Which entries they open and close, SQLite then reads from the records themselves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Final

from quantroute.ledger._journal_rows import JOURNAL_COLUMNS, decode_record, encode_record
from quantroute.ledger._records import (
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
    lineage,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.money import NO_CAP, PicoUSD
from quantroute.storage import Schema, Work, insert_rows

__all__ = [
    "SCHEMA",
    "Books",
    "index_records",
    "read_accounts",
    "read_open_entries",
    "read_recorded",
    "read_records",
]

_RECORD: Final = Basis.RECORD  # looked up once, for each charge asks
_SUMS: Final = tuple(item.name for item in fields(AccountState) if item.name != "cap")
_ENTRY_COLUMNS: Final = OpenEntry.__struct_fields__
_sums_of: Final = attrgetter(*_SUMS)
_entry_values: Final = attrgetter(
    # `_value_`, here and below: `value` of an Enum is a property in Python, six times as slow.
    *("status._value_" if name == "status" else name for name in _ENTRY_COLUMNS)
)


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

_INSERT_RECORDS: Final = f"INSERT INTO journal ({', '.join(JOURNAL_COLUMNS)}) VALUES"
# The entries that the last so many records open and close. Done within SQLite, from the records as
# they are: to bind the same values a second time costs more. `open_entries` has no row numbers, so
# that what is written to it does not change which record was the last.
_LAST_RECORDS: Final = "journal WHERE seq > last_insert_rowid() - ?"
_OPEN_ENTRIES: Final = f"""
    INSERT OR REPLACE INTO open_entries ({", ".join(_ENTRY_COLUMNS)})
    SELECT entry_id, account, endpoint, amount_pusd, '{EntryStatus.RESERVED.value}', owner, at_s,
        request_id, attempt, NULL, '' FROM {_LAST_RECORDS} AND kind = 'reserved'
"""
_CLOSE_ENTRIES: Final = f"""
    DELETE FROM open_entries WHERE entry_id IN
        (SELECT entry_id FROM {_LAST_RECORDS} AND kind IN ('posted', 'voided'))
"""
_SAVE_ENTRIES: Final = f"INSERT OR REPLACE INTO open_entries ({', '.join(_ENTRY_COLUMNS)}) VALUES"
_SAVE_ACCOUNTS: Final = (
    f"INSERT OR REPLACE INTO accounts (path, cap_pusd, {', '.join(_SUMS)}) VALUES"
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
    _records: list[tuple[Any, ...]] = field(default_factory=list)
    _changed: dict[EntryId, None] = field(default_factory=dict)  # open ones; an ordered set
    _touched: dict[Account, None] = field(default_factory=dict)  # all above each changed as well
    _is_committed: bool = True
    _data_version: int | None = None

    def execute(
        self, connection: sqlite3.Connection, record: Record, also: Work[None] | None = None
    ) -> None:
        """Check one record and apply it; it is written before the transaction commits.

        `also` writes in the same transaction.
        Raises:
            BudgetExceeded, EntryStateError, ValueError: from the check; nothing has changed.
        """
        account, endpoint = self._load(connection, record)
        self.state.check(record)
        record = self.state.flagged(record)
        if also is not None:
            also(connection)
        self._records.append(encode_record(record, account, endpoint))
        self.state.apply(record)
        if type(record) is CapSet:
            self._touched[record.account] = None
        elif type(record) is Noted:
            connection.execute(
                "INSERT OR REPLACE INTO notes VALUES (?, ?)", (record.key, record.value)
            )
        else:
            if type(record) is Held or type(record) is Identified:
                self._changed[record.entry_id] = None
            if type(record) is not Identified:
                assert account is not None  # or `check` would have raised
                self._touched[account] = None

    def write(self, connection: sqlite3.Connection) -> None:
        """Write what was gathered, for whoever reads the tables within the transaction."""
        if not self._records:
            return
        insert_rows(connection, _INSERT_RECORDS, self._records)
        count = len(self._records)
        connection.execute(_OPEN_ENTRIES, (count,))
        known = map(self.state.entries.get, self._changed)
        changed = [_entry_values(entry) for entry in known if entry is not None]
        insert_rows(connection, _SAVE_ENTRIES, changed)
        connection.execute(_CLOSE_ENTRIES, (count,))
        self._records.clear()
        self._changed.clear()

    # -- Participant ------------------------------------------------------------------------------

    def on_begin(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version or not self._is_committed:
            # Another process wrote, or our last transaction was rolled back: the cache may be
            # wrong, and what was gathered is void.
            for gathered in (self._records, self._changed, self._touched):
                gathered.clear()
            self.state.accounts.clear()
            self.state.entries.clear()
            self.state.recorded.clear()
            self.published.update(read_accounts(connection))
            self._data_version = version
        self._is_committed = False

    def before_commit(self, connection: sqlite3.Connection) -> None:
        self.write(connection)
        accounts = [
            _encode_account(path, self.state.accounts[path]) for path in self._with_changed_sums()
        ]
        insert_rows(connection, _SAVE_ACCOUNTS, accounts)

    def on_commit(self) -> None:
        self._is_committed = True
        if not self._touched:
            return
        self.published.update(
            (path, replace(self.state.accounts[path])) for path in self._with_changed_sums()
        )
        self._touched.clear()
        if self.on_change is not None:
            self.on_change()

    def _with_changed_sums(self) -> dict[Account, None]:
        """The accounts whose sums have changed."""
        return dict.fromkeys(path for account in self._touched for path in lineage(account))

    # -- loading ----------------------------------------------------------------------------------

    def _load(
        self, connection: sqlite3.Connection, record: Record
    ) -> tuple[Account | None, str | None]:
        """Bring what `record` touches into the working set; its account and endpoint."""
        endpoint: str | None = None
        if type(record) is Reserved:
            account, endpoint = record.account, record.endpoint
        elif type(record) is CapSet:
            account = record.account
        elif type(record) is Noted:
            return None, None
        else:
            entry = self._load_entry(connection, record.entry_id)
            if entry is None:
                return None, None  # `check` says why it cannot be
            account, endpoint = entry.account, entry.endpoint
            if type(record) is Posted and record.charge.basis is _RECORD:
                self._load_recorded(connection, record.charge.generation_id)
        if account not in self.state.accounts:  # where it is, all above it are
            for path in lineage(account):
                if path not in self.state.accounts:
                    self.state.accounts[path] = _read_account(connection, path) or AccountState()
        return account, endpoint

    def _load_recorded(self, connection: sqlite3.Connection, generation_id: str | None) -> None:
        if generation_id is not None:
            self.state.recorded |= read_recorded(connection, (generation_id,))

    def _load_entry(self, connection: sqlite3.Connection, entry_id: EntryId) -> OpenEntry | None:
        entry = self.state.entries.get(entry_id)
        if entry is None:
            self.write(connection)
            entry = next(read_open_entries(connection, "entry_id = ?", (entry_id,)), None)
            if entry is not None:
                self.state.entries[entry_id] = entry
        return entry


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


def index_records(connection: sqlite3.Connection) -> None:
    """Make what `read_recorded` needs, also in files of before; holds only records' charges."""
    connection.execute(
        "CREATE INDEX IF NOT EXISTS journal_recorded ON journal (generation_id) "
        "WHERE basis = 'record'"
    )


def read_recorded(connection: sqlite3.Connection, generation_ids: Iterable[str]) -> set[str]:
    """Those among `generation_ids` whose record has been posted."""
    return {
        generation_id
        for generation_id in generation_ids
        if connection.execute(
            "SELECT 1 FROM journal WHERE basis = 'record' AND generation_id = ? LIMIT 1",
            (generation_id,),
        ).fetchone()
    }


def read_records(connection: sqlite3.Connection) -> Iterator[Record]:
    """The journal from its first record to its last."""
    rows = connection.execute(f"SELECT {', '.join(JOURNAL_COLUMNS)} FROM journal ORDER BY seq")
    for row in rows:
        yield decode_record(dict(zip(JOURNAL_COLUMNS, row, strict=True)))


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


def _encode_account(path: Account, state: AccountState) -> tuple[Any, ...]:
    cap = None if state.cap is NO_CAP else state.cap
    return path, cap, *_sums_of(state)
