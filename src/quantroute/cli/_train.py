"""`quantroute train`: a drafter, by the trainer's own command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say
from quantroute.drafter import (
    Measurement,
    Prepared,
    TrainProgress,
    TrainReport,
    load_train_spec,
    prepare_training,
)
from quantroute.drafter import train as run_training

__all__ = ["train"]

_LINE_EVERY_S: Final = 2.0


def train(
    spec: Annotated[Path, typer.Argument(help="The run's file, with a [train] table.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the command; start none.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train a drafter on the data that `quantroute convert` wrote.

    The trainer (speculators or SpecForge) runs as its own command in its own process; its log and
    a line of JSON per measurement stand in the output folder. Ctrl+C lets it save; the same command
    goes on from its last checkpoint.

    quantroute train run.toml --dry-run
    """
    prepared = prepare_training(load_train_spec(spec))
    if dry_run:
        _show_plan(prepared, as_json=as_json)
        return
    if not as_json:
        _announce(prepared)
    shown = _Lines(is_silent=as_json)
    report = run_training(prepared, on_progress=shown.show, on_note=_note)
    if as_json:
        print_json(_as_data(report))
    else:
        _conclude(report)
    if report.was_stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)


class _Lines:
    """A line per measurement, but not more than one every two seconds; validation always."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._shown_s = float("-inf")

    def show(self, progress: TrainProgress) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= _LINE_EVERY_S
        if self._is_silent or not (is_due or progress.measurement.split == "validation"):
            return
        self._shown_s = now_s
        say(_line(progress), err=True)


def _note(text: str) -> None:
    say(f"note: {text}", err=True)


def _announce(prepared: Prepared) -> None:
    data = prepared.data
    say(f"{data.examples:,} examples, {data.tokens:,} tokens, layers {list(data.layers)}", err=True)
    if data.coverage is not None:
        size = data.draft_vocab_size or 0
        say(f"draft vocabulary of {size:,}: {data.coverage:.2%} of what is learnt", err=True)
    for text in prepared.notes:
        _note(text)


def _line(progress: TrainProgress) -> str:
    measured = progress.measurement
    total = "" if progress.total_steps is None else f" of about {progress.total_steps:,}"
    parts = [f"step {measured.step:,}{total}", *_figures(measured)]
    if progress.eta_s is not None:
        parts.append(f"{progress.eta_s / 60:,.0f} min to go")
    return ("validation: " if measured.split == "validation" else "") + ", ".join(parts)


def _figures(measured: Measurement) -> list[str]:
    parts = [f"loss {measured.loss:.4g}"]
    if measured.accuracy:
        parts.append("accuracy " + " / ".join(f"{share:.1%}" for share in measured.accuracy))
    if measured.accept_length is not None:
        parts.append(f"accept length {measured.accept_length:.2f}")
    return parts


def _conclude(report: TrainReport) -> None:
    if report.was_stopped:
        say("stopped; the same command goes on from the last checkpoint")
    best = report.validation or report.last
    if best is not None:
        say(f"{best.split}: {', '.join(_figures(best))}")
    say(f"checkpoint: {report.checkpoint or 'none'}")
    say(f"metrics: {report.metrics}")


def _show_plan(prepared: Prepared, *, as_json: bool) -> None:
    launch = prepared.launch
    if as_json:
        print_json(
            {
                "command": list(launch.argv),
                "env": dict(launch.env),
                "files": {str(path): content for path, content in launch.files.items()},
                "total_steps": launch.total_steps,
                "packages": dict(prepared.installed.packages),
                "gpus": prepared.installed.gpus,
                "notes": list(prepared.notes),
            }
        )
        return
    _announce(prepared)
    for path, content in launch.files.items():
        say(f"would write {path}:\n{content}")
    say(launch.shown())


def _as_data(report: TrainReport) -> dict[str, Any]:
    return {
        "checkpoint": None if report.checkpoint is None else str(report.checkpoint),
        "metrics": str(report.metrics),
        "log": str(report.log),
        "last": None if report.last is None else report.last.as_dict(),
        "validation": None if report.validation is None else report.validation.as_dict(),
        "was_stopped": report.was_stopped,
    }
