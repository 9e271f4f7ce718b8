"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from quantroute._log import get_logger
from quantroute._version import __version__
from quantroute.cli import _loop
from quantroute.cli._commands import COMMANDS, load
from quantroute.cli._exit import ExitCode, code_for
from quantroute.cli._wording import explain
from quantroute.errors import QuantrouteError

log = get_logger("quantroute.cli")


class _Commands(TyperGroup):
    """Loads a command when it runs; turns errors of the library into a line and an exit code."""

    def __init__(self, **settings: Any) -> None:
        listed = {name: TyperCommand(name, help=place.summary) for name, place in COMMANDS.items()}
        super().__init__(**{**settings, "commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if listed is None else load(args[0]), rest

    def invoke(self, ctx: Any) -> Any:
        wants_json = "--json" in ctx.args  # of the command; gone once it runs
        try:
            return super().invoke(ctx)
        except QuantrouteError as error:
            code, text = code_for(error), explain(error)
            typer.echo(f"quantroute: {text}", err=True)
            if wants_json:
                from quantroute.cli._output import print_json

                print_json({"exit_code": int(code), "kind": type(error).__name__, "error": text})
            raise typer.Exit(code) from error
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # A second Ctrl+C cancels the command's task; what was in flight is held by the ledger.
            typer.echo("quantroute: interrupted; the same command goes on from here", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from error


app = typer.Typer(
    name="quantroute",
    cls=_Commands,
    help="Cost-aware, precision-aware routing of LLM requests under a hard budget.\n\n"
    "Try it without a key or a network: `quantroute generate --simulate --cap 1.00`",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could show a key
    epilog="Exit codes: 0 done, 2 wrong setting, 3 stopped by the cap, 4 some rows failed, "
    "5 no endpoint, 6 account, 7 storage, 130 interrupted.",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"quantroute {__version__} ({_loop.loop_name()})")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log every failed attempt to stderr.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
    uvloop: Annotated[
        bool,
        typer.Option(
            "--uvloop/--no-uvloop",
            envvar="QUANTROUTE_UVLOOP",
            help="Run on uvloop where it is installed: less memory with thousands of connections.",
        ),
    ] = True,
) -> None:
    """Options before the command."""
    # Not needed for help and completion, which do not come here: structlog brings rich with it.
    from quantroute.cli._log import configure_logging

    del version
    configure_logging(verbose=verbose)
    _loop.choose(uvloop=uvloop)
    log.info("event loop", loop=_loop.loop_name())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `quantroute` script; always ends in SystemExit.

    Args:
        arguments: what follows `quantroute`; by default those of this process.
    """
    try:
        app(None if arguments is None else list(arguments))
    except KeyboardInterrupt:  # before or after a command
        sys.exit(ExitCode.INTERRUPTED)
