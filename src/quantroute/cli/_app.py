"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quantroute._log import get_logger
from quantroute._version import __version__
from quantroute.cli import (
    _audit,
    _convert,
    _demo,
    _doctor,
    _endpoints,
    _export,
    _export_drafter,
    _extract,
    _generate,
    _init,
    _loop,
    _pipeline,
    _plan,
    _report,
    _serve,
    _simulate,
    _status,
    _train,
)
from quantroute.cli._exit import ExitCode, code_for
from quantroute.cli._log import configure_logging
from quantroute.cli._output import print_json
from quantroute.cli._wording import explain
from quantroute.errors import QuantrouteError

log = get_logger("quantroute.cli")


class _Commands(TyperGroup):
    """Turns errors of the library into one line on stderr and a documented exit code."""

    def invoke(self, ctx: Any) -> Any:
        wants_json = "--json" in ctx.args  # of the command; gone once it runs
        try:
            return super().invoke(ctx)
        except QuantrouteError as error:
            code, text = code_for(error), explain(error)
            typer.echo(f"quantroute: {text}", err=True)
            if wants_json:
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
app.command("init")(_init.init)
app.command("doctor")(_doctor.doctor)
app.command("endpoints")(_endpoints.endpoints)
app.command("plan")(_plan.plan)
app.command("generate")(_generate.generate)
app.command("status")(_status.status)
app.command("reconcile")(_status.reconcile)
app.command("export")(_export.export)
app.command("report")(_report.report)
app.command("audit")(_audit.audit)
app.command("serve")(_serve.serve)
app.command("extract")(_extract.extract)
app.command("convert")(_convert.convert)
app.command("simulate")(_simulate.simulate)
app.command("train")(_train.train)
app.command("export-drafter")(_export_drafter.export_drafter)
app.add_typer(_pipeline.app, name="pipeline")
app.command("demo")(_demo.demo)


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
