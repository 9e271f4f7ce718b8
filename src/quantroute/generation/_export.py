"""Rows out of the store: chosen classes, whole conversations, and a manifest beside the file."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal

from quantroute._rowfile import RowsContent
from quantroute._rowfile import manifest_path as manifest_path_of
from quantroute._version import __version__
from quantroute.clock import Clock, SystemClock
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowState, StoredRow, StoredRun, TurnRecord
from quantroute.generation._report import truncation_rates
from quantroute.generation._rowdata import row_data
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which answers go into the file."""

    classes: frozenset[RowClass]
    without: frozenset[str]

    def takes(self, record: TurnRecord) -> bool:
        return record.row_class in self.classes and record.endpoint not in self.without


@dataclass(slots=True)
class _Totals:
    """What the manifest says about the rows that went into the file."""

    rows: int = 0
    partial_rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    datasets: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    endpoints: dict[str, Counter[str]] = field(default_factory=dict)
    content: RowsContent = field(default_factory=RowsContent)

    def count(self, row: StoredRow) -> None:
        """A row went into the file."""
        self.rows += 1
        self.datasets[row.prompt.dataset] += 1
        for record in row.turns:
            self.classes[record.row_class.value] += 1
            endpoint = self.endpoints.setdefault(record.endpoint, Counter())
            endpoint["turns"] += 1
            endpoint["cost_pusd"] += record.cost_pusd or 0
            for name in ("input_tokens", "output_tokens", "reasoning_tokens"):
                endpoint[name] += getattr(record, name) or 0
                self.tokens[name] += getattr(record, name) or 0


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
    if RowClass.WRONG_PROVIDER in classes:
        raise ConfigurationError(
            "answers from a provider that was not asked are quarantined; they cannot be exported"
        )
    chosen = frozenset(classes)
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
    totals = _Totals()
    with contextlib.ExitStack() as stack:
        file = HashingFile(stack.enter_context(atomic_file(path)))
        writer: RowWriter = ParquetWriter(file) if form == "parquet" else JsonlWriter(file)
        stack.callback(writer.close)
        rest: RowWriter | None = None
        if partial_path is not None:
            rest = JsonlWriter(HashingFile(stack.enter_context(atomic_file(partial_path))))
        await _write_all(rows, stored, _Choice(chosen, frozenset(without)), writer, rest, totals)
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
    manifest = await _manifest(
        rows, stored, report, totals, chosen, without, statement, (clock or SystemClock()).time_s()
    )
    atomic_write(manifest_path, (json.dumps(manifest, indent=2) + "\n").encode())
    return report


async def _write_all(
    rows: RowSource,
    stored: StoredRun,
    choice: _Choice,
    writer: RowWriter,
    rest: RowWriter | None,
    totals: _Totals,
) -> None:
    model = str(stored.config["model"])
    async for row in rows.rows(stored.run_id):
        leading = tuple(takewhile(choice.takes, row.turns))
        if len(leading) == len(row.prompt.turns):
            data = row_data(row, leading, model=model)
            writer.write(data)
            totals.content.add(data)
            totals.count(row)
            continue
        totals.left_out[_why_left_out(row, leading, choice)] += 1
        if rest is not None and leading:
            rest.write(row_data(row, leading, model=model))
            totals.partial_rows += 1


def _why_left_out(row: StoredRow, leading: tuple[TurnRecord, ...], choice: _Choice) -> str:
    if len(leading) < len(row.turns):
        first = row.turns[len(leading)]
        return first.row_class.value if first.row_class not in choice.classes else "endpoint_failed"
    if row.state is RowState.FINISHED and row.row_class is not None:
        return f"ended_by_{row.row_class.value}"
    return row.state.value


async def _manifest(
    rows: RowSource,
    stored: StoredRun,
    report: ExportReport,
    totals: _Totals,
    chosen: frozenset[RowClass],
    without: Set[str],
    statement: Sequence[StatementLine],
    at_s: float,
) -> dict[str, Any]:
    counts = await rows.counts(stored.run_id)
    return {
        "quantroute_version": __version__,
        "created_at": datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds"),
        "file": report.path.name,
        "sha256": report.sha256,
        "content_sha256": totals.content.sha256(),
        "rows": totals.rows,
        "chosen_classes": sorted(item.value for item in chosen),
        "without_endpoints": sorted(without),
        "turns_per_class": dict(totals.classes),
        "rows_per_dataset": dict(totals.datasets),
        "tokens": dict(totals.tokens),
        "endpoints": {tag: dict(sums) for tag, sums in sorted(totals.endpoints.items())},
        "left_out": dict(totals.left_out),
        "partial_file": report.partial_path.name if report.partial_path else None,
        "partial_rows": totals.partial_rows,
        "run": stored.name,
        "run_config": stored.config,
        "run_config_sha256": stored.config_hash,
        "policy_class": stored.config["policy_class"],
        "sources": stored.config["sources"],
        "run_rows": [
            {
                "dataset": count.dataset,
                "state": count.state.value,
                "row_class": count.row_class.value if count.row_class else None,
                "rows": count.rows,
            }
            for count in counts
        ],
        "truncation_rates": truncation_rates(counts),
        "ledger": list(_statement_data(stored.name, statement)),
    }


def _statement_data(run: str, lines: Sequence[StatementLine]) -> Iterator[dict[str, Any]]:
    """The run's own lines: what it cost in all, answers that are not exported included."""
    for line in lines:
        if line.account == run or line.account.startswith(f"{run}/"):
            yield {
                name: getattr(line, name)
                for name in (
                    "account",
                    "endpoint",
                    "entries",
                    "voided",
                    "input_tokens",
                    "output_tokens",
                    "reasoning_tokens",
                    "cached_tokens",
                    "cache_write_tokens",
                    "posted_pusd",
                    "estimated_pusd",
                )
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
