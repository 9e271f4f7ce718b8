"""A SQLite file looked into, or changed, behind the library's back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def database(path: str | Path) -> Iterator[sqlite3.Connection]:
    """An open connection; committed at the end and closed, which `sqlite3`'s own is not."""
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection
