"""Two processes on one run would buy every row twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantroute.errors import JournalError
from quantroute.generation._run_lock import locked_run


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
