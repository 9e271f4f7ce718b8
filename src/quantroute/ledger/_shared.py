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
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from msgspec import structs

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
from quantroute.ledger._outcomes import Outcomes, check_charge
from quantroute.ledger._owners import Owners, about_owner
from quantroute.ledger._recorder import Recorder
from quantroute.ledger._records import (
    ROOT,
    Account,
    CapSet,
    EntryId,
    EntryStatus,
    Held,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
)
from quantroute.ledger._server_books import (
    check_not_set_back,
    read_books,
    read_entries,
    read_notes,
    verify_books,
)
from quantroute.ledger._server_link import MARK, ServerLink
from quantroute.ledger._shared_records import (
    accounts_of,
    cleaned,
    operation,
    record_of,
    refusal_of,
    refused_transition,
    statement_of,
    with_clean_texts,
)
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.ledger._statement import Balance, StatementLine, balance_of
from quantroute.ledger._waiting import Refusal
from quantroute.money import NO_CAP, Cap, cap_pusd
from quantroute.storage import MEMORY, SqliteStore, Work

__all__ = ["SharedLedger"]

log = get_logger("quantroute.ledger")

_BEAT_S: Final = 5.0
_DEAD_AFTER_S: Final = 60.0
_PATIENCE_S: Final = 30.0
_FLUSH_S: Final = 5.0


class SharedLedger(Recorder):
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
        super().__init__(clock=clock or SystemClock())
        self._local = BudgetLedger(self._path, cap=NO_CAP, clock=self._clock)
        self._accounts: dict[Account, AccountState] = {}
        self._behind_s = 0  # our clock, behind the server's
        self._heart: asyncio.Task[None] | None = None
        self._replaced: JournalError | None = None
        self._link: ServerLink
        self._outbox: Outbox
        self._outcomes: Outcomes
        self._owners: Owners

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

    @property
    def store(self) -> SqliteStore:
        """The local file; rows written through `also` share a transaction with their outcome."""
        return self._local.store

    # -- opening and closing ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._owner:
            raise ConfigurationError("this ledger is open already; make a second one")
        await self._local.__aenter__()
        self._begin(self._local.owner)
        self._replaced = None
        about = about_owner(self._path, self._label)
        self._link = ServerLink(
            self._url,
            name=self._name,
            owner=self._owner,
            about=about,
            patience_s=self._patience_s,
            on_accounts=self._publish,
        )
        self._owners = Owners(
            link=self._link,
            local=self._local,
            owner=self._owner,
            about=about,
            dead_after_s=self._dead_after_s,
            clock=self._clock,
        )
        try:
            await self._link.open(
                allow_volatile=self._allow_volatile, may_create=self._cap is not None
            )
            await self._settle_in()
        except BaseException:
            owner, self._owner = self._owner, ""
            await self._withdraw(owner)
            await self._link.aclose()
            await self._local.aclose()
            raise
        self._heart = asyncio.create_task(self._beat())
        return self

    async def aclose(self) -> None:
        """Hold what is still under way, tell the server what it has not heard, and close."""
        if not self._owner:
            return
        owner, self._owner = self._owner, ""
        try:
            if self._heart is not None:
                self._heart.cancel()
                self._heart = None
            for entry_id in self._outcomes.under_way:
                with contextlib.suppress(EntryStateError):
                    await self.hold(entry_id, reason="closed while in flight")
            await self._outcomes.settled()
            await self._say_goodbye(owner)
        except JournalError as error:
            log.warning("shared ledger closed after a failure", problem=error.problem)
        finally:
            await self._link.aclose()
            await self._local.aclose()

    async def _withdraw(self, owner: str) -> None:
        """An opening that failed must not look like a worker that lives."""
        if self._link.is_lost:
            return
        with contextlib.suppress(JournalError, TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._link.call({"op": "forget", "owner": owner})

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

    async def _settle_in(self) -> None:
        """Send what earlier owners of the file left, take over from the dead, set the cap."""
        self._outbox = Outbox(
            self.store,
            ledger_id=self._link.ledger_id,
            name=self._name,
            owner=self._owner,
            confirmed=lambda: self._link.confirmed,
        )
        self._outcomes = Outcomes(link=self._link, local=self._local, outbox=self._outbox)
        await check_not_set_back(self._link, await self._outbox.open())
        await self._link.call(MARK)
        server_s, _ = await self._link.reading(self._link.client.time())
        self._behind_s = round(server_s - self._clock.time_s())
        await self._outbox.begin(self._local.is_alive)
        for unsent in self._outbox.unsent(self._local.is_alive):
            self._outcomes.send(unsent.said, unsent.number)
        await self._link.call(MARK)
        self.notes = await read_notes(self._link)
        await self._owners.bury_the_dead(is_opening=True)
        await self._catch_up()
        root = self._accounts.get(ROOT)
        if self._cap is None and root is None:
            raise ConfigurationError("a new ledger needs a cap: '5.00' USD, or NO_CAP")
        if self._cap is not None and (root is None or root.cap != self._cap):
            record = CapSet(account=ROOT, cap=self._cap, at_s=self._clock.time_s())
            await self._link.call(operation(record))

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
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        while True:
            await asyncio.sleep(beat_s)
            try:
                await self._link.call(MARK)
                silent_s, heard_s = now_s() - heard_s, now_s()
                await self._owners.bury_the_dead()
                if silent_s > self._dead_after_s:
                    await self._owners.refuse_double()
            except LedgerUnreachable:
                continue
            except JournalError as replaced:
                log.error("another worker has taken over", problem=replaced.problem)
                self._replaced = replaced
                return

    # -- reserving --------------------------------------------------------------------------------

    async def _try_reserve(self, record: Reserved) -> EntryId | Refusal:
        if not self._owner:  # an entry needs an owner, and an id that nobody else gives
            raise JournalError(path=self._path, problem="the ledger is closed")
        if self._replaced is not None:
            raise self._replaced.with_traceback(None)
        LedgerState().check(record)  # amounts that cannot be are refused here
        record = with_clean_texts(record)
        # Hosts' clocks differ by minutes: the server's books have the server's time.
        said = operation(structs.replace(record, at_s=record.at_s + self._behind_s))
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
        self._outcomes.expect(record)
        return record.entry_id

    # -- writing ----------------------------------------------------------------------------------

    async def _write(self, record: Record, also: Work[None] | None) -> None:
        """Outcomes are durable here, with `also`, before the server hears of them; while it cannot
        be reached, that is all there is to wait for. Caps are the server's at once.
        """
        match record:
            case Posted() | Voided() | Held():
                if isinstance(record, Posted):
                    check_charge(record, self._accounts.get(ROOT, AccountState()))
                await self._outcomes.resolve(with_clean_texts(record), also)
            case _:
                await self._link.call(operation(record))

    def _write_soon(self, record: Record) -> None:
        self._link.put(operation(with_clean_texts(record)))

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
        return statement_of(await read_books(self._link, "lines"))

    async def unresolved(self) -> tuple[OpenEntry, ...]:
        """Held entries of all workers, oldest first; the balance and the notes are fresh then.

        Their times are by this worker's clock, whoever reserved them.
        """
        await self._link.call(MARK)
        self.notes = await read_notes(self._link)
        entries = await read_entries(self._link)
        return tuple(
            structs.replace(item, reserved_at_s=item.reserved_at_s - self._behind_s)
            for item in entries.values()
            if item.status is EntryStatus.HELD
        )

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
        await verify_books(self._link)
