"""`RowStore`: rows and runs in the ledger's own file, so that text and money commit together.

All writes are `Work`: they run on the store's writer thread inside its transactions. The answer's
work is handed to the client, which commits it with the charge.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from quantroute.domain import RowKey, canonical_json
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation._config import (
    RunConfig,
    config_difference,
    describe_difference,
    is_extension,
    is_other_limit,
)
from quantroute.generation._prompts import Prompt
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowState, StoredRow, TurnRecord
from quantroute.generation._schema import (
    ROW_COLUMNS,
    TURN_COLUMNS,
    column_of,
    create_tables,
    load_row,
    load_turn,
    turn_values,
)
from quantroute.ledger import EntryId, posted_amounts_pusd
from quantroute.storage import SqliteStore, Work

__all__ = [
    "Reading",
    "RowCounts",
    "RowId",
    "RowStore",
    "Standing",
    "StoredRun",
    "counts_of",
    "runs_of",
]

_BATCH_ROWS: Final = 64
# A look-up instead of a call, for a million rows.
_STATES: Final = {item.value: item for item in RowState}
_CLASSES: Final = {item.value: item for item in RowClass}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the store knows it. `config` is the configuration in force, as plain values."""

    run_id: int
    name: str
    created_at_s: float
    config_hash: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowId:
    """Which row: its key, and the prompt and rollout that the key was made from."""

    key: RowKey
    prompt: Prompt
    rollout: int


class Standing(NamedTuple):
    """How far a stored row is."""

    row_id: int
    state: RowState
    row_class: RowClass | None
    turns_done: int


class Reading(NamedTuple):
    """What a source gave that was read to its end: distinct rows, and rows that repeat others."""

    rows: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """How many rows of one dataset are in one state and class."""

    dataset: str
    state: RowState
    row_class: RowClass | None
    rows: int


class RowStore:
    """Rows of any number of runs in one file.

    Args:
        store: an open store; the ledger's (`ledger.store`), so that both share transactions.
    """

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

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
        return await self._store.submit(lambda c: _open_run(c, config, at_s=at_s, redo=redo))

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
        return await self._store.aread(runs_of)

    async def standings(self, run_id: int, keys: Sequence[RowKey]) -> dict[RowKey, Standing]:
        """How far those of the rows are that are stored; some hundred keys at most."""
        return await self._store.aread(lambda c: _read_standings(c, run_id, keys))

    async def last_row_id(self) -> int:
        """The highest `row_id` of the file, 0 without rows."""
        return await self._store.aread(_read_last_row_id)

    async def reading(self, run_id: int, source: str, *, config_hash: str) -> Reading | None:
        """What came of reading that source to its end with these settings, if every row is done."""
        return await self._store.aread(lambda c: _read_reading(c, run_id, source, config_hash))

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
        await self._store.submit(lambda c: _forget_readings(c, run_id))

    async def counts(self, run_id: int) -> tuple[RowCounts, ...]:
        """Rows per dataset, state and class."""
        return await self._store.aread(lambda c: counts_of(c, run_id))

    async def lengths(self, run_id: int, *, most: int) -> dict[str, list[int]]:
        """Output tokens of each dataset's last answers, at most `most`, oldest first."""
        return await self._store.aread(lambda c: _read_lengths(c, run_id, most))

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
        return lambda c: _append_turn(c, run_id, row, record, state=state, row_class=row_class)

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
            row_id = _insert_row(connection, run_id, row, at_s)
            if row_id is None:
                row_id = _find_row(connection, run_id, row)
            connection.execute(
                "UPDATE generation_rows SET state = ?, problem = ?, status = ?, attempts = ?, "
                "changed_at_s = ? WHERE row_id = ?",
                (state.value, column_of(problem), status, attempts, at_s, row_id),
            )

        await self._store.submit(work)

    async def reopen_refused(self, run_id: int, *, status: int, problem: str, at_s: float) -> int:
        """Have rows that were refused in these words asked again; how many there were.

        For a refusal that turned out to be of the account or the settings, not of the rows.
        """

        def work(connection: sqlite3.Connection) -> int:
            cursor = connection.execute(
                "UPDATE generation_rows SET state = ?, changed_at_s = ? "
                "WHERE run_id = ? AND state = ? AND status = ? AND problem = ?",
                (
                    RowState.GAVE_UP.value,
                    at_s,
                    run_id,
                    RowState.REFUSED.value,
                    status,
                    column_of(problem),
                ),
            )
            if cursor.rowcount:  # what was read to its end with those done is to be read again
                _forget_readings(connection, run_id)
            return cursor.rowcount

        return await self._store.submit(work)

    async def find(self, run_id: int, key: RowKey) -> StoredRow | None:
        """One row with its turns."""
        where = "run_id = ? AND key = ?"
        rows = await self._store.aread(lambda c: _read_rows(c, where, (run_id, bytes.fromhex(key))))
        return rows[0] if rows else None

    async def rows(self, run_id: int) -> AsyncIterator[StoredRow]:
        """All rows, in the order in which they were begun; a batch at a time in memory."""
        last = -1
        while True:
            where = "run_id = ? AND row_id > ? ORDER BY row_id LIMIT ?"
            values = (run_id, last, _BATCH_ROWS)
            batch = await self._store.aread(
                lambda c, where=where, values=values: _read_rows(c, where, values)  # type: ignore[misc]
            )
            for row in batch:
                yield row
            if len(batch) < _BATCH_ROWS:
                return
            last = batch[-1].row_id


def _open_run(
    connection: sqlite3.Connection, config: RunConfig, *, at_s: float, redo: Set[RowClass]
) -> StoredRun:
    stored = next((run for run in runs_of(connection) if run.name == config.name), None)
    if stored is None:
        cursor = connection.execute(
            "INSERT INTO generation_runs (name, created_at_s) VALUES (?, ?)", (config.name, at_s)
        )
        return _set_config(connection, int(cursor.lastrowid or 0), config, at_s)
    difference = config_difference(stored.config, json.loads(canonical_json(config.identity())))
    is_redo = bool(redo) and is_other_limit(difference)
    if not is_redo and not is_extension(difference):
        hint = ""
        if is_other_limit(difference):
            hint = ", or redo the rows of some classes (truncated ones, say) with the new limit"
        raise ConfigurationError(
            f"run {config.name!r} was begun with other settings: "
            f"{describe_difference(difference)}; use a new run name, or the old settings{hint}"
        )
    if json.loads(config.to_json()) == stored.config:
        return stored
    return _set_config(connection, stored.run_id, config, at_s)


def _set_config(
    connection: sqlite3.Connection, run_id: int, config: RunConfig, at_s: float
) -> StoredRun:
    connection.execute(
        "INSERT INTO generation_configs (run_id, config_hash, config, since_s) VALUES (?, ?, ?, ?)",
        (run_id, config.config_hash(), config.to_json(), at_s),
    )
    return next(run for run in runs_of(connection) if run.run_id == run_id)


def runs_of(connection: sqlite3.Connection) -> tuple[StoredRun, ...]:
    """All runs, oldest first."""
    rows = connection.execute(
        """
        SELECT run_id, name, created_at_s, config_hash, config
        FROM generation_runs JOIN generation_configs USING (run_id)
        WHERE generation_configs.rowid IN
            (SELECT max(rowid) FROM generation_configs GROUP BY run_id)
        ORDER BY run_id
        """
    )
    return tuple(
        StoredRun(
            run_id=run_id,
            name=name,
            created_at_s=created_at_s,
            config_hash=config_hash,
            config=json.loads(config),
        )
        for run_id, name, created_at_s, config_hash, config in rows
    )


def _read_standings(
    connection: sqlite3.Connection, run_id: int, keys: Sequence[RowKey]
) -> dict[RowKey, Standing]:
    marks = ", ".join("?" * len(keys))
    rows = connection.execute(
        f"SELECT key, row_id, state, row_class, turns_done FROM generation_rows "  # noqa: S608
        f"WHERE run_id = ? AND key IN ({marks})",
        (run_id, *map(bytes.fromhex, keys)),
    )
    return {
        RowKey(key.hex()): Standing(
            row_id, _STATES[state], None if row_class is None else _CLASSES[row_class], turns_done
        )
        for key, row_id, state, row_class, turns_done in rows
    }


def _read_last_row_id(connection: sqlite3.Connection) -> int:
    (row_id,) = connection.execute("SELECT max(row_id) FROM generation_rows").fetchone()
    return row_id or 0


def _forget_readings(connection: sqlite3.Connection, run_id: int) -> None:
    connection.execute("DELETE FROM generation_readings WHERE run_id = ?", (run_id,))


def _read_reading(
    connection: sqlite3.Connection, run_id: int, source: str, config_hash: str
) -> Reading | None:
    found = connection.execute(
        "SELECT rows, duplicates FROM generation_readings "
        "WHERE run_id = ? AND source = ? AND config_hash = ?",
        (run_id, source, config_hash),
    ).fetchone()
    return None if found is None else Reading(*found)


def counts_of(connection: sqlite3.Connection, run_id: int) -> tuple[RowCounts, ...]:
    """Rows per dataset, state and class."""
    rows = connection.execute(
        "SELECT dataset, state, row_class, count(*) FROM generation_rows WHERE run_id = ? "
        "GROUP BY dataset, state, row_class ORDER BY dataset, state, row_class",
        (run_id,),
    )
    return tuple(
        RowCounts(
            dataset=dataset,
            state=RowState(state),
            row_class=None if row_class is None else RowClass(row_class),
            rows=count,
        )
        for dataset, state, row_class, count in rows
    )


def _read_lengths(connection: sqlite3.Connection, run_id: int, most: int) -> dict[str, list[int]]:
    rows = connection.execute(
        "SELECT dataset, output_tokens FROM (SELECT r.dataset, t.output_tokens, t.created_at_s, "
        "row_number() OVER (PARTITION BY r.dataset ORDER BY t.created_at_s DESC) AS age "
        "FROM generation_rows AS r JOIN generation_turns AS t USING (row_id) WHERE r.run_id = ? "
        "AND t.output_tokens IS NOT NULL) WHERE age <= ? ORDER BY created_at_s",
        (run_id, most),
    )
    lengths: dict[str, list[int]] = {}
    for dataset, output_tokens in rows:
        lengths.setdefault(dataset, []).append(output_tokens)
    return lengths


def _insert_row(
    connection: sqlite3.Connection,
    run_id: int,
    row: RowId,
    at_s: float,
    *,
    state: RowState = RowState.OPEN,
    row_class: RowClass | None = None,
    turns_done: int = 0,
) -> int | None:
    """The id of a row that was not there before; None if it was, and then nothing is changed."""
    prompt = row.prompt
    cursor = connection.execute(
        """
        INSERT OR IGNORE INTO generation_rows
            (run_id, key, dataset, prompt_id, rollout, system, user_turns, metadata,
             state, row_class, turns_done, changed_at_s)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (
            run_id,
            bytes.fromhex(row.key),
            prompt.dataset,
            column_of(prompt.id),
            row.rollout,
            prompt.system,
            canonical_json(list(prompt.turns)),
            canonical_json(dict(prompt.metadata)) if prompt.metadata else "{}",
            state.value,
            None if row_class is None else row_class.value,
            turns_done,
            at_s,
        ),
    )
    return cursor.lastrowid if cursor.rowcount == 1 else None


def _find_row(connection: sqlite3.Connection, run_id: int, row: RowId) -> int:
    (row_id,) = connection.execute(
        "SELECT row_id FROM generation_rows WHERE run_id = ? AND key = ?",
        (run_id, bytes.fromhex(row.key)),
    ).fetchone()
    return int(row_id)


_INSERT_TURN: Final = (
    f"INSERT INTO generation_turns (row_id, {', '.join(TURN_COLUMNS)}) "  # noqa: S608 - fixed names
    f"VALUES (?{', ?' * len(TURN_COLUMNS)})"
)


def _append_turn(
    connection: sqlite3.Connection,
    run_id: int,
    row: RowId,
    record: TurnRecord,
    *,
    state: RowState,
    row_class: RowClass | None,
) -> None:
    turns_done = record.turn + 1
    row_id = _insert_row(
        connection,
        run_id,
        row,
        record.created_at_s,
        state=state,
        row_class=row_class,
        turns_done=turns_done,
    )
    if row_id is not None:  # nearly always: a single turn, in two statements
        connection.execute(_INSERT_TURN, (row_id, *turn_values(record)))
        return
    row_id = _find_row(connection, run_id, row)
    # Not below the turns before it, above every earlier answer to it and to the turns after it:
    # what those were conditioned on is out of date from now on.
    (revision,) = connection.execute(
        "SELECT coalesce(max(revision + (turn >= ?)), 0) FROM generation_turns WHERE row_id = ?",
        (record.turn, row_id),
    ).fetchone()
    connection.execute(_INSERT_TURN, (row_id, *turn_values(replace(record, revision=revision))))
    connection.execute(
        "UPDATE generation_rows SET state = ?, row_class = ?, turns_done = ?, problem = NULL, "
        "status = NULL, attempts = NULL, changed_at_s = ? WHERE row_id = ?",
        (
            state.value,
            None if row_class is None else row_class.value,
            turns_done,
            record.created_at_s,
            row_id,
        ),
    )


def _read_rows(
    connection: sqlite3.Connection, where: str, values: Iterable[Any]
) -> list[StoredRow]:
    rows = connection.execute(
        f"SELECT {ROW_COLUMNS} FROM generation_rows WHERE {where}",  # noqa: S608 - fixed names
        tuple(values),
    ).fetchall()
    turns: defaultdict[int, list[TurnRecord]] = defaultdict(list)
    marks = ", ".join("?" * len(rows))
    for row_id, *columns in connection.execute(
        f"SELECT row_id, {', '.join(TURN_COLUMNS)} FROM generation_turns "  # noqa: S608
        f"WHERE row_id IN ({marks})",
        tuple(row[0] for row in rows),
    ):
        turns[row_id].append(load_turn(tuple(columns)))
    _fill_in_costs(connection, turns.values())
    return [load_row(row, turns[row[0]]) for row in rows]


def _fill_in_costs(connection: sqlite3.Connection, chains: Iterable[list[TurnRecord]]) -> None:
    """Costs that were not known when the answer was stored, as the ledger posted them since."""
    for chain in chains:
        unknown = [EntryId(record.entry_id) for record in chain if record.cost_pusd is None]
        if not unknown:
            continue
        posted = posted_amounts_pusd(connection, unknown)
        chain[:] = [
            replace(record, cost_pusd=posted.get(EntryId(record.entry_id), record.cost_pusd))
            for record in chain
        ]
