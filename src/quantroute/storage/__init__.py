"""Durable files: SQLite with group commit, locks, whole-or-absent writes."""

from quantroute.storage._files import atomic_file, atomic_folder, atomic_write
from quantroute.storage._locks import FileLock, is_locked
from quantroute.storage._many_rows import bound, insert_rows
from quantroute.storage._readonly import openable, read_only
from quantroute.storage._sqlite import (
    MEMORY,
    Participant,
    Schema,
    SqliteStore,
    Work,
)

__all__ = [
    "MEMORY",
    "FileLock",
    "Participant",
    "Schema",
    "SqliteStore",
    "Work",
    "atomic_file",
    "atomic_folder",
    "atomic_write",
    "bound",
    "insert_rows",
    "is_locked",
    "openable",
    "read_only",
]
