"""`quantroute report`: a run as one page, in a file or live."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.cli._rundir import RunFolder
from quantroute.errors import ConfigurationError
from quantroute.report import (
    DEFAULT_REPORT_PORT,
    ReportServer,
    RunWatcher,
    find_extras,
    run_page,
)
from quantroute.storage import atomic_write


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page's file (default: RUN/report.html)."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on 127.0.0.1 instead; Ctrl+C ends it.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port for --live; 0 takes a free one.")
    ] = DEFAULT_REPORT_PORT,
    events: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Events, if --log-json named a file."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The audit's JSON, if elsewhere."),
    ] = None,
    training: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Training metrics (JSONL), if elsewhere."),
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The evaluation's JSON, if elsewhere."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write one self-contained HTML page about RUN: money, targets, endpoints, speed, errors.

    Reads only, so it may be used while the run is under way. The page needs no network.

    quantroute report runs/b3

    quantroute report runs/b3 --live
    """
    if live and out is not None:
        raise ConfigurationError("--live serves the page and writes no file: leave --out out")
    folder = RunFolder(run)
    watcher = RunWatcher(
        folder=folder.path,
        stores=folder.stores(),
        name=folder.name,
        events=events,
        find=partial(find_extras, audit=audit, training=training, acceptance=acceptance),
    )
    if live:
        with contextlib.suppress(KeyboardInterrupt):
            _loop.run(_serve(watcher, port=port, as_json=as_json))
        return
    path = out or folder.path / "report.html"
    page = run_page(watcher.picture(at=dt.datetime.now(dt.UTC)))
    atomic_write(path, page.encode("utf-8", "replace"))
    if as_json:
        print_json({"path": str(path)})
    else:
        say(f"the page is {path}")


async def _serve(watcher: RunWatcher, *, port: int, as_json: bool) -> None:
    async with ReportServer(watcher, port=port) as server:
        if as_json:
            print_json({"url": server.url})
        else:
            say(f"the page is at {server.url}; Ctrl+C ends it")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
