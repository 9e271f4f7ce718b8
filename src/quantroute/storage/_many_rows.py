"""Many rows a statement."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

__all__ = ["bound", "insert_rows"]

#: Rows per statement. Few sizes, so that each statement is prepared once and kept; and so many
#: that three statements at most make up any number below the largest.
_CHUNKS: Final = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
#: SQLite takes a float that is not a number for NULL. Python's module asks each None whether it
#: adapts itself to the database, which takes 0.3 microseconds, and a row has twenty of them.
_NULL: Final = float("nan")


def insert_rows(connection: sqlite3.Connection, begin: str, rows: Sequence[Sequence[Any]]) -> None:
    """`begin (?, ...), (?, ...)` for `rows` of one width, many rows a statement.

    `executemany` steps, and so gives up the interpreter lock, once per row.
    Raises:
        sqlite3.Error, UnicodeEncodeError, OverflowError: some rows may be written, some not.
    """
    at = 0
    for chunk in _CHUNKS:
        while len(rows) - at >= chunk:
            some = rows[at : at + chunk]
            statement = _statement(begin, len(some[0]), chunk)
            connection.execute(statement, bound(chain.from_iterable(some)))
            at += chunk


def bound(values: Iterable[Any]) -> list[Any]:
    """`values` for a statement, None in the form that costs less."""
    return [_NULL if value is None else value for value in values]


@functools.lru_cache(maxsize=256)
def _statement(begin: str, columns: int, rows: int) -> str:
    marks = ", ".join(["(" + ", ".join("?" * columns) + ")"] * rows)
    return f"{begin} {marks}"
