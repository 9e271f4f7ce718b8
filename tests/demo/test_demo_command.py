"""The demo says what is missing before it begins anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import quantroute
from quantroute.cli import _demo


def test_a_missing_extra_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo, "_NEEDED", {"train": ("a_package_that_nobody_has",)})
    ended = quantroute("demo", "--out", str(tmp_path / "demo"))
    assert ended.code == 2
    assert "a_package_that_nobody_has" in ended.err
    assert "pip install 'quantroute[extract,train]'" in ended.err
    assert not (tmp_path / "demo").exists()
