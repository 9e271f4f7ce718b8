"""A set of prompts to rows in a file: the main job, from Python. Run it twice: it resumes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.generation import RowStore, Run, RunConfig, builtin_prompts, export_rows
from quantroute.money import format_usd
from quantroute.simulator import Simulator

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/many-rows")


async def main() -> None:
    config = RunConfig(name="demo", model="moonshotai/kimi-k2.5", max_output_tokens=4_096)
    async with Simulator() as simulator:
        os.environ["SIMULATOR_KEY"] = simulator.api_key
        async with (
            # Rows and money live in one file, so that no crash can part a text from its charge.
            BudgetLedger.open(FOLDER / "run.sqlite", cap="1.00") as ledger,
            Client(
                ledger=ledger,
                service=Service(base_url=simulator.base_url),
                key=EnvKey("SIMULATOR_KEY"),
                max_in_flight=64,
            ) as client,
        ):
            run = Run(client, config, builtin_prompts())
            with run.install_signal_handlers():  # the first Ctrl+C drains, the second leaves
                report = await run.execute()
            print(f"{report.stop_reason.value}: {report.finished} new rows, {report.resumed} old")
            export = await export_rows(
                RowStore(ledger.store),
                run=config.name,
                path=FOLDER / "rows.jsonl",
                statement=await ledger.statement(),
                overwrite=True,
            )
            print(f"{export.rows} rows in {export.path}, left out: {export.left_out or 'none'}")
            print(f"spent {format_usd(ledger.balance().posted_pusd, places=6)} of $1.00")


if __name__ == "__main__":
    asyncio.run(main())
