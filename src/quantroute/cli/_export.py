"""`quantroute export`: rows out of a run, with a manifest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli import _options as options
from quantroute.cli._rundir import RunFolder
from quantroute.errors import ConfigurationError
from quantroute.generation import ExportReport, RowClass, RowStore, export_rows
from quantroute.ledger import BudgetLedger


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    path: Annotated[Path, typer.Argument(help="Output: .jsonl or .parquet.")],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="Classes of answers to export (default: good); repeatable."),
    ] = None,
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
    stands PATH.manifest.json with counts, hashes, prices and the ledger.
    """
    folder = RunFolder(run)
    chosen = frozenset(_row_class(name) for name in classes or ["good"])

    async def write() -> ExportReport:
        async with BudgetLedger.open(folder.existing_store()) as ledger:
            return await export_rows(
                RowStore(ledger.store),
                run=folder.name,
                path=path,
                classes=chosen,
                partial=partial,
                overwrite=overwrite,
                statement=await ledger.statement(),
            )

    report = asyncio.run(write())
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "path": str(report.path),
                    "manifest": str(report.manifest_path),
                    "rows": report.rows,
                    "left_out": report.left_out,
                    "sha256": report.sha256,
                }
            )
        )
        return
    typer.echo(f"{report.rows:,} rows in {report.path}, manifest in {report.manifest_path}")
    for reason, count in sorted(report.left_out.items()):
        typer.echo(f"left out: {count:,} {reason}")


def _row_class(name: str) -> RowClass:
    try:
        return RowClass(name.strip().lower().replace("-", "_"))
    except ValueError:
        known = ", ".join(item.value for item in RowClass)
        raise ConfigurationError(f"--class {name}: not a class; use one of: {known}") from None
