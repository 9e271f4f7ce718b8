"""docs/files.md describes every field of a run file under its own table, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantroute.generation._spec import (
    _DatasetTable,
    _LocalTable,
    _PolicyTable,
    _RunTable,
    _SamplingTable,
)

FILES = Path(__file__).resolve().parents[2] / "docs/files.md"
TABLES = {
    "### `[run]`": _RunTable,
    "### `[policy]`": _PolicyTable,
    "### `[[local]]`": _LocalTable,
    "### `[sampling]`": _SamplingTable,
    "### `[[dataset]]`": _DatasetTable,
}


def described(heading: str) -> list[str]:
    """Fields in the first column of the table below a heading."""
    _, _, text = FILES.read_text().partition(f"{heading}\n")
    section = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]
    firsts = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    return [name for first in firsts for name in re.findall(r"`(\w+)`", first)]


@pytest.mark.parametrize("heading", TABLES)
def test_every_field_is_described(heading: str) -> None:
    assert sorted(described(heading)) == sorted(TABLES[heading].model_fields)


@pytest.mark.parametrize("heading", TABLES)
def test_required_fields_are_marked(heading: str) -> None:
    lines = FILES.read_text().splitlines()
    for name, field in TABLES[heading].model_fields.items():
        if field.is_required():
            assert any(line.startswith(f"| `{name}` | required") for line in lines), name
