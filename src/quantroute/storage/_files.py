"""Files and folders that are either whole or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["atomic_file", "atomic_folder", "atomic_write"]


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` only when the block ends well, and durably.

    Written beside the target, flushed to disk, renamed over it, and the folder flushed too. If the
    block raises, nothing is left behind and an older file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        _blame(path, temporary, error)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder, to be filled in the block, that appears under `path` when that ends well.

    What stood there before is replaced; if the block raises, it stays as it was. A kill between
    the last two renames leaves the old folder beside it, as `.<name>.<process>.old`; one before
    leaves the new folder as `.<name>.<process>.tmp`, for the next process of that number to clear.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)  # in containers each run has the same number
    try:
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        _blame(path, temporary, error)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _blame(path: Path, temporary: Path, error: OSError) -> None:
    """Lay the error at the file that was asked for: nobody knows the one beside it."""
    if error.filename == str(temporary):
        error.filename, error.filename2 = str(path), None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
