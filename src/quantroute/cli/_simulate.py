"""`quantroute simulate`: the service, on this machine, until Ctrl+C."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._output import print_json
from quantroute.cli._service import read_scenario
from quantroute.errors import ConfigurationError


def simulate(
    catalogue: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Serve a recorded catalogue (.json or .json.gz)."
        ),
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Scenario file (TOML).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 0,
    as_json: options.Json = False,
) -> None:
    """Serve an OpenRouter-compatible service on 127.0.0.1: rehearse a run before spending money.

    Prints the base URL and the key it accepts; point any client there with `--base-url`. Without a
    scenario or catalogue it serves the Kimi K2.5 case that ships with the package. Ctrl+C ends it.
    """
    if scenario is not None and catalogue is not None:
        raise ConfigurationError("give --scenario or --catalogue; a scenario may name a catalogue")
    from quantroute.simulator import DEFAULT_API_KEY, serve

    chosen = read_scenario(catalogue, scenario)

    def ready(base_url: str) -> None:
        bill = f"{base_url.removesuffix('/api/v1')}/__sim/bill"
        if as_json:
            print_json({"base_url": base_url, "api_key": DEFAULT_API_KEY, "bill": bill})
            return
        typer.echo(f"serving {chosen.name!r} at {base_url}")
        typer.echo(f"export OPENROUTER_API_KEY={DEFAULT_API_KEY}  # works here only")
        typer.echo(f"bill:  {bill}", err=True)

    with contextlib.suppress(KeyboardInterrupt):
        _loop.run(serve(chosen, seed=seed, port=port, on_ready=ready))
