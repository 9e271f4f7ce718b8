"""`RowStore`: rows and runs in the ledger's own file, so that text and money commit together.

All writes are `Work`: they run on the store's writer thread inside its transactions. The answer's
work is handed to the client, which commits it with the charge.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence, Set
from typing import Final

from quantroute.domain import RowKey
from quantroute.errors import DatasetError
from quantroute.generation._config import RunConfig
from quantroute.generation._quality import RowClass
from quantroute.generation._records import (
    Reading,
    RowCounts,
    RowId,
    RowState,
    Standing,
    StoredRow,
    StoredRun,
    TurnRecord,
)
from quantroute.generation._row_book import RowBook
from quantroute.generation._row_sql import (
    fail_row,
    forget_readings,
    open_run,
    read_census,
    read_counts,
    read_last_row_id,
    read_lengths,
    read_reading,
    read_rows,
    read_runs,
    read_standings,
    reopen_refused,
)
from quantroute.generation._schema import create_tables
from quantroute.storage import SqliteStore, Work

__all__ = ["RowStore"]

_BATCH_ROWS: Final = 64


class RowStore:
    """Rows of any number of runs in one file.

    Args:
        store: an open store; the ledger's (`ledger.store`), so that both share transactions.
    """

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._book = store.participant(RowBook)

    @property
    def path(self) -> str:
        """The file."""
        return self._store.path

    async def prepare(self) -> None:
        """Make the tables that are missing; needed before anything else, harmless afterwards."""
        await self._store.submit(lambda c: create_tables(c, path=self._store.path))

    # -- runs -------------------------------------------------------------------------------------

    async def open_run(
        self, config: RunConfig, *, at_s: float, redo: Set[RowClass] = frozenset()
    ) -> StoredRun:
        """The stored run of that name, made if there is none.

        Raises:
            ConfigurationError: it was begun with other settings. Allowed are changes that only add
                rows (more rollouts, more datasets) and, when redoing, another output limit.
        """
        return await self._store.submit(lambda c: open_run(c, config, at_s=at_s, redo=redo))

    async def run(self, name: str) -> StoredRun:
        """The stored run of that name.

        Raises:
            DatasetError: there is none; the message names those that exist.
        """
        runs = await self.runs()
        for run in runs:
            if run.name == name:
                return run
        known = ", ".join(run.name for run in runs) or "none"
        raise DatasetError(path=self.path, problem=f"no run is called {name!r}; known: {known}")

    async def runs(self) -> tuple[StoredRun, ...]:
        """All runs, oldest first."""
        return await self._store.aread(read_runs)

    async def standings(self, run_id: int, keys: Sequence[RowKey]) -> dict[RowKey, Standing]:
        """How far those of the rows are that are stored; some hundred keys at most."""
        return await self._store.aread(lambda c: read_standings(c, run_id, keys))

    async def last_row_id(self) -> int:
        """The highest `row_id` of the file, 0 without rows."""
        return await self._store.aread(read_last_row_id)

    async def reading(self, run_id: int, source: str, *, config_hash: str) -> Reading | None:
        """What came of reading that source to its end with these settings, if every row is done."""
        return await self._store.aread(lambda c: read_reading(c, run_id, source, config_hash))

    async def note_reading(
        self, run_id: int, source: str, reading: Reading, *, config_hash: str
    ) -> None:
        """Record that a source was read to its end and that each of its rows is done."""
        await self._store.submit(
            lambda c: c.execute(
                "INSERT OR REPLACE INTO generation_readings VALUES (?, ?, ?, ?, ?)",
                (run_id, source, config_hash, reading.rows, reading.duplicates),
            )
        )

    async def forget_readings(self, run_id: int) -> None:
        """Rows that were done are to be had anew: what was read must be read again."""
        await self._store.submit(lambda c: forget_readings(c, run_id))

    async def census(self, key: str) -> str | None:
        """What was noted under that key of `note_census`."""
        return await self._store.aread(lambda c: read_census(c, key))

    async def note_census(self, key: str, census: str) -> None:
        """Keep a count of prompts; `key` is a hash of all that it depends on."""
        await self._store.submit(
            lambda c: c.execute(
                "INSERT OR REPLACE INTO generation_censuses VALUES (?, ?)", (key, census)
            )
        )

    async def counts(self, run_id: int) -> tuple[RowCounts, ...]:
        """Rows per dataset, state and class."""
        return await self._store.aread(lambda c: read_counts(c, run_id))

    async def lengths(self, run_id: int, *, most: int) -> dict[str, list[int]]:
        """Output tokens of each dataset's last answers, at most `most`, oldest first."""
        return await self._store.aread(lambda c: read_lengths(c, run_id, most))

    # -- rows -------------------------------------------------------------------------------------

    def turn_work(
        self,
        run_id: int,
        row: RowId,
        record: TurnRecord,
        *,
        state: RowState,
        row_class: RowClass | None,
    ) -> Work[None]:
        """Work that appends an answer and sets the row's state; for the settling transaction.

        It never collides and never overwrites: if the turn has an answer already, this one becomes
        its next revision.
        """
        book = self._book
        return lambda c: book.append(c, run_id, row, record, state=state, row_class=row_class)

    async def note_failure(
        self,
        run_id: int,
        row: RowId,
        *,
        state: RowState,
        problem: str,
        status: int,
        attempts: int,
        at_s: float,
    ) -> None:
        """Record that a row was refused or given up; its turns, if any, stay."""

        def work(connection: sqlite3.Connection) -> None:
            self._book.write(connection)
            fail_row(
                connection,
                run_id,
                row,
                state=state,
                problem=problem,
                status=status,
                attempts=attempts,
                at_s=at_s,
            )

        await self._store.submit(work)

    async def reopen_refused(self, run_id: int, *, status: int, problem: str, at_s: float) -> int:
        """Have rows that were refused in these words asked again; how many there were.

        For a refusal that turned out to be of the account or the settings, not of the rows.
        """

        def work(connection: sqlite3.Connection) -> int:
            self._book.write(connection)
            return reopen_refused(connection, run_id, status=status, problem=problem, at_s=at_s)

        return await self._store.submit(work)

    async def find(self, run_id: int, key: RowKey) -> StoredRow | None:
        """One row with its turns."""
        where = "run_id = ? AND key = ?"
        rows = await self._store.aread(lambda c: read_rows(c, where, (run_id, bytes.fromhex(key))))
        return rows[0] if rows else None

    async def rows(self, run_id: int) -> AsyncIterator[StoredRow]:
        """All rows, in the order of their keys; a batch at a time in memory.

        Keys do not depend on which answer came first: two runs give their rows in one order.
        """
        last = b""
        while True:
            where = "run_id = ? AND key > ? ORDER BY key LIMIT ?"
            values = (run_id, last, _BATCH_ROWS)
            batch = await self._store.aread(
                lambda c, where=where, values=values: read_rows(c, where, values)  # type: ignore[misc]
            )
            for row in batch:
                yield row
            if len(batch) < _BATCH_ROWS:
                return
            last = bytes.fromhex(batch[-1].key)
