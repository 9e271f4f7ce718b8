"""Who may serve a model, and why not the others: the registry's list under two policies."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from quantroute import ExclusionPolicy, ProviderRegistry, Service
from quantroute.simulator import Simulator

MODEL = "moonshotai/kimi-k2.5"


async def main() -> None:
    async with (
        Simulator() as simulator,
        # Leave `service` out for OpenRouter itself; reading its lists needs no key.
        ProviderRegistry(service=Service(base_url=simulator.base_url)) as registry,
    ):
        listing = await registry.endpoints(MODEL)
        providers = (await registry.providers()).providers

    strict = ExclusionPolicy()
    # Names in any spelling; a name that matches nothing is an error with suggestions.
    custom = ExclusionPolicy(exclude=["Moonshot AI"], accept_unknown=["novita"])
    for policy in (strict, custom):
        bound = policy.bind(listing.endpoints, providers=providers, at=datetime.now(UTC))
        print(bound)
        print(f"{len(bound.eligible)} of {len(bound.verdicts)} may serve\n")

    print("as OpenRouter's `provider` object:", bound.preferences())


if __name__ == "__main__":
    asyncio.run(main())
