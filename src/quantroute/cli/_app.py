"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quantroute._version import __version__
from quantroute.cli import _endpoints, _export, _generate, _simulate, _status
from quantroute.cli._exit import code_for
from quantroute.cli._log import configure_logging
from quantroute.errors import QuantrouteError

app = typer.Typer(
    name="quantroute",
    help="Cost-aware, precision-aware routing of LLM requests under a hard budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could show a key
    epilog="Exit codes: 0 done, 2 wrong setting, 3 stopped by the cap, 4 some rows failed, "
    "5 no endpoint, 6 account, 7 storage, 130 interrupted.",
)
app.command("endpoints")(_endpoints.endpoints)
app.command("generate")(_generate.generate)
app.command("status")(_status.status)
app.command("reconcile")(_status.reconcile)
app.command("export")(_export.export)
app.command("simulate")(_simulate.simulate)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"quantroute {__version__}")
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
) -> None:
    """Options before the command."""
    del version
    configure_logging(verbose=verbose)


def main() -> None:
    """Entry point of the `quantroute` script."""
    try:
        app()
    except QuantrouteError as error:
        typer.echo(f"quantroute: {error}", err=True)
        sys.exit(code_for(error))
    except KeyboardInterrupt:
        sys.exit(130)
