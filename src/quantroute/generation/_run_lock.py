"""One process per run, or per shard of a run: two would buy every row twice."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator
from pathlib import Path

from quantroute._shard import Shard
from quantroute.errors import JournalError
from quantroute.storage import MEMORY, FileLock, is_locked

__all__ = ["lock_files", "locked_run"]


def lock_files(path: Path, name: str) -> list[Path]:
    """The lock files of run `name` and of its shards, beside the store at `path`."""
    store = path.resolve()  # by whatever link it is opened
    begin = f"{store.name}.run-{name}"
    found = store.parent.glob(f"{glob.escape(begin)}*.lock")
    # Not those of a run whose name begins like this one's.
    return [item for item in found if _is_of(item.name.removeprefix(begin))]


def _is_of(rest: str) -> bool:
    return rest == ".lock" or rest.startswith(".shard-")


@contextlib.contextmanager
def locked_run(path: str, name: str, shard: Shard | None) -> Iterator[None]:
    """Hold run `name` of the store at `path` while in the block; a store in memory has no others.

    Raises:
        JournalError: another process has it, or others work on it that divide it otherwise.
    """
    if path == MEMORY:
        yield
        return
    store = Path(path).resolve()  # by whatever link it is opened
    begin = f"{store.name}.run-{name}"
    part = "" if shard is None else f".{shard.folder}"
    with FileLock(store.with_name(f"{begin}{part}.lock")) as mine:
        alike = ".lock" if shard is None else f"-of-{shard.count:03d}.lock"
        for other in lock_files(store, name):
            is_part = other.name != f"{begin}.lock"
            fits = is_part and shard is not None and other.name.endswith(alike)
            if other != mine.path and not fits and is_locked(other):
                raise JournalError(
                    path=str(other),
                    problem="in use by a worker that divides this run otherwise; all must be "
                    "given the same number of shards",
                )
        yield
