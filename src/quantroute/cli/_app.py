"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

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


#: The disk's own: everything else is wrong about a name or its rights.
_DISK_TROUBLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


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
            code = code_for(error)
            _tell(error, explain(error), code, wants_json=wants_json)
            raise typer.Exit(code) from error
        except OSError as error:
            raise typer.Exit(_tell_of_file(error, wants_json=wants_json)) from error
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # A second Ctrl+C cancels the command's task; what was in flight is held by the ledger.
            typer.echo("quantroute: interrupted; the same command goes on from here", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from error


def _tell(error: Exception, text: str, code: ExitCode, *, wants_json: bool) -> None:
    typer.echo(f"quantroute: {text}", err=True)
    if wants_json:
        from quantroute.cli._output import print_json

        with contextlib.suppress(OSError):  # the trouble may be with standard output itself
            print_json({"exit_code": int(code), "kind": type(error).__name__, "error": text})


def _prepare_standard_streams() -> None:
    """See that standard streams are there and take any text.

    A process that was started without them gets its descriptors 0, 1 and 2. Else the next file or
    socket would get one of the numbers: the C library and uvloop take those for a terminal's.
    Where the encoding lacks a character, a name is printed with its number: that is no reason to
    end a run.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _tell_of_file(error: OSError, *, wants_json: bool) -> ExitCode:
    """Tell of a file that cannot be had; the code to end with.

    Raises:
        OSError: the same, if it is not of a file: a reader who has seen enough, or a fault of ours.
    """
    if error.filename is None and error.errno not in _DISK_TROUBLE:
        raise error
    place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    code = ExitCode.STORAGE if error.errno in _DISK_TROUBLE else ExitCode.CONFIGURATION
    _tell(error, f"{place}{error.strerror}; {_remedy(error)}", code, wants_json=wants_json)
    return code


def _remedy(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "make room and rerun"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "choose a place that you may read and write"
        case _:
            return "check the name and rerun"


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
    _prepare_standard_streams()
    try:
        app(None if arguments is None else list(arguments))
    except KeyboardInterrupt:  # before or after a command
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:  # the same; completion is installed before
        sys.exit(_tell_of_file(error, wants_json=False))
