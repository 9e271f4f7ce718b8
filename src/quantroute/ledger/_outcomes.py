"""What became of reservations: first into the local file, with the row, then to the server."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Coroutine, Mapping
from typing import Any

from quantroute._log import get_logger
from quantroute.errors import EntryStateError, JournalError
from quantroute.ledger._ledger import BudgetLedger
from quantroute.ledger._outbox import Outbox
from quantroute.ledger._records import (
    ROOT,
    EntryId,
    EntryStatus,
    Held,
    Posted,
    Reserved,
    Voided,
)
from quantroute.ledger._server_link import KEPT, ServerLink
from quantroute.ledger._shared_records import operation, refused_transition
from quantroute.ledger._state import AccountState, LedgerState, OpenEntry
from quantroute.storage import Work

__all__ = ["Outcome", "Outcomes", "check_charge"]

log = get_logger("quantroute.ledger")

Outcome = Posted | Voided | Held


class Outcomes:
    """The reservations of this process that are under way, and the end of each.

    Args:
        local: the ledger on this worker's own file.
        outbox: outcomes that the server has not heard of, in the same file.
    """

    def __init__(self, *, link: ServerLink, local: BudgetLedger, outbox: Outbox) -> None:
        self._link = link
        self._local = local
        self._outbox = outbox
        self._reserved: dict[EntryId, Reserved] = {}
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> tuple[EntryId, ...]:
        """Entries that were reserved here and have no outcome yet."""
        return tuple(self._reserved)

    def expect(self, record: Reserved) -> None:
        """An entry has been reserved on the server."""
        self._reserved[record.entry_id] = record

    async def resolve(self, record: Outcome, also: Work[None] | None) -> None:
        """Keep an outcome and the row with it, then tell the server.

        Raises:
            EntryStateError: the entry is not open.
        """
        # Shielded: a cancelled wait must not part the outcome in the file from its sending.
        await _shielded(self._resolve(record, also), self._settling)

    async def settled(self) -> None:
        """Wait for those that are being resolved."""
        while self._settling:
            await asyncio.wait(self._settling)

    def send(self, said: Mapping[str, Any], number: int) -> asyncio.Future[Mapping[str, Any]]:
        """Send what is in the outbox under that number, and cross it out once it has arrived."""

        def cross_out(_: Mapping[str, Any]) -> None:
            with contextlib.suppress(JournalError):  # a broken file: whoever opens it sends again
                self._outbox.cross_out(number)

        return self._link.put(said, is_safe=True, on_done=cross_out)

    async def _resolve(self, record: Outcome, also: Work[None] | None) -> None:
        reserved = self._reserved.pop(record.entry_id, None)
        try:
            number = await self._local.store.submit(lambda c: self._keep(c, reserved, record, also))
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

    def _keep(
        self,
        connection: sqlite3.Connection,
        reserved: Reserved | None,
        record: Outcome,
        also: Work[None] | None,
    ) -> int:
        """Into the local journal, with the row, and into the outbox: one transaction."""
        self._local.record(connection, *([reserved] if reserved else []), record, also=also)
        return self._outbox.add(connection, operation(record))

    async def _say(self, record: Outcome, number: int) -> None:
        """Tell the server an outcome that is in the outbox."""
        result = await self.send(operation(record), number)
        if result is not KEPT and result:
            log.warning(
                "an outcome came too late: the entry was settled otherwise",
                entry=record.entry_id,
                result=dict(result),
            )

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

        await self._say(record, await self._local.store.submit(keep))

    async def _is_unknown(self, entry_id: EntryId) -> bool:
        return not await self._link.client.hexists(self._link.keys["entries"], entry_id)


def check_charge(record: Posted, root: AccountState) -> None:
    """What cannot be true is refused before a row is written; `root` is as the server said last.

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
    LedgerState(accounts={ROOT: root}, entries={entry.entry_id: entry}).check(record)


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
