"""Several jobs under one cap: an account for each, with caps of their own, and the statement."""

from __future__ import annotations

import asyncio
import os

from quantroute import Account, BudgetExceeded, BudgetLedger, Client, EnvKey, Service
from quantroute.money import format_usd
from quantroute.simulator import Simulator

MODEL = "moonshotai/kimi-k2.5"
CAPS = {"team/math": "0.05", "team/chat": "0.004"}


async def ask(client: Client, account: Account, questions: int) -> str:
    for number in range(questions):
        try:
            await client.chat(
                MODEL, f"Question {number}?", account=account, max_output_tokens=1_024
            )
        except BudgetExceeded as error:
            return f"{number} answers, then the cap of {error.account!r}"
    return f"{questions} answers"


async def main() -> None:
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        service = Service(base_url=simulator.base_url)
        async with BudgetLedger.in_memory(cap="0.06") as ledger:
            for account, cap in CAPS.items():
                await ledger.set_cap(Account(account), cap)
            async with Client(
                ledger=ledger, service=service, key=EnvKey("SIMULATOR_KEY")
            ) as client:
                ends = await asyncio.gather(*(ask(client, Account(name), 10) for name in CAPS))
            for name, end in zip(CAPS, ends, strict=True):
                print(f"{name}: {end}")
            for line in await ledger.statement():
                spent = format_usd(line.posted_pusd, places=6)
                print(f"{line.account:10} {line.endpoint:18} {line.output_tokens:6,} {spent}")
            team = ledger.balance(Account("team"))  # an account includes those below it
            print(f"team: {format_usd(team.posted_pusd, places=6)}")
            print(f"bill: {format_usd(simulator.bill.total_pusd, places=6)}")


if __name__ == "__main__":
    asyncio.run(main())
