"""The commands: what each is called, what it does in one line, and where it is written.

A command's module brings with it the client, tables and pydantic models that it works with. Help
and the shell's completion need none of that: they read this table, and only the command that runs
is loaded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Final

import typer

__all__ = ["COMMANDS", "Place", "load"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command is: `module` of this package, `name` in it, a function or a `Typer`."""

    module: str
    name: str
    #: The first paragraph of its help; a test compares the two.
    summary: str


#: In the order in which help lists them.
COMMANDS: Final = {
    "init": Place(
        "_init",
        "init",
        "Write a run file with comments, to be read and changed. Asks nobody, spends nothing.",
    ),
    "doctor": Place(
        "_doctor",
        "doctor",
        "Check key, limits, network, disk, versions and clock. Spends nothing, changes nothing.",
    ),
    "endpoints": Place(
        "_endpoints",
        "endpoints",
        "Judge every endpoint of MODEL and print the verdicts with their reasons.",
    ),
    "plan": Place(
        "_plan",
        "plan",
        "Count prompts and duplicates, judge endpoints, and share the cap, before spending.",
    ),
    "generate": Place(
        "_generate",
        "generate",
        "Generate answers to PROMPTS from eligible endpoints, within a hard cap.",
    ),
    "status": Place(
        "_status",
        "status",
        "Show a run's ledger and answers by endpoint, its rows by class, and what is still "
        "unknown.",
    ),
    "reconcile": Place(
        "_status",
        "reconcile",
        "Find out what lost answers cost: generation records first, then the key's own usage.",
    ),
    "export": Place(
        "_export",
        "export",
        "Write the whole conversations of RUN to PATH, one row each, with full provenance.",
    ),
    "report": Place(
        "_report",
        "report",
        "Write one self-contained HTML page about RUN: money, targets, endpoints, speed, errors.",
    ),
    "audit": Place(
        "_audit",
        "audit",
        "Judge each endpoint that served exported rows, by the target's own weights.",
    ),
    "serve": Place(
        "_serve",
        "serve",
        "Serve OpenAI's API on 127.0.0.1: any client, under this policy and this cap.",
    ),
    "extract": Place(
        "_extract",
        "extract",
        "Extract the target's hidden states for the rows of a run, into a folder of shards.",
    ),
    "convert": Place(
        "_convert",
        "convert",
        "Write the states that `extract` took as one trainer's files. `pipeline` does it by "
        "itself.",
    ),
    "simulate": Place(
        "_simulate",
        "simulate",
        "Serve an OpenRouter-compatible service on 127.0.0.1: rehearse a run before spending "
        "money.",
    ),
    "train": Place(
        "_train",
        "train",
        "Train a drafter on the data that `quantroute convert` wrote.",
    ),
    "export-drafter": Place(
        "_export_drafter",
        "export_drafter",
        "Write a trained drafter as a folder that ENGINE loads, and print the command that "
        "serves it.",
    ),
    "demo": Place(
        "_demo",
        "demo",
        "Train a toy target, buy its answers from simulated providers, train and judge a drafter.",
    ),
    "pipeline": Place(
        "_pipeline",
        "app",
        "Prompts to a judged drafter: plan, generate, extract, train, export, evaluate.",
    ),
}


@functools.cache
def load(name: str) -> Any:
    """The command as typer made it from its function and its options."""
    place = COMMANDS[name]
    found = getattr(importlib.import_module(f"quantroute.cli.{place.module}"), place.name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    # Plain help: panels of 80 columns cut the long names of options short, and take the name of a
    # table, such as [extract], for markup.
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, help=_with_whole_examples(inspect.cleandoc(found.__doc__ or "")))(found)
    return typer.main.get_command(alone)


def _with_whole_examples(text: str) -> str:
    """Mark the paragraphs that are commands, for them not to be wrapped: they are copied."""
    return "\n\n".join(
        f"\b\n{' '.join(part.split())}" if part.startswith("quantroute ") else part
        for part in text.split("\n\n")
    )
