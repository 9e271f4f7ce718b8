"""One question, answered by the cheapest endpoint that serves the model as it was made."""

from __future__ import annotations

import asyncio
import os

from quantroute import Client, EnvKey, Sampling, Service
from quantroute.money import format_usd
from quantroute.simulator import Simulator

MODEL = "moonshotai/kimi-k2.5"


async def main() -> None:
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        async with Client(
            cap_usd="0.10",
            exclude=["Fireworks"],
            # Leave these two out to ask OpenRouter, with the key in OPENROUTER_API_KEY.
            service=Service(base_url=simulator.base_url),
            key=EnvKey("SIMULATOR_KEY"),
        ) as client:
            answer = await client.chat(
                MODEL,
                "Why is the sky blue?",
                max_output_tokens=2_048,
                sampling=Sampling(temperature=0.7),
            )
            made_by = answer.provenance.endpoint
            print((answer.content or "").strip()[:200], "...")
            tokens = answer.usage.output_tokens if answer.usage else "unknown"
            print(f"finish reason {answer.finish_reason}, {tokens} output tokens")
            print(f"by {made_by.provider_name} ({made_by.tag})")
            print(f"cost {format_usd(answer.cost_pusd or 0, places=8)}")
            print(f"left {format_usd(client.ledger.balance().available_pusd or 0, places=8)}")


if __name__ == "__main__":
    asyncio.run(main())
