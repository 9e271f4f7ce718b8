"""Files that are whole or absent, and locks that end with their process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantroute.errors import JournalError
from quantroute.storage import FileLock, atomic_file, atomic_folder, atomic_write, is_locked


def test_atomic_write_replaces_whole_files(tmp_path: Path) -> None:
    """The new content is there, and nothing else is."""
    target = tmp_path / "folder" / "file"
    atomic_write(target, b"old")
    atomic_write(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_a_failure_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    """Neither half a file nor a temporary one stays behind."""
    target = tmp_path / "file"
    atomic_write(target, b"old")

    def fail_half_way() -> None:
        with atomic_file(target) as file:
            file.write(b"half")
            raise LookupError

    with pytest.raises(LookupError):
        fail_half_way()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_of_our_number_left_is_cleared(tmp_path: Path) -> None:
    """In a container each run has the same process number."""
    left = tmp_path / f".out.{os.getpid()}.tmp"
    left.mkdir()
    (left / "half").touch()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "whole").touch()
    assert [item.name for item in tmp_path.rglob("*")] == ["out", "whole"]


def test_release_is_idempotent_and_may_remove(tmp_path: Path) -> None:
    """A lock that goes with its file leaves nothing."""
    path = tmp_path / "lock"
    lock = FileLock(path).acquire()
    assert is_locked(path)
    lock.release(remove=True)
    lock.release()
    assert not path.exists()
    assert not is_locked(path)


def test_a_lock_file_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    """Not a bare OSError: the error is ours and says what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="writable"):
        FileLock(tmp_path / "file" / "lock").acquire()
