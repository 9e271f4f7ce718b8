"""A store's file for lookers-on: nothing is written, whoever else is writing goes on."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quantroute.errors import JournalError
from quantroute.storage._sqlite import Schema

__all__ = ["read_only"]

_BUSY_TIMEOUT_S: Final = 10.0


@contextlib.contextmanager
def read_only(path: Path, schema: Schema) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, inside one transaction: what it sees is of one moment.

    Raises:
        JournalError: no such file, not a database, another program's, or a newer layout.
    """
    try:
        connection = _connect(path)
        try:
            connection.execute("BEGIN")
            _check(connection, path, schema)
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise JournalError(path=str(path), problem=f"cannot be read: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    """The file; where its folder cannot be written either, as one that nobody changes.

    SQLite needs to make a file beside one in WAL mode, even for a reader.
    """
    address = f"file:{quote(str(path.resolve()))}?mode=ro"
    connection = sqlite3.connect(
        address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        connection.close()
        if not isinstance(error, sqlite3.OperationalError) or not path.exists():
            raise
        connection = sqlite3.connect(
            f"{address}&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )
    return connection


def _check(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != schema.application_id:
        raise JournalError(path=str(path), problem="not a file of quantroute")
    if version > schema.version:
        raise JournalError(
            path=str(path),
            problem=f"written by a newer quantroute (layout {version}, this one knows "
            f"{schema.version}); upgrade quantroute",
        )
