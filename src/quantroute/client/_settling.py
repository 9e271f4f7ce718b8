"""Held charges settled while a run goes on, by their generation records, as those come out.

What is due when. Each held entry with a generation id is looked up a moment after it was seen, then
after ever longer pauses; look-ups share a small pace and stop for a while when the service is
silent or says that it is asked too often. They use no slot of the router's and no money.

What the run gets from it. A settled entry frees what its reservation exceeded the bill by. While an
entry may soon be settled the ledger lets reservations wait for it instead of refusing them; an
entry without an id, one whose record is posted already for another entry, and one that has been
looked for in vain for `patience_s` are not waited for. The last kind is looked up further, and
whatever is left at the end is for `quantroute reconcile`.

Exactly once: an entry that was settled by somebody else (another process, a second attempt) is not
open any more, and a record is posted for one entry only; the ledger refuses the second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from quantroute._log import get_logger
from quantroute.client._accounts import KeyComparison
from quantroute.clock import Clock
from quantroute.errors import AccountError, ConfigurationError, JournalError, TransportError
from quantroute.ledger import EntryId, Ledger, OpenEntry

__all__ = ["Attendance", "Settler", "SettlingSettings"]

log = get_logger("quantroute.client")

_TOO_MANY: Final = 429

Look = Callable[[OpenEntry], Awaitable[tuple[int, int | None]]]
"""Look an entry's record up and post it: the status, and the amount posted (None: not yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlingSettings:
    """How eagerly held charges are looked up during a run.

    Args:
        poll_s: how often the ledger is looked at for held entries.
        first_pause_s, longest_pause_s: between look-ups of one entry; doubles from one to the
            other.
        patience_s: how long a record is expected to take at most; a run at its cap waits so long
            for money that held charges may free.
        at_once: look-ups on the wire at the same time.
        per_s: look-ups begun in a second.
    """

    poll_s: float = 1.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    patience_s: float = 20.0
    at_once: int = 4
    per_s: float = 10.0

    def __post_init__(self) -> None:
        positive = (self.poll_s, self.first_pause_s, self.longest_pause_s, self.per_s)
        is_possible = all(item > 0 for item in positive) and self.patience_s >= 0  # NaN is not
        if not is_possible or self.at_once < 1:
            raise ConfigurationError(
                "settling needs positive pauses and pace, at_once >= 1 and patience_s >= 0"
            )


@dataclass(slots=True)
class Attendance:
    """What watched over the money of a run: the key's usage before and after, and what settled.

    The comparisons are None where the service did not say.
    """

    at_start: KeyComparison | None = None
    at_end: KeyComparison | None = None
    settled_entries: int = 0
    settled_pusd: int = 0


@dataclass(slots=True)
class _Search:
    """One entry that is being looked for. Times are monotonic seconds."""

    entry: OpenEntry
    since_s: float
    due_s: float
    pause_s: float


@dataclass(slots=True, kw_only=True)
class Settler:
    """Settles held entries of one ledger until it is cancelled."""

    ledger: Ledger
    look: Look
    clock: Clock
    settings: SettlingSettings
    attendance: Attendance
    _searches: dict[EntryId, _Search] = field(default_factory=dict, init=False)
    _next_look_s: float = field(default=0.0, init=False)
    _silent_for_s: float = field(default=0.0, init=False)
    _quiet_until_s: float = field(default=float("-inf"), init=False)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Settle in the background while in the block; ends with it, whatever happens there."""
        self.ledger.expect_settling(lost=())
        task = asyncio.create_task(self._run(), name="quantroute settling")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            self.ledger.expect_settling(lost=None)
            if not task.cancelled() and (error := task.exception()) is not None:
                # A mistake of ours: it must not cost the run its report, nor go unseen.
                log.error("settling failed", problem=repr(error))

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except (JournalError, AccountError) as error:
                # The run meets the same trouble and tells it; nothing is lost by stopping here.
                log.warning("settling stopped", problem=str(error))
                self.ledger.expect_settling(lost=None)
                return
            await self.clock.sleep(self.settings.poll_s)

    async def _round(self) -> None:
        """Look at what is held, and look up what is due."""
        if not self.ledger.balance().held_entries:
            self._searches.clear()
            self.ledger.expect_settling(lost=())
            return
        held = await self.ledger.unresolved()
        self._note(held)
        ids = [entry.generation_id for entry in held if entry.generation_id]
        recorded = await self.ledger.recorded(ids)
        now_s = self.clock.now_s()
        self.ledger.expect_settling(
            lost=[entry for entry in held if self._is_lost(entry, recorded, now_s)]
        )
        due = [
            search
            for search in self._searches.values()
            if search.due_s <= now_s and search.entry.generation_id not in recorded
        ]
        await self._look_up(sorted(due, key=lambda search: search.due_s))

    def _note(self, held: Sequence[OpenEntry]) -> None:
        """Begin to search what is new, forget what somebody has settled."""
        now_s, first_s = self.clock.now_s(), self.settings.first_pause_s
        known, self._searches = self._searches, {}
        for entry in held:
            if entry.generation_id:
                self._searches[entry.entry_id] = known.get(entry.entry_id) or _Search(
                    entry=entry, since_s=now_s, due_s=now_s, pause_s=first_s
                )

    def _is_lost(self, entry: OpenEntry, recorded: frozenset[str], now_s: float) -> bool:
        search = self._searches.get(entry.entry_id)
        if search is None or entry.generation_id in recorded:
            return True
        return now_s - search.since_s > self.settings.patience_s

    async def _look_up(self, due: Sequence[_Search]) -> None:
        waiting = iter(due)

        async def worker() -> None:
            for search in waiting:
                if not await self._look_at(search):
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.settings.at_once, len(due))):
                    group.create_task(worker())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _look_at(self, search: _Search) -> bool:
        """One look-up, at the common pace; False when the service wants to be left alone."""
        await self._keep_pace()
        problem = ""
        try:
            status, amount_pusd = await self.look(search.entry)
            if status == _TOO_MANY or status >= 500:
                problem = f"status {status}"
        except TransportError as error:
            amount_pusd, problem = None, error.problem
        if problem:
            self._leave_alone(problem)
            return False
        self._silent_for_s = 0.0
        if amount_pusd is None:
            search.due_s = self.clock.now_s() + search.pause_s
            search.pause_s = min(search.pause_s * 2, self.settings.longest_pause_s)
            return True
        self._searches.pop(search.entry.entry_id, None)
        self.attendance.settled_entries += 1
        self.attendance.settled_pusd += amount_pusd
        return True

    async def _keep_pace(self) -> None:
        now_s = self.clock.now_s()
        at_s = max(now_s, self._next_look_s)
        self._next_look_s = at_s + 1 / self.settings.per_s
        if at_s > now_s:
            await self.clock.sleep(at_s - now_s)

    def _leave_alone(self, problem: str) -> None:
        """Ask nothing for a while, longer each time; look-ups that fail together count once."""
        if self.clock.now_s() < self._quiet_until_s:
            return
        self._silent_for_s = min(
            max(self._silent_for_s * 2, self.settings.first_pause_s), self.settings.longest_pause_s
        )
        self._quiet_until_s = self._next_look_s = self.clock.now_s() + self._silent_for_s
        log.info("generation records not available", problem=problem, pause_s=self._silent_for_s)
