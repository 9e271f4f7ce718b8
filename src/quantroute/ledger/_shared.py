"""`SharedLedger`: one hard cap for workers on many machines, kept on a Redis (or Valkey) server.

The server holds the books and decides; each worker keeps its rows in a local file of its own. So
text and money no longer share a transaction, and the order takes its place:

1. reserve: on the server, durable there, before any byte of the request leaves;
2. the outcome: row and outcome in one local transaction (`Outbox`);
3. the outcome on the server; then it is crossed out in the file.

Killed between any two of these, nothing is lost and nothing is counted twice. Before 2: the money
stays reserved on the server until a record, the key's usage or the bound settles it, as with one
file. Between 2 and 3: the next opening of the file sends the outcome. After 3, before it is crossed
out: it is sent again, finds its entry resolved, and changes nothing.

A reservation never expires. An owner that has not been heard of for `dead_after_s` is taken for
dead and its entries are *held*: they stay counted. Should it be alive after all, its outcomes still
resolve them. A file whose owner died says so at once, on its own machine.

See docs/design/0010-shared-ledger.md and docs/sharing.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import sqlite3
import warnings
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from quantroute._log import get_logger
from quantroute.clock import Clock, SystemClock
from quantroute.errors import (
    ConfigurationError,
    EntryStateError,
    JournalError,
    LedgerUnreachable,
)
from quantroute.ledger._ledger import BudgetLedger
from quantroute.ledger._outbox import Outbox
from quantroute.ledger._records import (
    ROOT,
    Account,
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
    check_account,
)
from quantroute.ledger._server_link import KEPT, MARK, ServerLink
from quantroute.ledger._shared_records import (
    accounts_of,
    cleaned,
    difference,
    entries_of,
    operation,
    record_of,
    refusal_of,
    refused_transition,
    statement_of,
    verified_at,
    with_clean_texts,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry, reserved_by
from quantroute.ledger._statement import Balance, StatementLine, balance_of
from quantroute.ledger._waiting import Refusal, WaitingLines
from quantroute.money import NO_CAP, Cap, cap_pusd
from quantroute.storage import MEMORY, SqliteStore, Work

__all__ = ["SharedLedger"]

log = get_logger("quantroute.ledger")

_BEAT_S: Final = 5.0
_DEAD_AFTER_S: Final = 60.0
_PATIENCE_S: Final = 30.0
_FLUSH_S: Final = 5.0
_PAGE: Final = 5_000

Outcome = Posted | Voided | Held


class SharedLedger:
    """A `Ledger` on a server that any number of workers share.

    >>> async with SharedLedger.connect(
    ...     "redis://127.0.0.1:6379/0", name="b3", cap="100.00", store="rows.sqlite"
    ... ) as ledger:

    Money is decided on the server, whole pico-dollars at a time. `store` is this worker's own file:
    rows, its own journal, and outcomes that the server has not heard of yet.

    `balance` is as of the last answer of the server, which is seconds old at most while it answers.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        cap: object = None,
        store: str | Path = MEMORY,
        label: str = "",
        allow_volatile: bool = False,
        patience_s: float = _PATIENCE_S,
        dead_after_s: float = _DEAD_AFTER_S,
        clock: Clock | None = None,
    ) -> None:
        if not name or not name.isprintable() or set(name) & set("{}"):
            raise ConfigurationError(f"a shared ledger's name is plain text, not {name!r}")
        if patience_s <= 0 or dead_after_s <= 0:
            raise ConfigurationError("patience_s and dead_after_s must be positive")
        self._url = url
        self._name = name
        self._cap: Cap | None = None if cap is None else cap_pusd(cap)
        self._path = str(store)
        self._label = label
        self._allow_volatile = allow_volatile
        self._patience_s = patience_s
        self._dead_after_s = dead_after_s
        self._clock: Clock = clock or SystemClock()
        self._local = BudgetLedger(self._path, cap=NO_CAP, clock=self._clock)
        self.notes: dict[str, str] = {}
        self._owner = ""
        self._entries_made = 0
        self._lines = WaitingLines()
        self._reserved: dict[EntryId, Reserved] = {}
        self._accounts: dict[Account, AccountState] = {}
        self._lost_pusd: dict[Account, int] | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._heart: asyncio.Task[None] | None = None
        self._link: ServerLink
        self._outbox: Outbox

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        name: str,
        cap: object = None,
        store: str | Path = MEMORY,
        label: str = "",
        allow_volatile: bool = False,
        patience_s: float = _PATIENCE_S,
        dead_after_s: float = _DEAD_AFTER_S,
        clock: Clock | None = None,
    ) -> SharedLedger:
        """A ledger on a server, to be entered with `async with`.

        Args:
            url: `redis://[:password@]host:port/database`, or `rediss://` for TLS.
            name: which ledger on that server; workers with the same name share its cap.
            cap: US dollars, or `NO_CAP`. None keeps the cap of an existing ledger; a new one needs
                one. A different cap than the stored one is recorded and holds for all from now.
            store: this worker's own file, on a local disk. In memory, outcomes that the server has
                not heard of are lost with the process; their money stays reserved.
            label: what this worker does, such as `shard 3 of 8`; two that live cannot do the same.
            allow_volatile: accept a server that may forget acknowledged writes.
            patience_s: how long a reservation waits for a lost server before it is refused.
            dead_after_s: an owner not heard of for so long is dead; its entries are held.
        """
        return cls(
            url,
            name=name,
            cap=cap,
            store=store,
            label=label,
            allow_volatile=allow_volatile,
            patience_s=patience_s,
            dead_after_s=dead_after_s,
            clock=clock,
        )

    def __repr__(self) -> str:
        return f"SharedLedger({self._name!r}, store={self._path!r})"

    def __del__(self) -> None:
        if getattr(self, "_owner", ""):
            warnings.warn(
                f"unclosed {self!r}; use `async with`", ResourceWarning, stacklevel=2, source=self
            )

    @property
    def store(self) -> SqliteStore:
        """The local file; rows written through `also` share a transaction with their outcome."""
        return self._local.store

    # -- opening and closing ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._owner:
            raise ConfigurationError("this ledger is open already; make a second one")
        await self._local.__aenter__()
        self._owner = self._local.owner
        self._entries_made = 0
        self._lines = WaitingLines()
        self._reserved.clear()
        self._lost_pusd = None
        self._link = ServerLink(
            self._url,
            name=self._name,
            owner=self._owner,
            about=self._about(),
            patience_s=self._patience_s,
            on_accounts=self._publish,
        )
        try:
            await self._link.open(allow_volatile=self._allow_volatile)
            await self._settle_in()
        except BaseException:
            self._owner = ""
            await self._link.aclose()
            await self._local.aclose()
            raise
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Hold what is still under way, tell the server what it has not heard, and close."""
        if not self._owner:
            return
        owner, self._owner = self._owner, ""
        try:
            if self._heart is not None:
                self._heart.cancel()
                self._heart = None
            for entry_id in tuple(self._reserved):
                with contextlib.suppress(EntryStateError):
                    await self.hold(entry_id, reason="closed while in flight")
            while self._settling:
                await asyncio.wait(self._settling)
            await self._say_goodbye(owner)
        except JournalError as error:
            log.warning("shared ledger closed after a failure", problem=error.problem)
        finally:
            await self._link.aclose()
            await self._local.aclose()

    async def _say_goodbye(self, owner: str) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._link.call(MARK)  # behind all that was said before
                await self._catch_up()
                await self._link.call({"op": "forget", "owner": owner})
        except (TimeoutError, LedgerUnreachable):
            log.warning(
                "outcomes stay in the local file; the next opening sends them",
                outcomes=await self._outbox.count(),
                path=self._path,
            )

    def _about(self) -> dict[str, object]:
        path = self._path if self._path == MEMORY else str(Path(self._path).resolve())
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "store": path,
            "label": self._label,
        }

    async def _settle_in(self) -> None:
        """Send what earlier owners of the file left, take over from the dead, set the cap."""
        self._outbox = Outbox(self.store, ledger_id=self._link.ledger_id, owner=self._owner)
        for unsent in await self._outbox.open(self._local.is_alive):
            self._send(unsent.said, unsent.number)
        await self._link.call(MARK)
        self.notes = _notes_in(await self._read("notes"))
        await self._bury_the_dead()
        await self._catch_up()
        root = self._accounts.get(ROOT)
        if self._cap is None and root is None:
            raise ConfigurationError("a new ledger needs a cap: '5.00' USD, or NO_CAP")
        if self._cap is not None and (root is None or root.cap != self._cap):
            record = CapSet(account=ROOT, cap=self._cap, at_s=self._clock.time_s())
            await self._link.call(operation(record))

    async def _read(self, what: str) -> dict[str, str]:
        """One of the server's hashes."""
        found = await self._link.reading(self._link.client.hgetall(self._link.keys[what]))
        return dict(found)

    async def _catch_up(self) -> None:
        """Take over into the local file what others found out about entries held in it."""
        held = await self._local.unresolved()
        if not held:
            return
        names = [f"settled\t{entry.entry_id}" for entry in held]
        lines = await self._link.reading(self._link.client.hmget(self._link.keys["notes"], names))
        for record in map(record_of, filter(None, lines)):
            with contextlib.suppress(EntryStateError):
                await self.store.submit(functools.partial(self._take_over, record=record))

    def _take_over(self, connection: sqlite3.Connection, *, record: Record) -> None:
        self._local.record(connection, record)

    # -- who is alive -----------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Say that this owner lives, hear how the accounts stand, look for those who died."""
        beat_s = min(_BEAT_S, self._dead_after_s / 3)
        while True:
            await asyncio.sleep(beat_s)
            try:
                await self._link.call(MARK)
                await self._bury_the_dead()
            except LedgerUnreachable:
                continue

    async def _bury_the_dead(self) -> None:
        """Hold the entries of owners that are known to be dead; they stay counted.

        Raises:
            JournalError: another worker that lives has this one's label.
        """
        found = await self._read("owners")
        now_s, _ = await self._link.reading(self._link.client.time())
        owners = {
            name.removesuffix("\tabout"): json.loads(text)
            for name, text in found.items()
            if name.endswith("\tabout")
        }
        alive = {
            owner: about
            for owner, about in owners.items()
            if owner == self._owner
            or self._lives(owner, about, now_s - int(found[f"{owner}\tbeat"]))
        }
        self._refuse_double(alive)
        if self._heart is not None and len(alive) == len(owners):
            return
        for entry in (await self._read_entries()).values():
            if entry.status is EntryStatus.RESERVED and entry.owner not in alive:
                await self._hold_for(entry)
        for owner in owners.keys() - alive.keys():
            await self._link.call({"op": "forget", "owner": owner})

    def _lives(self, owner: str, about: Mapping[str, Any], silent_s: float) -> bool:
        mine = self._about()
        if about["store"] == mine["store"] != MEMORY and about["host"] == mine["host"]:
            return self._local.is_alive(owner)
        return silent_s <= self._dead_after_s

    def _refuse_double(self, alive: Mapping[str, Mapping[str, Any]]) -> None:
        if not self._label or self._heart is not None:
            return
        for owner, about in alive.items():
            if owner != self._owner and about["label"] == self._label:
                raise JournalError(
                    path=self._link.place,
                    problem=f"{self._label} is being done by process {about['pid']} on "
                    f"{about['host']}; stop it, or if it died wait {self._dead_after_s:g} s",
                )

    async def _hold_for(self, entry: OpenEntry) -> None:
        record = Held(
            entry_id=entry.entry_id,
            reason="process died",
            generation_id=None,
            at_s=self._clock.time_s(),
        )
        await self._link.call(operation(record))

    async def _read_entries(self) -> dict[EntryId, OpenEntry]:
        return entries_of(await self._read("entries"))

    # -- reserving --------------------------------------------------------------------------------

    async def reserve(
        self,
        amount_pusd: int,
        *,
        account: Account = ROOT,
        endpoint: str = "",
        request_id: str = "",
        attempt: int = 1,
        wait: bool = True,
    ) -> EntryId:
        """As `BudgetLedger.reserve`; the money is set aside for all workers, durably.

        Raises:
            BudgetExceeded: it does not fit now (`wait=False`), or nothing under way can make room.
            LedgerUnreachable: the server did not answer within `patience_s`; nothing must be sent.
        """
        check_account(account)

        def make() -> Reserved:
            self._entries_made += 1
            record = Reserved(
                entry_id=EntryId(f"{self._owner}-{self._entries_made:x}"),
                account=account,
                amount_pusd=amount_pusd,
                endpoint=endpoint,
                request_id=request_id,
                attempt=attempt,
                owner=self._owner,
                at_s=self._clock.time_s(),
            )
            return with_clean_texts(record)

        LedgerState().check(make())  # amounts that cannot be are refused here
        return await self._lines.reserve(lambda: self._try_reserve(make()), wait=wait)

    async def _try_reserve(self, record: Reserved) -> EntryId | Refusal:
        said = operation(record)
        try:
            result = await self._link.call(said)
        except (asyncio.CancelledError, LedgerUnreachable):
            # It may have been sent, and be done: a void behind it undoes it.
            void = Voided(entry_id=record.entry_id, reason="never sent", at_s=self._clock.time_s())
            self._link.put(operation(void))
            raise
        if "refused" in result:
            return refusal_of(record, result["refused"], lost_pusd=self._lost_pusd)
        if error := refused_transition(said, result):
            raise error
        self._reserved[record.entry_id] = record
        return record.entry_id

    def expect_settling(self, *, lost: Iterable[OpenEntry] | None) -> None:
        """As `BudgetLedger.expect_settling`, for this worker's own reservations."""
        before, self._lost_pusd = self._lost_pusd, None if lost is None else reserved_by(lost)
        if self._lost_pusd != before:
            self._lines.make_room()

    # -- resolving --------------------------------------------------------------------------------

    def identify(self, entry_id: EntryId, generation_id: str) -> None:
        """Note the generation id on the server; not waited for."""
        record = Identified(
            entry_id=entry_id, generation_id=generation_id, at_s=self._clock.time_s()
        )
        self._link.put(operation(with_clean_texts(record)))

    async def post(
        self, entry_id: EntryId, charge: Charge, *, also: Work[None] | None = None
    ) -> None:
        """As `BudgetLedger.post`. Row and charge are durable here before the server hears of it;
        while it cannot be reached, that is all there is to wait for.
        """
        record = Posted(entry_id=entry_id, charge=charge, at_s=self._clock.time_s())
        await self._resolve(with_clean_texts(record), also)

    async def void(self, entry_id: EntryId, *, reason: str, also: Work[None] | None = None) -> None:
        """As `BudgetLedger.void`."""
        record = Voided(entry_id=entry_id, reason=reason, at_s=self._clock.time_s())
        await self._resolve(with_clean_texts(record), also)

    async def hold(
        self,
        entry_id: EntryId,
        *,
        reason: str,
        generation_id: str | None = None,
        also: Work[None] | None = None,
    ) -> None:
        """As `BudgetLedger.hold`."""
        record = Held(
            entry_id=entry_id,
            reason=reason,
            generation_id=generation_id,
            at_s=self._clock.time_s(),
        )
        await self._resolve(with_clean_texts(record), also)

    async def _resolve(self, record: Outcome, also: Work[None] | None) -> None:
        if isinstance(record, Posted):
            self._check_charge(record)
        # Shielded: a cancelled wait must not part the outcome in the file from its sending.
        await _shielded(self._resolve_whole(record, also), self._settling)

    async def _resolve_whole(self, record: Outcome, also: Work[None] | None) -> None:
        reserved = self._reserved.pop(record.entry_id, None)
        try:
            number = await self.store.submit(
                lambda c: self._keep_outcome(c, reserved, record, also)
            )
        except EntryStateError:
            if reserved is not None:
                raise
            await self._resolve_elsewhere(record, also)
            return
        except BaseException:
            if reserved is not None:
                self._reserved[record.entry_id] = reserved
            raise
        await self._say(record, number)

    async def _say(self, record: Outcome, number: int) -> None:
        """Tell the server an outcome that is in the outbox."""
        result = await self._send(operation(record), number)
        if result is not KEPT and result:
            log.warning(
                "an outcome came too late: the entry was settled otherwise",
                entry=record.entry_id,
                result=dict(result),
            )

    def _keep_outcome(
        self,
        connection: sqlite3.Connection,
        reserved: Reserved | None,
        record: Outcome,
        also: Work[None] | None,
    ) -> int:
        """Into the local journal, with the row, and into the outbox: one transaction."""
        self._local.record(connection, *([reserved] if reserved else []), record, also=also)
        return self._outbox.add(connection, operation(record))

    def _send(self, said: Mapping[str, Any], number: int) -> asyncio.Future[Mapping[str, Any]]:
        return self._link.put(said, is_safe=True, on_done=lambda _: self._outbox.cross_out(number))

    async def _resolve_elsewhere(self, record: Outcome, also: Work[None] | None) -> None:
        """An entry that this file does not know, of another worker or a dead one: on the server."""
        said = operation(record)
        if also is None:
            if error := refused_transition(said, await self._link.call(said)):
                raise error
            return
        if await self._link.reading(self._is_unknown(record.entry_id)):
            raise EntryStateError(entry_id=record.entry_id, state="not open", transition=said["op"])

        def keep(connection: sqlite3.Connection) -> int:
            also(connection)
            return self._outbox.add(connection, said)

        await self._say(record, await self.store.submit(keep))

    async def _is_unknown(self, entry_id: EntryId) -> bool:
        return not await self._link.client.hexists(self._link.keys["entries"], entry_id)

    def _check_charge(self, record: Posted) -> None:
        """What cannot be true is refused before a row is written.

        Raises:
            ValueError: as `BudgetLedger.post`.
        """
        entry = OpenEntry(
            entry_id=record.entry_id,
            account=ROOT,
            endpoint="",
            reserved_pusd=0,
            status=EntryStatus.RESERVED,
            owner="",
            reserved_at_s=0.0,
        )
        accounts = {ROOT: self._accounts.get(ROOT, AccountState())}
        LedgerState(accounts=accounts, entries={entry.entry_id: entry}).check(record)

    # -- caps and notes ---------------------------------------------------------------------------

    async def set_cap(self, account: Account, cap: object) -> None:
        """As `BudgetLedger.set_cap`, for all workers."""
        record = CapSet(
            account=check_account(account), cap=cap_pusd(cap), at_s=self._clock.time_s()
        )
        await self._link.call(operation(record))

    async def note(self, key: str, value: str, *, keep: bool = False) -> None:
        """As `BudgetLedger.note`, for all workers."""
        record = Noted(key=key, value=value, at_s=self._clock.time_s())
        result = await self._link.call(operation(with_clean_texts(record), keep=keep))
        self.notes[key] = result.get("kept", value)

    # -- looking ----------------------------------------------------------------------------------

    def _publish(self, flat: dict[str, str]) -> None:
        self._accounts = accounts_of(flat)
        self._lines.make_room()

    def balance(self, account: Account = ROOT) -> Balance:
        """Cap, spending and tokens of an account and all below it, as the server last said."""
        return balance_of(account, self._accounts.get(account, AccountState()))

    async def statement(self) -> tuple[StatementLine, ...]:
        """Tokens and money per account and endpoint, of all workers."""
        await self._link.call(MARK)
        return statement_of(await self._read("lines"))

    async def unresolved(self) -> tuple[OpenEntry, ...]:
        """Held entries of all workers, oldest first; the balance and the notes are fresh then."""
        await self._link.call(MARK)
        self.notes = _notes_in(await self._read("notes"))
        entries = await self._read_entries()
        return tuple(item for item in entries.values() if item.status is EntryStatus.HELD)

    async def recorded(self, generation_ids: Iterable[str]) -> frozenset[str]:
        """Those among `generation_ids` whose record has been posted, by whichever worker."""
        wanted = tuple(generation_ids)
        if not wanted:
            return frozenset()
        names = [f"recorded\t{cleaned(generation_id)}" for generation_id in wanted]
        found = await self._link.reading(self._link.client.hmget(self._link.keys["notes"], names))
        return frozenset(name for name, entry in zip(wanted, found, strict=True) if entry)

    async def verify(self) -> None:
        """Replay the server's journal and compare with all that is kept beside it.

        Raises:
            JournalError: they differ, or a record could not have been made.
        """
        await self._link.call(MARK)
        keys = self._link.keys
        pipe = self._link.client.pipeline(transaction=True)
        for name in ("accounts", "entries", "notes"):
            pipe.hgetall(keys[name])
        pipe.xrevrange(keys["journal"], count=1)
        accounts, entries, notes, newest = await self._link.reading(pipe.execute())
        state, number, problem = LedgerState(accounts={}, resolved={}), 0, None
        at, end = "-", newest[0][0] if newest else "-"
        while problem is None and newest:
            page = await self._link.reading(
                self._link.client.xrange(keys["journal"], at, end, count=_PAGE)
            )
            problem = verified_at(state, (fields["r"] for _, fields in page), number)
            number += len(page)
            if len(page) < _PAGE:
                break
            at = f"({page[-1][0]}"
        problem = problem or difference(state, accounts, entries, _notes_in(notes))
        if problem:
            raise JournalError(path=self._link.place, problem=problem)


def _notes_in(found: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix("note\t"): value
        for name, value in found.items()
        if name.startswith("note\t")
    }


async def _shielded(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_tell)
        raise


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an outcome could not be kept", problem=str(error))
