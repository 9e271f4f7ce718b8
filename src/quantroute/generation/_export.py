"""Rows out of the store: chosen classes, whole conversations, and a manifest beside the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from quantroute._rowfile import RowsContent
from quantroute._rowfile import manifest_path as manifest_path_of
from quantroute.clock import Clock, SystemClock
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation._quality import RowClass
from quantroute.generation._records import StoredRun
from quantroute.generation._rowdata import row_data
from quantroute.generation._selection import Choice, Totals, choose, manifest_data
from quantroute.generation._shards import RowSource
from quantroute.generation._writers import HashingFile, JsonlWriter, ParquetWriter, RowWriter
from quantroute.ledger import StatementLine
from quantroute.storage import atomic_file, atomic_write

__all__ = ["ExportReport", "export_rows"]

Format = Literal["jsonl", "parquet"]
_FORMATS: Final = {".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote. `left_out` counts rows by why: their state, or their class."""

    path: Path
    manifest_path: Path
    partial_path: Path | None
    rows: int
    partial_rows: int
    left_out: dict[str, int]
    sha256: str


async def export_rows(
    rows: RowSource,
    *,
    run: str,
    path: Path | str,
    format: Format | None = None,
    classes: Set[RowClass] = frozenset({RowClass.GOOD}),
    partial: bool = False,
    overwrite: bool = False,
    without: Set[str] = frozenset(),
    statement: Sequence[StatementLine] = (),
    clock: Clock | None = None,
) -> ExportReport:
    """Write the whole conversations of a run whose every answer is of the chosen classes.

    Rows stand in the order of their keys, so that the same answers make the same file but for
    their provenance. The file appears only when it is complete, with a manifest
    (`<file>.manifest.json`) that says what is in it and where it came from. Memory does not grow
    with the number of rows.

    Args:
        format: by default from the path's ending, `.jsonl` or `.parquet`.
        partial: also write `<stem>.partial.jsonl`: of the other conversations, those leading
            answers that are of the chosen classes, where there are any.
        overwrite: replace files that exist; without it they are an error.
        without: tags of endpoints whose answers are left out, e.g. those that failed an audit.
        statement: the ledger's statement (`await ledger.statement()`), for the manifest.
    Raises:
        ConfigurationError: the format is unknown or not installed, or a class is quarantined.
        DatasetError: no such run, or the file exists.
    """
    path = Path(path)
    choice = Choice.of(classes, without)
    form = _format_of(path, format)
    partial_path = path.with_name(f"{path.stem}.partial.jsonl") if partial else None
    manifest_path = manifest_path_of(path)
    for target in (path, partial_path, manifest_path):
        if target is not None and target.exists() and not overwrite:
            raise DatasetError(
                path=str(target), problem="exists; choose another name, or overwrite it knowingly"
            )
    await rows.prepare()
    stored = await rows.run(run)
    totals = Totals()
    with contextlib.ExitStack() as stack:
        file = HashingFile(stack.enter_context(atomic_file(path)))
        writer: RowWriter = ParquetWriter(file) if form == "parquet" else JsonlWriter(file)
        stack.callback(writer.close)
        rest: RowWriter | None = None
        if partial_path is not None:
            rest = JsonlWriter(HashingFile(stack.enter_context(atomic_file(partial_path))))
        content = await _write_all(rows, stored, choice, writer, rest, totals)
        writer.close()  # what cannot be written fails here, with everything as it was before
        # An old manifest must not stand beside the new file, not even for a moment.
        manifest_path.unlink(missing_ok=True)
    report = ExportReport(
        path=path,
        manifest_path=manifest_path,
        partial_path=partial_path,
        rows=totals.rows,
        partial_rows=totals.partial_rows,
        left_out=dict(totals.left_out),
        sha256=file.sha256(),
    )
    counts = await rows.counts(stored.run_id)
    made_at_s = (clock or SystemClock()).time_s()
    manifest = {
        **_files_data(report, at_s=made_at_s),
        "content_sha256": content.sha256(),
        **manifest_data(stored, totals, choice, counts=counts, statement=statement),
    }
    atomic_write(manifest_path, (json.dumps(manifest, indent=2) + "\n").encode())
    return report


async def _write_all(
    rows: RowSource,
    stored: StoredRun,
    choice: Choice,
    writer: RowWriter,
    rest: RowWriter | None,
    totals: Totals,
) -> RowsContent:
    """Write the rows; what they say, apart from where they came from."""
    model, content = str(stored.config["model"]), RowsContent()
    async for found in choose(rows, stored, choice, totals):
        if found.is_whole:
            data = row_data(found.row, found.leading, model=model)
            writer.write(data)
            content.add(data)
        elif rest is not None and found.leading:
            rest.write(row_data(found.row, found.leading, model=model))
            totals.partial_rows += 1
    return content


def _files_data(report: ExportReport, *, at_s: float) -> dict[str, Any]:
    return {
        "created_at": datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds"),
        "file": report.path.name,
        "sha256": report.sha256,
        "partial_file": report.partial_path.name if report.partial_path else None,
        "partial_rows": report.partial_rows,
    }


def _format_of(path: Path, form: Format | None) -> Format:
    if form is not None:
        if form not in _FORMATS.values():
            raise ConfigurationError(f"format must be jsonl or parquet, not {form!r}")
        return form
    found = _FORMATS.get(path.suffix)
    if found is None:
        raise ConfigurationError(f"{path.name}: end the name in .jsonl or .parquet, or say which")
    return "parquet" if found == "parquet" else "jsonl"
