"""A soft cap: reserve by what answers cost so far, under a hard cap that is higher."""

from __future__ import annotations

import asyncio
import os

from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.generation import (
    Run,
    RunConfig,
    StatisticalReserve,
    builtin_prompts,
    worst_request_pusd,
)
from quantroute.money import cap_pusd, format_usd, to_usd
from quantroute.simulator import Simulator

MODEL = "moonshotai/kimi-k2.5"
IN_FLIGHT = 16


async def main() -> None:
    config = RunConfig(name="soft", model=MODEL, max_output_tokens=4_096, rollouts=3)
    target_pusd = cap_pusd("0.20")
    assert isinstance(target_pusd, int)
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        service, key = Service(base_url=simulator.base_url), EnvKey("SIMULATOR_KEY")
        async with Client(cap_usd="0", service=service, key=key) as client:
            eligible = (await client.verdicts(MODEL)).eligible
        worst_pusd = worst_request_pusd(eligible, builtin_prompts(), config.max_output_tokens)
        reserve = StatisticalReserve(target_pusd=target_pusd, worst_pusd=worst_pusd)
        # If every answer in flight hit its limit: whoever uses this has accepted that much.
        hard_pusd = target_pusd + reserve.worst_overrun_pusd(IN_FLIGHT)
        async with (
            BudgetLedger.in_memory(cap=str(to_usd(hard_pusd))) as ledger,
            Client(ledger=ledger, service=service, key=key, max_in_flight=IN_FLIGHT) as client,
        ):
            report = await Run(client, config, builtin_prompts(), reserve=reserve).execute()
            posted_pusd = ledger.balance().posted_pusd
    print(f"{report.stop_reason.value}: {report.finished} rows, none with a lowered limit")
    print(f"target {format_usd(target_pusd)}, spent {format_usd(posted_pusd)}")
    print(f"the hard cap was {format_usd(hard_pusd)}")
    print("never above the hard cap" if posted_pusd <= hard_pusd else "ABOVE the hard cap")


if __name__ == "__main__":
    asyncio.run(main())
