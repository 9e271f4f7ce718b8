"""Rehearse a bad day: providers that fail, hang up and answer nonsense. The books still agree."""

from __future__ import annotations

import asyncio
import os

from quantroute import Answered, ChatRequest, Client, EnvKey, RetryPolicy, Service
from quantroute.money import format_usd
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

MODEL = "moonshotai/kimi-k2.5"
BAD_DAY = kimi_mission_scenario(
    faults=Faults(upstream_502=0.1, error_in_200=0.05, reset=0.05, choices_null=0.05, padding=0.2)
)


async def main() -> None:
    async with Simulator(BAD_DAY, seed=7) as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        async with Client(
            cap_usd="1.00",
            service=Service(base_url=simulator.base_url),
            key=EnvKey("SIMULATOR_KEY"),
            retry=RetryPolicy(base_s=0.01, cap_s=0.05),
        ) as client:
            await client.note_baseline()
            requests = [
                ChatRequest(
                    model=MODEL,
                    messages=({"role": "user", "content": f"Tell me about the number {number}."},),
                    max_output_tokens=1_024,
                )
                for number in range(60)
            ]
            completions = await asyncio.gather(*map(client.complete, requests))
            answered = sum(isinstance(item, Answered) for item in completions)
            held = client.ledger.balance().held_entries
            print(f"{answered} of {len(requests)} answered; {held} charges unknown at first")

            done = await client.reconcile(quiet_s=0.0, patience_s=5.0)
            print(
                f"settled by record {done.settled_by_record}, by usage {done.settled_by_key_usage}"
            )
            posted = client.ledger.balance().posted_pusd
            billed = simulator.bill.total_pusd
            print(f"posted {format_usd(posted, places=12)}, billed {format_usd(billed, places=12)}")
            print("the books agree" if posted == billed else "the books DISAGREE")


if __name__ == "__main__":
    asyncio.run(main())
