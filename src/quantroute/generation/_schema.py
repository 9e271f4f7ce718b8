"""Tables of the row store, beside the ledger's in the same file, and how values become columns."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

from quantroute.domain import RowKey, canonical_json, canonical_texts
from quantroute.errors import JournalError
from quantroute.generation._prompts import Prompt
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowId, RowState, StoredRow, TurnRecord, current_chain

__all__ = [
    "NEW_ROW_COLUMNS",
    "ROW_COLUMNS",
    "TURN_COLUMNS",
    "column_of",
    "create_tables",
    "load_row",
    "load_turn",
    "new_row_values",
    "text_of",
    "turn_values",
]

LAYOUT: Final = 1

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS generation_meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    """
    CREATE TABLE IF NOT EXISTS generation_runs (
        run_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, created_at_s REAL NOT NULL
    )
    """,
    # Every configuration a run was ever started with; the last one is in force.
    """
    CREATE TABLE IF NOT EXISTS generation_configs (
        run_id INTEGER NOT NULL REFERENCES generation_runs, config_hash TEXT NOT NULL,
        config TEXT NOT NULL, since_s REAL NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS generation_rows (
        row_id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES generation_runs,
        key BLOB NOT NULL, dataset TEXT NOT NULL, prompt_id, rollout INTEGER NOT NULL,
        system TEXT, user_turns TEXT NOT NULL, metadata TEXT NOT NULL,
        state TEXT NOT NULL, row_class TEXT, turns_done INTEGER NOT NULL,
        problem, status INTEGER, attempts INTEGER, changed_at_s REAL NOT NULL,
        UNIQUE (run_id, key)
    )
    """,
    # Columns without a type keep what is bound: text, or bytes where text is not valid Unicode.
    """
    CREATE TABLE IF NOT EXISTS generation_turns (
        row_id INTEGER NOT NULL REFERENCES generation_rows,
        turn INTEGER NOT NULL, revision INTEGER NOT NULL, row_class TEXT NOT NULL,
        details TEXT NOT NULL, flags TEXT NOT NULL, loop_score REAL NOT NULL,
        content, reasoning, finish_reason, native_finish_reason,
        input_tokens INTEGER, output_tokens INTEGER, reasoning_tokens INTEGER,
        cached_tokens INTEGER, cache_write_tokens INTEGER, cost_pusd INTEGER,
        entry_id TEXT NOT NULL, generation_id, endpoint TEXT NOT NULL, provider_name TEXT NOT NULL,
        served_provider, served_model, quantization_label TEXT, precision TEXT NOT NULL,
        input_usd_per_token TEXT, output_usd_per_token TEXT, listed_at_s REAL NOT NULL,
        sampling TEXT NOT NULL, max_output_tokens INTEGER NOT NULL, mode TEXT NOT NULL,
        attempts INTEGER NOT NULL, first_byte_s REAL, total_s REAL,
        messages_sha256 TEXT NOT NULL, created_at_s REAL NOT NULL,
        PRIMARY KEY (row_id, turn, revision)
    )
    """,
    # Counting a million rows by class then reads a narrow index, not the texts.
    """
    CREATE INDEX IF NOT EXISTS generation_rows_by_class
    ON generation_rows (run_id, dataset, state, row_class)
    """,
    # Sources that were read to their end with every row done: nothing to be had from them.
    """
    CREATE TABLE IF NOT EXISTS generation_readings (
        run_id INTEGER NOT NULL REFERENCES generation_runs, source TEXT NOT NULL,
        config_hash TEXT NOT NULL, rows INTEGER NOT NULL, duplicates INTEGER NOT NULL,
        PRIMARY KEY (run_id, source, config_hash)
    )
    """,
    # Prompts that were counted and found good, by the hash of all that the count depends on.
    """
    CREATE TABLE IF NOT EXISTS generation_censuses (
        key TEXT PRIMARY KEY, census TEXT NOT NULL
    ) WITHOUT ROWID
    """,
)

TURN_COLUMNS: Final = TurnRecord.__struct_fields__
_values_of: Final = attrgetter(*TURN_COLUMNS)
ROW_COLUMNS: Final = (
    "row_id, key, dataset, prompt_id, rollout, system, user_turns, metadata, "
    "state, row_class, problem"
)
NEW_ROW_COLUMNS: Final = (
    "run_id", "key", "dataset", "prompt_id", "rollout", "system", "user_turns", "metadata",
    "state", "row_class", "turns_done", "changed_at_s",
)  # fmt: skip
_JSON: Final = frozenset({"precision", "sampling"})
_LISTS: Final = frozenset({"details", "flags"})
_MOST_KNOWN_JSON: Final = 64
#: By identity. The value is kept along, so that no other can come to have its id.
_known_json: Final[dict[int, tuple[Mapping[str, Any], str]]] = {}


def create_tables(connection: sqlite3.Connection, *, path: str) -> None:
    """Make what is missing; inside a transaction.

    Raises:
        JournalError: the tables were made by a newer version.
    """
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute("INSERT OR IGNORE INTO generation_meta VALUES ('layout', ?)", (str(LAYOUT),))
    (layout,) = connection.execute(
        "SELECT value FROM generation_meta WHERE key = 'layout'"
    ).fetchone()
    if int(layout) > LAYOUT:
        raise JournalError(
            path=path,
            problem=f"its rows were written by a newer quantroute (layout {layout}, this one "
            f"knows {LAYOUT}); upgrade quantroute",
        )


def new_row_values(
    run_id: int,
    row: RowId,
    at_s: float,
    *,
    state: RowState = RowState.OPEN,
    row_class: RowClass | None = None,
    turns_done: int = 0,
) -> tuple[Any, ...]:
    """The columns of a row that is not stored yet, in the order of `NEW_ROW_COLUMNS`."""
    prompt = row.prompt
    return (
        run_id,
        bytearray.fromhex(row.key),  # not bytes, which Python's module first tries to adapt
        prompt.dataset,
        column_of(prompt.id),
        row.rollout,
        prompt.system,
        canonical_texts(prompt.turns),
        canonical_json(dict(prompt.metadata)) if prompt.metadata else "{}",
        state._value_,  # `value` of an Enum is a property in Python, ten times as slow
        None if row_class is None else row_class._value_,
        turns_done,
        at_s,
    )


def turn_values(record: TurnRecord) -> tuple[Any, ...]:
    """The record's columns, in the order of `TURN_COLUMNS`."""
    values = list(_values_of(record))
    for index, encode in _ENCODED:
        values[index] = encode(values[index])
    for index in _TEXTS:
        text = values[index]
        if text is not None and not text.isascii():
            values[index] = column_of(text)
    return tuple(values)


def load_turn(values: tuple[Any, ...]) -> TurnRecord:
    """The record that `turn_values` described."""
    return TurnRecord(
        **{name: _loaded(name, value) for name, value in zip(TURN_COLUMNS, values, strict=True)}
    )


def load_row(values: tuple[Any, ...], turns: list[TurnRecord]) -> StoredRow:
    """The row of `ROW_COLUMNS`, with the chain of turns that counts."""
    row_id, key, dataset, prompt_id, rollout, system, user_turns, metadata = values[:8]
    state, row_class, problem = values[8:]
    return StoredRow(
        row_id=row_id,
        key=RowKey(key.hex()),
        prompt=Prompt(
            id=text_of(prompt_id) or "",
            dataset=dataset,
            turns=tuple(json.loads(user_turns)),
            system=system,
            metadata=json.loads(metadata),
        ),
        rollout=rollout,
        state=RowState(state),
        row_class=None if row_class is None else RowClass(row_class),
        problem=text_of(problem),
        turns=current_chain(turns),
    )


def column_of(text: str | None) -> str | bytes | None:
    """Text for a column; as bytes where lone surrogates keep it from being valid Unicode."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_of(column: str | bytes | None) -> str | None:
    """The text that `column_of` stored."""
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def _list_of(values: tuple[str, ...]) -> str:
    return canonical_json(list(values)) if values else "[]"


def _json_of(value: Mapping[str, Any]) -> str:
    """Its canonical JSON: made once for a value that the rows of a dataset share."""
    known = _known_json.get(id(value))
    if known is None or known[0] is not value:
        if len(_known_json) >= _MOST_KNOWN_JSON:
            _known_json.clear()
        known = _known_json[id(value)] = value, canonical_json(value)
    return known[1]


#: How the columns are encoded that are not bound as they are.
_ENCODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "row_class": attrgetter("_value_"),
    "details": _list_of,
    "flags": _list_of,
    "precision": _json_of,
    "sampling": _json_of,
}
_ENCODED: Final = tuple((TURN_COLUMNS.index(name), encode) for name, encode in _ENCODERS.items())
#: Columns of texts that others wrote and that nobody has checked for being valid Unicode.
_TEXTS: Final = tuple(
    TURN_COLUMNS.index(name)
    for name in (
        "content",
        "reasoning",
        "finish_reason",
        "native_finish_reason",
        "generation_id",
        "endpoint",
        "provider_name",
        "served_provider",
        "served_model",
        "quantization_label",
    )
)


def _loaded(name: str, value: Any) -> Any:
    if name in _JSON:
        return json.loads(value)
    if name in _LISTS:
        return tuple(json.loads(value))
    if name == "row_class":
        return RowClass(value)
    return text_of(value) if isinstance(value, bytes) else value
