"""Which rows of a run are still to be had: asked of the store, so that memory does not grow.

A million keys in sets would take two hundred megabytes, in a run as in its resumption. So what is
kept is a bit per row that the store had before, and the keys of rows begun since that are not in
the store yet, or came into it lately. All else the store is asked, some hundred keys at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from quantroute.generation._feed import Feed
from quantroute.generation._quality import RowClass
from quantroute.generation._records import Reading, RowId, RowState, Standing, digest
from quantroute.generation._rows import RowStore

__all__ = ["DueRows", "KnownRows"]

#: So many keys are kept (some 100 bytes each) before those of stored rows are given up. A run of
#: fewer rows that starts anew asks the store nothing.
_MOST_MARKS: Final = 65_536
_LARGEST_BATCH_ROWS: Final = 256
#: Passing over rows needs no waiting; the loop gets its turn all the same.
_READS_PER_TURN: Final = 256


@dataclass(slots=True, kw_only=True)
class KnownRows:
    """What is known of the rows of one run; `sift` takes each row once.

    Args:
        redo: classes of finished rows that are to be had anew; then no row is begun that the store
            does not know, unless it knows none.
        retry_refused: rows that the service refused are to be had too.
        batch_rows: rows to look up at once.
    """

    rows: RowStore
    redo: Set[RowClass] = frozenset()
    retry_refused: bool = False
    batch_rows: int = _LARGEST_BATCH_ROWS
    run_id: int = field(default=-1, init=False)
    resumed: int = field(default=0, init=False)
    duplicates: int = field(default=0, init=False)
    not_begun: int = field(default=0, init=False)
    """Prompts passed over as their rows are new, and others are to be redone."""
    done_before: int = field(default=0, init=False)
    """Rows that were done when this start began."""
    _marks: set[bytes] = field(default_factory=set, init=False)
    _ended: list[bytes] = field(default_factory=list, init=False)
    _started: set[bytes] = field(default_factory=set, init=False)
    _seen: bytearray = field(default_factory=bytearray, init=False)  # a bit per old row, by its id
    _must_ask: bool = field(default=False, init=False)
    _takes_new: bool = field(default=True, init=False)
    _asking: int = field(default=0, init=False)

    async def open(self, run_id: int) -> None:
        """Learn what the store has of that run, in numbers; before anything else."""
        self.run_id = run_id
        self.batch_rows = max(1, min(self.batch_rows, _LARGEST_BATCH_ROWS))
        counts = await self.rows.counts(self.run_id)
        self.done_before = sum(
            item.rows for item in counts if self._is_done(item.state, item.row_class)
        )
        if counts:
            self._must_ask = True
            self._takes_new = not self.redo
            self._seen = bytearray(await self.rows.last_row_id() // 8 + 1)

    @property
    def read_ahead(self) -> int:
        """How many rows to read before `sift`: several only if the store has to be asked."""
        return self.batch_rows if self._must_ask else 1

    async def sift(self, batch: list[RowId], feed: Feed) -> list[RowId]:
        """Those of `batch` that are to be had now, in their order; the others are counted.

        `feed` is whose rows they are; it is told how many of them are new to this start.
        """
        self._forget()
        if not self._must_ask:
            return [row for row in batch if self._is_due(row, None, feed)]
        self._asking += 1
        try:
            found = await self.rows.standings(self.run_id, [row.key for row in batch])
        finally:
            self._asking -= 1
        return [row for row in batch if self._is_due(row, found.get(row.key), feed)]

    def is_started(self, row: RowId) -> bool:
        """Whether some turns of a row that is due may be in the store."""
        return digest(row.key) in self._started

    def note_started(self, row: RowId) -> None:
        """The row will be tried again in this start, and some turns may be in by then."""
        self._started.add(digest(row.key))

    def note_end(self, row: RowId) -> None:
        """The row has ended and is in the store as it is."""
        mark = digest(row.key)
        self._started.discard(mark)
        if mark in self._marks:
            self._ended.append(mark)

    def note_unread(self, feed: Feed, reading: Reading) -> None:
        """A feed is not read, as all of its rows are known to be done."""
        feed.rows, feed.duplicates = reading
        self.resumed += reading.rows
        self.duplicates += reading.duplicates

    def _forget(self) -> None:
        """Give up marks of rows that the store knows; not while an answer of the store is due.

        That answer may be older than a row's end, and the mark is then all that tells of it.
        """
        if len(self._marks) > _MOST_MARKS and not self._asking and self._ended:
            self._marks.difference_update(self._ended)
            self._ended.clear()
            self._must_ask = True

    def _is_due(self, row: RowId, standing: Standing | None, feed: Feed) -> bool:
        mark = digest(row.key)
        if mark in self._marks or (standing is not None and self._was_seen(standing.row_id)):
            self.duplicates += 1
            feed.duplicates += 1
            return False
        if standing is None and not self._takes_new:
            self.not_begun += 1
            feed.count_missed()
            return False
        feed.rows += 1
        if standing is None:
            self._marks.add(mark)
            return True
        if self._is_done(standing.state, standing.row_class):
            self.resumed += 1
            return False
        if standing.turns_done:
            self._started.add(mark)
        return True

    def _was_seen(self, row_id: int) -> bool:
        """Whether a prompt of this start has led to that row already; from now on one has."""
        byte, bit = divmod(row_id, 8)
        if byte >= len(self._seen):
            return True  # newer than this start
        was_seen = bool(self._seen[byte] >> bit & 1)
        self._seen[byte] |= 1 << bit
        return was_seen

    def _is_done(self, state: RowState, row_class: RowClass | None) -> bool:
        if state is RowState.FINISHED:
            return row_class not in self.redo
        return state is RowState.REFUSED and not self.retry_refused


@dataclass(slots=True)
class DueRows:
    """The rows of one feed that are to be had, in their order, read as they are wanted."""

    rows: Iterator[RowId]
    known: KnownRows
    feed: Feed
    _due: deque[RowId] = field(default_factory=deque, init=False)
    _failure: Exception | None = field(default=None, init=False)

    async def next(self) -> RowId | None:
        """The next one; None at the end.

        Raises:
            DatasetError: the next prompt cannot be read.
        """
        reads = 0
        while not self._due:
            batch = self._read()
            if not batch:
                if self._failure is not None:
                    raise self._failure
                return None
            self._due.extend(await self.known.sift(batch, self.feed))
            reads += 1
            if reads % _READS_PER_TURN == 0:
                await asyncio.sleep(0)
        return self._due.popleft()

    def _read(self) -> list[RowId]:
        """As many rows as are looked up at once; those before an error come before the error."""
        batch: list[RowId] = []
        if self._failure is None:
            try:
                for row in islice(self.rows, self.known.read_ahead):
                    batch.append(row)  # noqa: PERF402 - what was read must outlive an error
            except Exception as error:  # noqa: BLE001 - raised once those rows are under way
                self._failure = error
        return batch
