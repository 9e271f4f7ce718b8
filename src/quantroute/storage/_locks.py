"""Who owns a file: OS locks that vanish with their process, and say who holds them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from quantroute.errors import JournalError

__all__ = ["FileLock", "is_locked"]


@dataclass(slots=True)
class FileLock:
    """An exclusive lock on `path`, held until released or until the process ends, however it ends.

    The file names its owner, so that whoever is refused knows whom to ask. `flock` belongs to the
    open file, so two locks in one process exclude each other as two processes do.
    """

    path: Path
    _descriptor: int | None = field(default=None, init=False)

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            JournalError: somebody else holds it (the message says who and since when), or the
                lock file cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                path=str(self.path),
                problem=f"{error.strerror}; make the folder exist and writable, and rerun",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise JournalError(
                path=str(self.path), problem=f"in use by {owner}; wait for it to end or stop it"
            ) from None
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since_s": int(time.time())}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        self._descriptor = descriptor
        return self

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back; idempotent. `remove` deletes the file first, while it is ours."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(descriptor)

    def fileno(self) -> int:
        """The held lock's descriptor: a child that inherits it holds the lock with us."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is not held")
        return self._descriptor

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock on `path`; True also if nobody may look.

    To look, the right to read is enough.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _owner(descriptor: int) -> str:
    try:
        facts = json.loads(os.pread(descriptor, 1024, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["since_s"]))
        return f"process {facts['pid']} on {facts['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process"
