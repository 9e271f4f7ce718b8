"""`quantroute export-drafter`: a trained head for an engine."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.drafter import export_drafter as write_export

__all__ = ["export_drafter"]


class EngineName(enum.StrEnum):
    """Engines that load what is written."""

    VLLM = "vllm"
    SGLANG = "sglang"


def export_drafter(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or the output folder of `quantroute train`.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    engine: Annotated[EngineName, typer.Option("--engine", help="Who will load it.")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="FOLDER", help="The target's folder, if it has moved."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="CLASS",
            help="For a target whose way of counting layers is not known: a class it shares.",
        ),
    ] = None,
    draft_config: Annotated[
        Path | None,
        typer.Option("--draft-config", help="SpecForge only: the head's config, if not found."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="SpecForge only: the interpreter that has it.")
    ] = sys.executable,
    as_json: options.Json = False,
) -> None:
    """Write a trained drafter as a folder that ENGINE loads, and print the command that serves it.

    Layer ids are written as that engine counts them; weights, vocabulary map and norm settings are
    checked, and the folder is read back.

    quantroute export-drafter drafter served/vllm --engine vllm
    """
    done = write_export(
        checkpoint,
        folder,
        engine=engine.value,
        target=target,
        like=like,
        draft_config=draft_config,
        python=python,
    )
    if as_json:
        print_json(
            {
                "folder": str(done.folder),
                "source": str(done.source),
                "engine": done.engine,
                "layer_ids": list(done.layer_ids),
                "boundary_layers": list(done.layers),
                "serve": done.serve,
                "notes": list(done.notes),
            }
        )
        return
    say(f"{done.folder}: from {done.source}, layer ids {list(done.layer_ids)} for {done.engine}")
    for text in done.notes:
        say(f"note: {text}")
    say(done.serve)
