"""`quantroute pipeline`: all stages of one run.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.pipeline import (
    STAGES,
    final_manifest,
    load_pipeline_spec,
    run_pipeline,
    status_of,
)

__all__ = ["app", "print_stage"]

app = typer.Typer(
    add_completion=False,  # of the whole command, not of this part
    no_args_is_help=True,
    rich_markup_mode=None,  # as that of the commands
    help="Prompts to a judged drafter: plan, generate, extract, train, export, evaluate.",
)

_Spec = Annotated[Path, typer.Argument(help="The run's file, with [extract] and [train].")]
_Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="STAGE", help="This stage alone; repeatable."),
]
_Simulate = Annotated[
    bool, typer.Option("--simulate", help="Generate against the embedded simulator.")
]


@app.command("run", short_help="Run the stages that have to be run.")
def run(
    spec: _Spec,
    only: _Only = None,
    simulate: _Simulate = False,
    base_url: options.BaseUrl = OPENROUTER_URL,
) -> None:
    """Run what has to be run: stages whose inputs and settings are as they were stand.

    Stopped or killed anywhere, the same command goes on there. With --only, a stage runs on a
    machine that has the files before it: copy the run's folder.

    quantroute pipeline run run.toml

    quantroute pipeline run run.toml --only train
    """
    service = ["--simulate"] if simulate else []
    if base_url != OPENROUTER_URL:
        service += ["--base-url", base_url]
    described = load_pipeline_spec(spec)
    digest = run_pipeline(described, only=only, service=service, on_stage=print_stage)
    say(f"manifest: {described.home / 'manifest.json'} (SHA-256 {digest[:16]})")


@app.command("resume", short_help="Go on where it stopped; as `run`.")
def resume(
    spec: _Spec,
    simulate: _Simulate = False,
    base_url: options.BaseUrl = OPENROUTER_URL,
) -> None:
    """Go on where it stopped; the same as `run`.

    quantroute pipeline resume run.toml
    """
    run(spec, only=None, simulate=simulate, base_url=base_url)


@app.command("status", short_help="Show what is done, and what would run.")
def status(spec: _Spec, as_json: options.Json = False) -> None:
    """Show which stages are done, and which would run and why.

    quantroute pipeline status run.toml
    """
    described = load_pipeline_spec(spec)
    found = [status_of(described, stage) for stage in STAGES]
    if as_json:
        print_json(
            {
                "stages": [
                    {"stage": item.stage, "state": item.state, "why": item.why} for item in found
                ],
                "records": final_manifest(described),
            }
        )
        return
    for item in found:
        say(f"{item.stage:10} {item.state:8} {item.why}".rstrip())


def print_stage(stage: str, what: str, seconds: float) -> None:
    """One line when a stage begins, stands or has ended."""
    match what:
        case "begins":
            say(f"== {stage}", bold=True)
        case "stands":
            say(f"== {stage}: stands")
        case _:
            say(f"== {stage}: done in {seconds:,.1f} s")
