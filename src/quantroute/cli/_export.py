"""`quantroute export`: rows out of a run, with a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.cli._rundir import RunFolder
from quantroute.errors import DatasetError
from quantroute.generation import ExportReport, RowSource, export_rows
from quantroute.policy import EvidenceTable


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    path: Annotated[Path, typer.Argument(help="Output: .jsonl or .parquet.")],
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="CLASS",
            help="A class of answers to export, e.g. truncated (default: good); repeatable.",
        ),
    ] = None,
    drop_failed_audit: options.DropFailedAudit = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also write unfinished conversations, apart.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that exist.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write the whole conversations of RUN to PATH, one row each, with full provenance.

    Only rows whose every answer is of the chosen classes, from eligible endpoints. Beside the file
    stands PATH.manifest.json with counts, hashes, prices and the ledger. The shards of a run are
    merged; a row that is in two of them is an error.

    quantroute export runs/b3 rows.jsonl

    quantroute export runs/b3 rows.parquet --class good --class truncated
    """
    folder = RunFolder(run)
    _refuse_existing(path, overwrite=overwrite)
    chosen = frozenset(options.row_class(name, option="--class") for name in classes or ["good"])

    async def write() -> ExportReport:
        async with folder.reading() as shards:
            return await export_rows(
                shards.rows,
                run=folder.name,
                path=path,
                classes=chosen,
                partial=partial,
                overwrite=overwrite,
                without=await _failed(shards.rows, folder.name, drop_failed_audit),
                statement=await shards.statement(),
            )

    report = _loop.run(write())
    if as_json:
        print_json(_as_data(report))
        return
    say(f"{report.rows:,} rows in {report.path}, manifest in {report.manifest_path}")
    if report.partial_path is not None:
        say(f"{report.partial_rows:,} unfinished conversations in {report.partial_path}")
    for reason, count in sorted(report.left_out.items()):
        say(f"left out: {count:,} {reason.replace('_', ' ')}")
    if report.left_out and not report.rows:
        say("no row is of the chosen classes; choose others with --class")


async def _failed(rows: RowSource, run: str, evidence: Path | None) -> frozenset[str]:
    """Endpoints that an audit's evidence speaks against."""
    if evidence is None:
        return frozenset()
    table = EvidenceTable.load(evidence)
    await rows.prepare()
    model = str((await rows.run(run)).config["model"])
    return table.failed_tags(model)


def _refuse_existing(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise DatasetError(path=str(path), problem="exists; choose another name or add --overwrite")


def _as_data(report: ExportReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "manifest": str(report.manifest_path),
        "rows": report.rows,
        "partial_path": None if report.partial_path is None else str(report.partial_path),
        "partial_rows": report.partial_rows,
        "left_out": report.left_out,
        "sha256": report.sha256,
    }
