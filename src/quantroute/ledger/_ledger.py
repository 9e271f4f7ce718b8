"""`BudgetLedger`: a hard cap that holds for any number of tasks, processes and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from quantroute._log import get_logger
from quantroute.clock import Clock, SystemClock
from quantroute.errors import BudgetExceeded, ConfigurationError, EntryStateError, JournalError
from quantroute.ledger._journal import (
    SCHEMA,
    Books,
    index_records,
    read_accounts,
    read_open_entries,
    read_recorded,
    read_records,
)
from quantroute.ledger._recorder import Recorder
from quantroute.ledger._records import (
    ROOT,
    Account,
    CapSet,
    EntryId,
    EntryStatus,
    Held,
    Noted,
    Record,
    Reserved,
    Voided,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.ledger._statement import (
    Balance,
    Statement,
    balance_of,
    keep_sums,
    prepare_sums,
    read_statement,
    replayed_statement,
)
from quantroute.ledger._waiting import Refusal
from quantroute.money import Cap, cap_pusd
from quantroute.storage import MEMORY, FileLock, SqliteStore, Work, is_locked

__all__ = ["BudgetLedger"]

log = get_logger("quantroute.ledger")

_YOUNG_FILE_S: Final = 60.0
#: Journal records summed in one transaction when closing; others wait for it, some 0.1 s.
_RECORDS_AT_ONCE: Final = 100_000


class BudgetLedger(Recorder):
    """Reservations and charges against a hard cap, in one SQLite file.

    >>> async with BudgetLedger.open("run.sqlite", cap="100.00") as ledger:
    ...     entry = await ledger.reserve(2_000_000_000, account=Account("run/mt-bench"))
    ...     await ledger.post(entry, charge)

    Every attempt is an entry of its own: reserved, on disk, before bytes leave; then posted (the
    charge is known), voided (there was none) or held (nobody knows yet: it stays counted).

    Several processes may open one file; a cap holds for all of them together. Reservations of a
    process that died are held at the next opening, never released.
    """

    def __init__(self, path: str | Path, *, cap: object = None, clock: Clock | None = None) -> None:
        self._path = str(path)
        self._cap: Cap | None = None if cap is None else cap_pusd(cap)
        super().__init__(clock=clock or SystemClock())
        self._books = Books()
        self.store = SqliteStore(self._path, SCHEMA, participants=[self._books])
        """The file; rows written through `also` or `store.submit` share its transactions."""
        self._file = Path(self._path)
        self._owner_lock: FileLock | None = None
        self._balances: dict[Account, tuple[AccountState, Balance]] = {}

    @classmethod
    def open(
        cls, path: str | Path, *, cap: object = None, clock: Clock | None = None
    ) -> BudgetLedger:
        """A ledger in a file, to be entered with `async with`.

        Args:
            cap: US dollars, or `NO_CAP`. None keeps the cap of an existing ledger; for a new one it
                must be given. A different cap than the stored one is recorded and holds from now.
        """
        return cls(path, cap=cap, clock=clock)

    @classmethod
    def in_memory(cls, *, cap: object, clock: Clock | None = None) -> BudgetLedger:
        """The same ledger without a file, for tests and throw-away scripts."""
        return cls(MEMORY, cap=cap, clock=clock)

    def __repr__(self) -> str:
        return f"BudgetLedger({self._path!r})"

    @property
    def owner(self) -> str:
        """Names this opening of the file; empty while it is not open."""
        return self._owner

    def is_alive(self, owner: str) -> bool:
        """Whether an opening of this file is still in use, by whichever process."""
        return self._path != MEMORY and is_locked(self._owner_file(owner))

    def record(
        self, connection: sqlite3.Connection, *records: Record, also: Work[None] | None = None
    ) -> None:
        """Check and apply records within a transaction; `also` runs with the last one."""
        for record in records:
            self._books.execute(connection, record, also if record is records[-1] else None)

    # -- opening and closing ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._owner:
            raise ConfigurationError("this ledger is open already; make a second one")
        self._books = Books(on_change=_waker(self))
        self.store = SqliteStore(self._path, SCHEMA, participants=[self._books])
        self.store.open()
        self._begin(secrets.token_hex(6))
        try:
            self._lock_owner_file()
            await self.store.submit(self._settle_in)
        except BaseException:
            self._owner = ""
            await self._shut()
            raise
        return self

    async def aclose(self) -> None:
        """Hold what is still under way and close the file; idempotent."""
        if not self._owner:
            return
        owner, self._owner = self._owner, ""
        try:
            await self.store.submit(
                lambda connection: self._hold_all(connection, owner, "closed while in flight")
            )
            while await self.store.submit(self._keep_sums):
                pass
        except JournalError as error:
            log.warning("ledger closed after a storage failure", problem=error.problem)
        finally:
            await self._shut()

    async def _shut(self) -> None:
        await self.store.aclose()
        if self._owner_lock is not None:
            self._owner_lock.release(remove=True)
            self._owner_lock = None

    def _settle_in(self, connection: sqlite3.Connection) -> None:
        """First transaction: take over from dead owners, check or set the cap, load notes."""
        index_records(connection)
        prepare_sums(connection)
        for (owner,) in connection.execute(
            "SELECT DISTINCT owner FROM open_entries WHERE status = 'reserved'"
        ).fetchall():
            if owner != self._owner and not is_locked(self._owner_file(owner)):
                count = self._hold_all(connection, owner, "process died")
                self._owner_file(owner).unlink(missing_ok=True)
                log.warning("reservations of a dead process are held", entries=count)
        self._sweep_owner_files()
        stored = read_accounts(connection)
        if self._cap is None and ROOT not in stored:
            raise ConfigurationError("a new ledger needs a cap: '5.00' USD, or NO_CAP")
        if self._cap is not None and (ROOT not in stored or stored[ROOT].cap != self._cap):
            record = CapSet(account=ROOT, cap=self._cap, at_s=self._clock.time_s())
            self._books.execute(connection, record)
        self._books.published.update(stored)
        self.notes = dict(connection.execute("SELECT key, value FROM notes").fetchall())

    def _hold_all(self, connection: sqlite3.Connection, owner: str, reason: str) -> int:
        self._books.write(connection)
        entries = list(read_open_entries(connection, "owner = ? AND status = 'reserved'", (owner,)))
        for entry in entries:
            record = Held(
                entry_id=entry.entry_id,
                reason=reason,
                generation_id=None,
                at_s=self._clock.time_s(),
            )
            self._books.execute(connection, record)
        return len(entries)

    def _keep_sums(self, connection: sqlite3.Connection) -> bool:
        self._books.write(connection)
        return keep_sums(connection, most_records=_RECORDS_AT_ONCE)

    def _sweep_owner_files(self) -> None:
        """Remove what killed processes left; not young files, whose owner may be about to lock."""
        if self._path == MEMORY:
            return
        for file in self._file.parent.glob(f"{glob.escape(self._file.name)}.owner-*.lock"):
            with contextlib.suppress(FileNotFoundError):  # its owner may be closing just now
                is_old = time.time() - file.stat().st_mtime > _YOUNG_FILE_S
                if is_old and not is_locked(file):
                    file.unlink()

    def _lock_owner_file(self) -> None:
        if self._path == MEMORY:
            return
        # One name for all who open the file, by whatever link, and for good: folders are changed.
        self._file = Path(self._path).resolve()
        self._owner_lock = FileLock(self._owner_file(self._owner)).acquire()

    def _owner_file(self, owner: str) -> Path:
        return Path(f"{self._file}.owner-{owner}.lock")

    # -- reserving --------------------------------------------------------------------------------

    async def _try_reserve(self, record: Reserved) -> EntryId | Refusal:
        try:
            return await self.store.submit_nowait(lambda c: self._reserve_or_refuse(c, record))
        except asyncio.CancelledError:
            # The record may be written all the same; a void queued behind it undoes it. A store
            # that takes no more work is closed or broken: then the next opening holds the entry.
            with contextlib.suppress(JournalError):
                self.store.submit_nowait(lambda c: self._void_if_open(c, record.entry_id))
            raise

    def _reserve_or_refuse(
        self, connection: sqlite3.Connection, record: Reserved
    ) -> EntryId | Refusal:
        try:
            self._books.execute(connection, record)
        except BudgetExceeded as shortage:
            may_wait = self._books.state.may_admit_later(
                record.account, record.amount_pusd, lost_pusd=self._lost_pusd
            )
            return Refusal(shortage.with_traceback(None), not may_wait)
        return record.entry_id

    def _void_if_open(self, connection: sqlite3.Connection, entry_id: EntryId) -> None:
        record = Voided(entry_id=entry_id, reason="never sent", at_s=self._clock.time_s())
        try:
            self._books.execute(connection, record)
        except EntryStateError:
            return  # the reservation had been refused: nothing to undo

    # -- writing ----------------------------------------------------------------------------------

    async def note(self, key: str, value: str, *, keep: bool = False) -> None:
        """Keep a small fact in the journal; the last value per key is in `notes`.

        With `keep` only if there is none of that name yet, whichever process made it.
        """
        record = Noted(key=key, value=value, at_s=self._clock.time_s())

        def work(connection: sqlite3.Connection) -> str:
            found = connection.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
            if keep and found is not None:
                return str(found[0])
            self._books.execute(connection, record)
            return value

        self.notes[key] = await self.store.submit(work)

    def _write(self, record: Record, also: Work[None] | None) -> asyncio.Future[None]:
        return self.store.submit_nowait(lambda c: self._books.execute(c, record, also))

    def _write_soon(self, record: Record) -> None:
        self.store.submit_nowait(lambda c: self._books.execute(c, record))

    # -- looking ----------------------------------------------------------------------------------

    def balance(self, account: Account = ROOT) -> Balance:
        """Cap, spending and tokens of an account and all below it, as last committed here."""
        state = self._books.published.get(account)
        if state is None:
            state = self.store.read(read_accounts).get(account, AccountState())
        # Asked for before every request, published anew at every commit, which is more seldom.
        known = self._balances.get(account)
        if known is None or known[0] is not state:
            known = self._balances[account] = state, balance_of(account, state)
        return known[1]

    async def statement(self) -> Statement:
        """Tokens and money per account and endpoint, from the journal."""
        return await self.store.aread(read_statement)

    async def unresolved(self) -> tuple[OpenEntry, ...]:
        """Held entries, oldest first: what reconciliation has to find out."""
        return await self.store.aread(
            lambda c: tuple(read_open_entries(c, "status = ?", (EntryStatus.HELD.value,)))
        )

    async def recorded(self, generation_ids: Iterable[str]) -> frozenset[str]:
        """Those among `generation_ids` whose record has been posted, for whichever entry."""
        wanted = tuple(generation_ids)
        return frozenset(await self.store.aread(lambda c: read_recorded(c, wanted)))

    async def verify(self) -> None:
        """Replay the journal from its first record and compare with the sums kept beside it.

        Raises:
            JournalError: they differ, or a record could not have been made.
        """
        problem = await self.store.aread(_difference)
        if problem:
            raise JournalError(path=self._path, problem=problem)


def _waker(ledger: BudgetLedger) -> Callable[[], None]:
    """`_make_room` on the running loop, from any thread. A closed loop has no waiters.

    Held weakly: the writer thread must not keep alive a ledger that was dropped without closing.
    """
    loop, weak = asyncio.get_running_loop(), weakref.ref(ledger)

    def call() -> None:
        alive = weak()
        # Whoever comes to stand in line after this look tries again first, in a later transaction.
        if alive is not None and alive._lines.are_used:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(alive._make_room)

    return call


def _difference(connection: sqlite3.Connection) -> str | None:
    state = LedgerState(accounts={}, resolved={})
    number = 0
    try:
        for record in read_records(connection):
            state.replay(record)
            number += 1
    except (BudgetExceeded, EntryStateError, ValueError, TypeError) as error:
        return f"journal record {number + 1}: {error}"
    kept: dict[str, Any] = {
        "accounts": read_accounts(connection),
        "open entries": {entry.entry_id: entry for entry in read_open_entries(connection)},
        "notes": dict(connection.execute("SELECT key, value FROM notes").fetchall()),
    }
    replayed: dict[str, Any] = {
        "accounts": state.accounts,
        "open entries": state.entries,
        "notes": state.notes,
    }
    kept["statement"], replayed["statement"] = (
        read_statement(connection),
        replayed_statement(connection),
    )
    for name, found in kept.items():
        if found != replayed[name]:
            return f"the {name} kept beside the journal differ from what replaying it gives"
    return None
