"""A store's file for lookers-on: nothing is written, whoever else is writing goes on."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quantroute.errors import JournalError
from quantroute.storage._sqlite import Schema

__all__ = ["openable", "read_only"]

_BUSY_TIMEOUT_S: Final = 10.0


@contextlib.contextmanager
def read_only(path: Path, schema: Schema) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, inside one transaction: what it sees is of one moment.

    Raises:
        JournalError: no such file, not a database, another program's, or a newer layout.
    """
    try:
        with contextlib.ExitStack() as stack:
            connection = _connect(path, stack)
            connection.execute("BEGIN")
            _check(connection, path, schema)
            yield connection
    except sqlite3.Error as error:
        raise JournalError(path=str(path), problem=f"cannot be read: {error}") from error


@contextlib.contextmanager
def openable(path: Path, schema: Schema) -> Iterator[Path]:
    """A file to open as a store in place of `path`, for as long as the block lasts.

    It is `path` itself where that may be written. Else it is a copy in a temporary folder: opening
    a store writes to it, and an archive or a colleague's run should tell what it holds all the
    same.

    Raises:
        JournalError: as `read_only`.
    """
    if not path.exists() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="quantroute-") as folder:
        copy = Path(folder, path.name)
        with read_only(path, schema) as source, contextlib.closing(sqlite3.connect(copy)) as target:
            source.execute("COMMIT")  # a backup is of one moment by itself
            source.backup(target)
        for lock in path.parent.glob(f"{glob.escape(path.name)}.*.lock"):
            Path(folder, lock.name).symlink_to(lock.resolve())  # whoever works on it, still does
        yield copy


def _connect(path: Path, stack: contextlib.ExitStack) -> sqlite3.Connection:
    """The file; where its folder cannot be written either, as one that nobody changes.

    SQLite needs to make a file beside one in WAL mode, even for a reader.
    """
    try:
        return _opened(path, "mode=ro", stack)
    except sqlite3.OperationalError:
        if not path.exists():
            raise
    log = Path(f"{path}-wal")
    if not log.exists() or not log.stat().st_size:
        return _opened(path, "mode=ro&immutable=1", stack)
    # Its last transactions are in the log alone: an unchanging file would be read without them.
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantroute-")))
    for part in (path, log):
        shutil.copyfile(part, folder / part.name)
    return _opened(folder / path.name, "mode=rw", stack)


def _opened(path: Path, how: str, stack: contextlib.ExitStack) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path.resolve()))}?{how}",  # in whatever encoding its name has
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    stack.callback(connection.close)
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
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
