"""Files of rows and their manifests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quantroute._rowfile import RowsContent, content_sha256, manifest_path, read_manifest
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


def row_of(answer: str = "A", **turn: Any) -> dict[str, Any]:
    settings = {"row_class": "good", "finish_reason": "stop", "endpoint": "a/int4", "cost_pusd": 7}
    return {
        "key": "00ff",
        "dataset": "d",
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}],
        "turns": [settings | turn],
        "cost_pusd": 7,
    }


def content(*rows: dict[str, Any]) -> str:
    found = RowsContent()
    for row in rows:
        found.add(row)
    return found.sha256()


def test_content_is_what_is_learnt_and_not_who_gave_it() -> None:
    one = content(row_of())
    assert content(row_of(endpoint="b/int4", cost_pusd=9, generation_id="gen-2")) == one
    others = [
        content(row_of("B")),
        content(row_of(row_class="truncated")),
        content(row_of(sampling={"stop": ["x"]})),
        content(row_of(), row_of("B")),
        content(row_of("B"), row_of()),
    ]
    assert len({one, *others}) == len(others) + 1


def test_content_of_a_file_is_read_or_taken_from_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of()) + "\n")
    assert content_sha256(path) == content(row_of())
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {"sha256": sha256, "content_sha256": "of the manifest"}
    manifest_path(path).write_text(json.dumps(manifest))
    assert content_sha256(path) == "of the manifest"
    path.write_text(json.dumps(row_of("edited")) + "\n")
    with pytest.raises(DatasetError, match="not the file its manifest speaks of"):
        content_sha256(path)


def test_rows_of_token_ids_count_whole(tmp_path: Path) -> None:
    hashes = set()
    for ids in ([1, 2], [1, 3]):
        path = tmp_path / "ids.jsonl"
        path.write_text(json.dumps({"input_ids": ids, "loss_mask": [0, 1]}) + "\n")
        hashes.add(content_sha256(path))
    assert len(hashes) == 2
    path.write_text("[]\n")
    with pytest.raises(DatasetError, match="rows cannot be read"):
        content_sha256(path)
