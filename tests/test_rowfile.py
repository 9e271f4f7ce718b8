"""Files of rows and their manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantroute._rowfile import manifest_path, read_manifest
from quantroute.errors import DatasetError
from quantroute.extraction import read_row_files


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 1}'])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    assert read_manifest(path) is None
    assert list(read_row_files([path])) == [{}]
    manifest_path(path).write_text(text)
    with pytest.raises(DatasetError, match="manifest"):
        read_manifest(path)


def test_a_missing_file_is_an_error_before_any_row(tmp_path: Path) -> None:
    good = tmp_path / "a.jsonl"
    good.write_text(json.dumps({"id": "x"}) + "\n")
    with pytest.raises(DatasetError, match="no such file"):
        next(read_row_files([good, tmp_path / "b.jsonl"]))
