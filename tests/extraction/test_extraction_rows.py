"""From generation's own export to examples, and files that are not what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from extraction_support import letters
from generation.fakes import FakeClient, echo, make_config, make_prompts
from quantroute._rowfile import read_manifest
from quantroute.errors import DatasetError
from quantroute.extraction import (
    KIMI_STYLE_TEMPLATE,
    Example,
    TokenSettings,
    examples_from_rows,
    read_row_files,
)
from quantroute.generation import RowStore, Run, export_rows
from quantroute.ledger import BudgetLedger


async def export(folder: Path, *names: str) -> list[Path]:
    prompts = make_prompts(3, turns=2)
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await Run(FakeClient(ledger, echo), make_config(), prompts).execute()
        store = RowStore(ledger.store)
        return [(await export_rows(store, run="run", path=folder / name)).path for name in names]


async def test_exported_rows_become_examples_from_either_format(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    tokenizer = letters(tmp_path / "target", KIMI_STYLE_TEMPLATE)
    keys = []
    for path in await export(tmp_path, "rows.jsonl", "rows.parquet"):
        settings = TokenSettings(thinking="off", min_reasoning_share=0)
        results = list(examples_from_rows(read_row_files([path]), tokenizer, settings))
        assert all(isinstance(item, Example) for item in results), results
        keys.append([item.key for item in results if isinstance(item, Example)])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 6


async def test_a_file_that_its_manifest_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    (path,) = await export(tmp_path, "rows.jsonl")
    assert read_manifest(path) is not None
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DatasetError, match="export again"):
        next(read_row_files([path]))
