"""Two processes on one run would buy every row twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantroute._shard import Shard
from quantroute.errors import JournalError
from quantroute.generation._run_lock import lock_files, locked_run
from quantroute.storage import is_locked


def test_a_link_to_the_store_is_the_same_store(tmp_path: Path) -> None:
    real, link = tmp_path / "real.sqlite", tmp_path / "link.sqlite"
    real.touch()
    link.symlink_to(real)
    with (
        locked_run(str(real), "b3", None),
        pytest.raises(JournalError, match="in use by process"),
        locked_run(str(link), "b3", None),
    ):
        pass


def test_a_run_is_not_live_for_one_whose_name_begins_alike(tmp_path: Path) -> None:
    store = tmp_path / "runs.sqlite"
    store.touch()
    with locked_run(str(store), "b3-again", None):
        assert not any(map(is_locked, lock_files(store, "b3")))
        assert any(map(is_locked, lock_files(store, "b3-again")))
    with locked_run(str(store), "b3", Shard(1, 4)):
        assert any(map(is_locked, lock_files(store, "b3")))
