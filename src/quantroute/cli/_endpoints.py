"""`quantroute endpoints`: who may serve a model, and why not the others."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say, show
from quantroute.cli._policy_options import PolicyOptions, takes_policy
from quantroute.cli._service import opened_target
from quantroute.cli._wording import as_options
from quantroute.errors import ConfigurationError
from quantroute.money import usd_per_million
from quantroute.policy import BoundPolicy, ExclusionPolicy, Verdict, implausible_prices
from quantroute.pricing import Pricing
from quantroute.registry import EndpointList, ProviderRegistry
from quantroute.report import verdict_table


@takes_policy
def endpoints(
    model: Annotated[str, typer.Argument(help="Model id, e.g. moonshotai/kimi-k2.5.")],
    *,
    policy_options: PolicyOptions,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Read a snapshot or recorded catalogue instead of the network.",
        ),
    ] = None,
    save_snapshot: Annotated[
        Path | None, typer.Option(help="Also write what was read to this file, for offline use.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Ask the embedded simulator; no key, no network.")
    ] = False,
    scenario: options.ScenarioFile = None,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Judge every endpoint of MODEL and print the verdicts with their reasons.

    Needs no key. Exit code 5 if no endpoint is eligible.

    quantroute endpoints moonshotai/kimi-k2.5 --simulate

    quantroute endpoints moonshotai/kimi-k2.5 --exclude Fireworks --accept-unknown Novita

    quantroute endpoints moonshotai/kimi-k2.5 --save-snapshot kimi.json
    """
    if snapshot is not None and save_snapshot is not None:
        raise ConfigurationError("--save-snapshot needs a service to read: leave --snapshot out")
    policy = policy_options.policy()

    async def run() -> tuple[EndpointList, BoundPolicy]:
        if snapshot is not None:
            return await judge(ProviderRegistry.from_snapshot(snapshot), model, policy)
        async with (
            opened_target(
                base_url=base_url, ca_file=ca_file, simulate=simulate, scenario=scenario
            ) as target,
            ProviderRegistry(service=target.service, key=target.key) as registry,
        ):
            judged = await judge(registry, model, policy)
            if save_snapshot is not None:
                await registry.snapshot(save_snapshot, models=[model])
            return judged

    listing, bound = _loop.run(run())
    if as_json:
        print_json(_as_data(listing, bound))
    else:
        _print(listing, bound)
    if not bound.eligible:
        raise typer.Exit(ExitCode.NO_ENDPOINT)


async def judge(
    registry: ProviderRegistry, model: str, policy: ExclusionPolicy
) -> tuple[EndpointList, BoundPolicy]:
    """The model's endpoints and what the policy says to each.

    Raises:
        RegistryError: they cannot be had.
        UnknownName: a rule's name matches nothing.
    """
    listing = await registry.endpoints(model)
    providers = (await registry.providers()).providers if policy.names_providers else ()
    bound = policy.bind(listing.endpoints, providers=providers, at=datetime.now(UTC))
    return listing, bound


def _print(listing: EndpointList, bound: BoundPolicy) -> None:
    read_at = datetime.fromtimestamp(listing.fetched_at_s, UTC)
    stale = ", STALE" if listing.is_stale else ""
    title = f"{listing.model}, listed {read_at:%Y-%m-%d %H:%M} UTC{stale}"
    show(verdict_table(bound, title=title, wording=as_options))
    say(f"{len(bound.eligible)} of {len(bound.verdicts)} endpoints are eligible.")
    for problem in listing.problems:
        say(f"left out: {problem}")


def _as_data(listing: EndpointList, bound: BoundPolicy) -> dict[str, Any]:
    odd = implausible_prices(listing.endpoints)
    return {
        "model": listing.model,
        "fetched_at_s": listing.fetched_at_s,
        "is_stale": listing.is_stale,
        "endpoints": [
            _verdict_data(verdict) | {"price_warning": odd.get(verdict.endpoint.key)}
            for verdict in bound.verdicts
        ],
        "problems": [str(problem) for problem in listing.problems],
    }


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    """One verdict as plain JSON values; prices are strings, exact."""
    endpoint = verdict.endpoint
    return {
        "endpoint": str(endpoint.key),
        "provider": endpoint.provider_name,
        "eligible": verdict.eligible,
        "reasons": [{"code": item.code, "text": item.text} for item in verdict.reasons],
        "precision": verdict.precision.as_dict(),
        "status": endpoint.status,
        "usd_per_million": _prices(endpoint.pricing),
        "context_tokens": endpoint.context_tokens,
        "max_output_tokens": endpoint.max_output_tokens,
    }


def _prices(pricing: Pricing) -> dict[str, str | None]:
    return {
        name: None if price is None else f"{usd_per_million(price):f}"
        for name, price in pricing.prices.items()
    }
