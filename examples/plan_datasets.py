"""Two datasets under one cap, from Python: what they would cost, then the run itself."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from quantroute import BudgetLedger, Client, EnvKey, Sampling, Service
from quantroute.generation import DatasetSpec, RunSpec, plan_run, run_datasets
from quantroute.money import cap_pusd, format_usd, to_usd
from quantroute.simulator import Simulator

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plan-datasets")


def spec() -> RunSpec:
    """What `run.toml` says, as values; `load_run_spec` reads the same from a file."""
    cap = cap_pusd("1.00")
    assert isinstance(cap, int)
    return RunSpec(
        name="two",
        model="moonshotai/kimi-k2.5",
        cap_pusd=cap,
        out=FOLDER,
        max_in_flight=64,
        datasets=(
            DatasetSpec(
                name="chat", prompts=None, max_output_tokens=4_096, target_output_tokens=20_000
            ),
            DatasetSpec(
                name="instant",
                prompts=None,
                max_output_tokens=2_048,
                sampling=Sampling(reasoning=False),
                target_rows=30,
            ),
        ),
    )


async def main() -> None:
    run = spec()
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        service, key = Service(base_url=simulator.base_url), EnvKey("SIMULATOR_KEY")
        async with (
            BudgetLedger.open(FOLDER / "run.sqlite", cap=str(to_usd(run.cap_pusd))) as ledger,
            Client(ledger=ledger, service=service, key=key, max_in_flight=64) as client,
        ):
            plan = await plan_run(client, run)
            print(f"about {format_usd(plan.cost_low_pusd)}; fits: {plan.fits}")
            for item in (await run_datasets(client, run)).datasets:
                print(f"{item.name}: {item.accepted_tokens:,} tokens, reached: {item.is_reached}")


if __name__ == "__main__":
    asyncio.run(main())
