"""`quantroute serve`: an OpenAI-compatible proxy under policy and cap, until Ctrl+C."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say
from quantroute.cli._policy_options import PolicyOptions, takes_policy
from quantroute.cli._service import opened_target
from quantroute.client import Client
from quantroute.errors import ConfigurationError
from quantroute.ledger import Account
from quantroute.money import to_usd
from quantroute.policy import ExclusionPolicy


@takes_policy
def serve(
    cap: Annotated[
        str | None,
        typer.Option("--cap", metavar="USD", help="Hard cap in USD, e.g. 5.00; needed at first."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="Ledger file, kept over restarts; in memory without it."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8787,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than 127.0.0.1 need --token-env.")
    ] = "127.0.0.1",
    token_env: Annotated[
        str | None,
        typer.Option(
            "--token-env",
            metavar="VARIABLE",
            help="Environment variable with the token that callers send as their API key.",
        ),
    ] = None,
    account: Annotated[
        str, typer.Option(help="Ledger account that pays for what comes in.")
    ] = "serve",
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests on the wire at once.")] = 500,
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="For requests that do not say.")
    ] = 4_096,
    *,
    policy_options: PolicyOptions,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Ask the embedded simulator; no key, no network.")
    ] = False,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Serve OpenAI's API on 127.0.0.1: any client, under this policy and this cap.

    Point existing code at the printed base URL; the API key it sends does not matter, the real one
    stays here. Each answer says its cost and endpoint in `x-quantroute-*` headers. A request over
    the cap is refused with status 402. Ctrl+C ends it after what is in flight.

    quantroute serve --simulate --cap 1.00

    quantroute serve --cap 5.00 --ledger serve.sqlite --exclude Fireworks
    """
    policy = policy_options.policy()
    if cap is None and (ledger is None or not ledger.exists()):
        raise ConfigurationError("--cap is needed for a new ledger: a hard limit such as 5.00 USD")

    async def run() -> None:
        from quantroute.proxy import Proxy

        async with (
            opened_target(base_url=base_url, ca_file=ca_file, simulate=simulate) as target,
            Client(
                cap_usd=cap,
                ledger=ledger,
                policy=policy,
                service=target.service,
                key=target.key,
                max_in_flight=max_in_flight,
            ) as client,
        ):
            async with Proxy(
                client,
                host=host,
                port=port,
                token_variable=token_env,
                account=Account(account),
                default_max_output_tokens=max_output_tokens,
            ) as proxy:
                _announce(proxy.base_url, policy, as_json=as_json)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                say("stopping: what is in flight is brought to its end", err=as_json)
            spent_pusd = client.ledger.balance().posted_pusd
            if as_json:
                print_json({"posted_pusd": spent_pusd})
            else:
                say(f"spent ${to_usd(spent_pusd):.6f}")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _announce(base_url: str, policy: ExclusionPolicy, *, as_json: bool) -> None:
    if as_json:
        print_json({"base_url": base_url, "exclude": list(policy.exclude)})
        return
    typer.echo(f"serving at {base_url}")
    typer.echo(f"export OPENAI_BASE_URL={base_url} OPENAI_API_KEY=unused")
    for name in policy.exclude:
        say(f"never used: {name}")
