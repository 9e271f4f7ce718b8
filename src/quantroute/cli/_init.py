"""`quantroute init`: a run file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli._output import say
from quantroute.errors import DatasetError
from quantroute.pipeline import preset as find_preset
from quantroute.storage import atomic_write

__all__ = ["init"]


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    preset: Annotated[str, typer.Option(help="A known target.")] = "kimi-k2.5",
) -> None:
    """Write a run file for a known target, and say what it will take.

    quantroute init run.toml --preset kimi-k2.5
    """
    found = find_preset(preset)
    if path.exists():
        raise DatasetError(path=str(path), problem="exists; choose another name")
    atomic_write(path, found.text.encode())
    say(f"{path}: set prompts, target and cap, then `quantroute plan {path}`")
    for line in found.estimates():
        say(line)
