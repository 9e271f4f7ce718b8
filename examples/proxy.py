"""Any client of OpenAI's API under a policy and a cap: the proxy, asked over plain HTTP."""

from __future__ import annotations

import asyncio
import os

import aiohttp

from quantroute import Client, EnvKey, Service
from quantroute.money import format_usd
from quantroute.proxy import Proxy
from quantroute.simulator import Simulator

QUESTION = {
    "model": "moonshotai/kimi-k2.5",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 1_024,
}


async def main() -> None:
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        async with (
            Client(
                cap_usd="0.01",
                # Leave `service` and `key` out for OpenRouter itself.
                service=Service(base_url=simulator.base_url),
                key=EnvKey("SIMULATOR_KEY"),
            ) as client,
            Proxy(client, port=0) as proxy,
            aiohttp.ClientSession() as session,
        ):
            # An OpenAI client needs only base_url=proxy.base_url; the key it sends does not matter.
            url = f"{proxy.base_url}/chat/completions"
            async with session.post(url, json=QUESTION) as response:
                who = response.headers["x-quantroute-endpoint"]
                print(f"answered by {who} for ${response.headers['x-quantroute-cost-usd']}")
            # The worst case of so long an answer does not fit under a cap of one cent.
            async with session.post(url, json=QUESTION | {"max_tokens": 65_536}) as response:
                error = (await response.json())["error"]
                print(f"refused with {response.status}: {error['code']}")
            print(f"spent {format_usd(client.ledger.balance().posted_pusd, places=6)}")


if __name__ == "__main__":
    asyncio.run(main())
