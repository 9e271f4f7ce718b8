"""Which run lives in a folder: a folder may be renamed, copied or moved, its run stays itself."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from quantroute.errors import DatasetError, JournalError
from quantroute.generation._config import new_run_name
from quantroute.generation._row_sql import read_runs
from quantroute.ledger import journal_reader

__all__ = ["run_name", "run_stores"]

_STORE: Final = "run.sqlite"


def run_stores(folder: Path) -> tuple[Path, ...]:
    """The files in `folder` that hold rows of its run, one for each shard."""
    found = (folder / _STORE, *sorted(folder.glob(f"shard-*-of-*/{_STORE}")))
    return tuple(path for path in found if path.exists())


def run_name(folder: Path) -> str:
    """The name of the run that lives in `folder`, or that a new one there gets.

    A run that was begun keeps its name, whatever its folder is called by now: rows and accounts
    are found by it, and under another they would all be bought again.

    Raises:
        DatasetError: several runs live there, and the folder is called as none of them.
    """
    name, held = new_run_name(folder.resolve().name), _names_in(run_stores(folder))
    if not held or name in held:
        return name
    if len(held) > 1:
        several = ", ".join(sorted(held))
        problem = f"it holds several runs ({several}): name the folder as the one that is meant"
        raise DatasetError(path=str(folder), problem=problem)
    return held.pop()


def _names_in(stores: Iterable[Path]) -> set[str]:
    names = set[str]()
    for store in stores:
        # What cannot be read is told, with its cause, by whoever opens it to work with it.
        with (
            contextlib.suppress(JournalError, sqlite3.OperationalError),
            journal_reader(store) as connection,
        ):
            names.update(run.name for run in read_runs(connection))
    return names
