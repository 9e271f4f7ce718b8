"""`quantroute export`: rows out of a run, as a file or as a dataset with its card."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.cli._rundir import RunFolder
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation import (
    DatasetReport,
    ExportReport,
    RowClass,
    RowSource,
    export_dataset,
    export_rows,
)
from quantroute.policy import EvidenceTable


class Form(enum.StrEnum):
    """What an export looks like."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    DATASET = "dataset"


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    path: Annotated[
        Path, typer.Argument(help="Output: .jsonl or .parquet; a folder with --format dataset.")
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="By default from the name's ending. `dataset` is a folder for Hugging Face's "
            "`load_dataset`: Parquet files and a dataset card.",
        ),
    ] = None,
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
    license: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The dataset's licence as you state it, e.g. cc-by-4.0; for its card.",
        ),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(help="What the card calls the dataset; the run's name if left out."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that exist.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write the whole conversations of RUN to PATH, one row each, with full provenance.

    Only rows whose every answer is of the chosen classes, from eligible endpoints. Beside a file
    stands PATH.manifest.json with counts, hashes, prices and the ledger; a dataset says the same in
    its card. The shards of a run are merged; a row that is in two of them is an error.

    quantroute export runs/b3 rows.jsonl

    quantroute export runs/b3 rows.parquet --class good --class truncated

    quantroute export runs/b3 b3-dataset --format dataset --license cc-by-4.0
    """
    folder = RunFolder(run)
    chosen = frozenset(options.row_class(name, option="--class") for name in classes or ["good"])
    if form is Form.DATASET:
        if partial:
            raise ConfigurationError("--partial is for files; a dataset has whole conversations")
        _tell_dataset(
            _loop.run(
                _write_dataset(
                    folder,
                    path,
                    chosen,
                    drop_failed_audit,
                    license=license,
                    title=title,
                    overwrite=overwrite,
                )
            ),
            as_json=as_json,
        )
        return
    if license is not None or title is not None:
        raise ConfigurationError("--license and --title are for --format dataset")
    if form is None and path.suffix not in (".jsonl", ".parquet"):
        raise ConfigurationError(
            f"{path.name}: end the name in .jsonl or .parquet, or add --format; "
            "--format dataset makes a folder with a dataset card"
        )
    _refuse_existing(path, overwrite=overwrite)
    report = _loop.run(
        _write_file(
            folder, path, form, chosen, drop_failed_audit, partial=partial, overwrite=overwrite
        )
    )
    _tell_file(report, as_json=as_json)


async def _write_file(
    folder: RunFolder,
    path: Path,
    form: Form | None,
    chosen: frozenset[RowClass],
    drop_failed: Path | None,
    *,
    partial: bool,
    overwrite: bool,
) -> ExportReport:
    async with folder.reading() as shards:
        return await export_rows(
            shards.rows,
            run=folder.name,
            path=path,
            format="parquet" if form is Form.PARQUET else "jsonl" if form is Form.JSONL else None,
            classes=chosen,
            partial=partial,
            overwrite=overwrite,
            without=await _failed(shards.rows, folder.name, drop_failed),
            statement=await shards.statement(),
        )


async def _write_dataset(
    folder: RunFolder,
    path: Path,
    chosen: frozenset[RowClass],
    drop_failed: Path | None,
    *,
    license: str | None,
    title: str | None,
    overwrite: bool,
) -> DatasetReport:
    async with folder.reading() as shards:
        return await export_dataset(
            shards.rows,
            run=folder.name,
            path=path,
            classes=chosen,
            without=await _failed(shards.rows, folder.name, drop_failed),
            statement=await shards.statement(),
            license=license,
            title=title,
            overwrite=overwrite,
        )


def _tell_file(report: ExportReport, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_data(report))
        return
    say(f"{report.rows:,} rows in {report.path}, manifest in {report.manifest_path}")
    if report.partial_path is not None:
        say(f"{report.partial_rows:,} unfinished conversations in {report.partial_path}")
    _tell_left_out(report.left_out)
    if report.left_out and not report.rows:
        say("no row is of the chosen classes; choose others with --class")


def _tell_dataset(report: DatasetReport, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "path": str(report.path),
                "card": str(report.card_path),
                "manifest": str(report.manifest_path),
                "rows": report.rows,
                "files": [asdict(file) for file in report.files],
                "left_out": report.left_out,
            }
        )
        return
    say(f"{report.rows:,} rows in {report.path}, dataset card in {report.card_path}")
    _tell_left_out(report.left_out)
    say(f"read it: datasets.load_dataset({str(report.path)!r}, split='train')")


def _tell_left_out(left_out: Mapping[str, int]) -> None:
    for reason, count in sorted(left_out.items()):
        say(f"left out: {count:,} {reason.replace('_', ' ')}")


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
