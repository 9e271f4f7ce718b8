"""The SQL of the row store: each function is one step on the store's own connection."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Any, Final

from msgspec import structs

from quantroute.domain import RowKey, canonical_json
from quantroute.errors import ConfigurationError
from quantroute.generation._config import (
    RunConfig,
    config_difference,
    describe_difference,
    is_extension,
    is_other_limit,
)
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
from quantroute.generation._schema import (
    NEW_ROW_COLUMNS,
    ROW_COLUMNS,
    TURN_COLUMNS,
    column_of,
    load_row,
    load_turn,
    new_row_values,
    turn_values,
)
from quantroute.ledger import EntryId, posted_amounts_pusd
from quantroute.storage import bound, insert_rows

__all__ = [
    "append_turn",
    "fail_row",
    "forget_readings",
    "insert_rows_with_turns",
    "open_run",
    "read_census",
    "read_counts",
    "read_last_row_id",
    "read_lengths",
    "read_reading",
    "read_rows",
    "read_runs",
    "read_standings",
    "reopen_refused",
]

# A look-up instead of a call, for a million rows.
_STATES: Final = {item.value: item for item in RowState}
_CLASSES: Final = {item.value: item for item in RowClass}


def open_run(
    connection: sqlite3.Connection, config: RunConfig, *, at_s: float, redo: Set[RowClass]
) -> StoredRun:
    stored = next((run for run in read_runs(connection) if run.name == config.name), None)
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
    return next(run for run in read_runs(connection) if run.run_id == run_id)


def read_runs(connection: sqlite3.Connection) -> tuple[StoredRun, ...]:
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


def read_standings(
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


def read_last_row_id(connection: sqlite3.Connection) -> int:
    (row_id,) = connection.execute("SELECT max(row_id) FROM generation_rows").fetchone()
    return row_id or 0


def forget_readings(connection: sqlite3.Connection, run_id: int) -> None:
    connection.execute("DELETE FROM generation_readings WHERE run_id = ?", (run_id,))


def read_reading(
    connection: sqlite3.Connection, run_id: int, source: str, config_hash: str
) -> Reading | None:
    found = connection.execute(
        "SELECT rows, duplicates FROM generation_readings "
        "WHERE run_id = ? AND source = ? AND config_hash = ?",
        (run_id, source, config_hash),
    ).fetchone()
    return None if found is None else Reading(*found)


def read_census(connection: sqlite3.Connection, key: str) -> str | None:
    """What was counted, as it was noted."""
    found = connection.execute(
        "SELECT census FROM generation_censuses WHERE key = ?", (key,)
    ).fetchone()
    return None if found is None else str(found[0])


def read_counts(connection: sqlite3.Connection, run_id: int) -> tuple[RowCounts, ...]:
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


def read_lengths(connection: sqlite3.Connection, run_id: int, most: int) -> dict[str, list[int]]:
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


def _insert_row(connection: sqlite3.Connection, values: tuple[Any, ...]) -> int | None:
    """The id of a row that was not there before; None if it was, and then nothing is changed."""
    cursor = connection.execute(_INSERT_ROW, bound(values))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def _find_row(connection: sqlite3.Connection, run_id: int, row: RowId) -> int:
    (row_id,) = connection.execute(
        "SELECT row_id FROM generation_rows WHERE run_id = ? AND key = ?",
        (run_id, bytes.fromhex(row.key)),
    ).fetchone()
    return int(row_id)


_BEGIN_ROW: Final = f"INSERT OR IGNORE INTO generation_rows ({', '.join(NEW_ROW_COLUMNS)}) VALUES"
_INSERT_ROW: Final = f"{_BEGIN_ROW} ({', '.join('?' * len(NEW_ROW_COLUMNS))})"
_BEGIN_NUMBERED_ROWS: Final = _BEGIN_ROW.replace("(", "(row_id, ")
_BEGIN_TURNS: Final = f"INSERT INTO generation_turns (row_id, {', '.join(TURN_COLUMNS)}) VALUES"
_INSERT_TURN: Final = f"{_BEGIN_TURNS} (?{', ?' * len(TURN_COLUMNS)})"


def insert_rows_with_turns(
    connection: sqlite3.Connection,
    rows: Sequence[tuple[Any, ...]],
    turns: Sequence[tuple[Any, ...]],
) -> list[int]:
    """Insert rows of distinct keys, each with its turn, as `new_row_values` and `turn_values`.

    Returns the places in `rows` of those that were there before; nothing is done about them.
    """
    first = read_last_row_id(connection) + 1  # nobody else writes: the transaction has the file
    changes = connection.total_changes
    numbered = [(row_id, *values) for row_id, values in enumerate(rows, first)]
    insert_rows(connection, _BEGIN_NUMBERED_ROWS, numbered)
    known: list[int] = []
    if connection.total_changes - changes < len(rows):
        made = connection.execute("SELECT row_id FROM generation_rows WHERE row_id >= ?", (first,))
        new = {row_id for (row_id,) in made}
        known = [at for at in range(len(rows)) if first + at not in new]
    passed_over = frozenset(known)
    insert_rows(
        connection,
        _BEGIN_TURNS,
        [(first + at, *values) for at, values in enumerate(turns) if at not in passed_over],
    )
    return known


def append_turn(
    connection: sqlite3.Connection,
    run_id: int,
    row: RowId,
    record: TurnRecord,
    *,
    state: RowState,
    row_class: RowClass | None,
) -> None:
    turns_done = record.turn + 1
    values = new_row_values(
        run_id, row, record.created_at_s, state=state, row_class=row_class, turns_done=turns_done
    )
    row_id = _insert_row(connection, values)
    if row_id is not None:
        connection.execute(_INSERT_TURN, bound((row_id, *turn_values(record))))
        return
    row_id = _find_row(connection, run_id, row)
    # Not below the turns before it, above every earlier answer to it and to the turns after it:
    # what those were conditioned on is out of date from now on.
    (revision,) = connection.execute(
        "SELECT coalesce(max(revision + (turn >= ?)), 0) FROM generation_turns WHERE row_id = ?",
        (record.turn, row_id),
    ).fetchone()
    connection.execute(
        _INSERT_TURN, (row_id, *turn_values(structs.replace(record, revision=revision)))
    )
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


def read_rows(connection: sqlite3.Connection, where: str, values: Iterable[Any]) -> list[StoredRow]:
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
            structs.replace(
                record, cost_pusd=posted.get(EntryId(record.entry_id), record.cost_pusd)
            )
            for record in chain
        ]


def fail_row(
    connection: sqlite3.Connection,
    run_id: int,
    row: RowId,
    *,
    state: RowState,
    problem: str,
    status: int,
    attempts: int,
    at_s: float,
) -> None:
    """Set a row, made if need be, to an end without an answer."""
    row_id = _insert_row(connection, new_row_values(run_id, row, at_s))
    if row_id is None:
        row_id = _find_row(connection, run_id, row)
    connection.execute(
        "UPDATE generation_rows SET state = ?, problem = ?, status = ?, attempts = ?, "
        "changed_at_s = ? WHERE row_id = ?",
        (state.value, column_of(problem), status, attempts, at_s, row_id),
    )


def reopen_refused(
    connection: sqlite3.Connection, run_id: int, *, status: int, problem: str, at_s: float
) -> int:
    """Have rows that were refused in these words tried again; how many there were."""
    refused = (RowState.REFUSED.value, status, column_of(problem))
    cursor = connection.execute(
        "UPDATE generation_rows SET state = ?, changed_at_s = ? "
        "WHERE run_id = ? AND state = ? AND status = ? AND problem = ?",
        (RowState.GAVE_UP.value, at_s, run_id, *refused),
    )
    if cursor.rowcount:  # what was read to its end with those done is to be read again
        forget_readings(connection, run_id)
    return cursor.rowcount
