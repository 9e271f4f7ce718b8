"""Reservations and charges per second of the budget ledger, alone: in memory and in a file.

    python benchmarks/ledger.py            # about half a minute
    python benchmarks/ledger.py --quick    # a self-check, a few seconds

Each of so many tasks reserves, posts, and begins again. In a file each of the two is on disk before
it returns: what many tasks write shares a commit.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from quantroute import BudgetLedger
from quantroute.domain import TokenUsage
from quantroute.ledger import Account, Basis, Charge

ACCOUNT = Account("bench/rows")
CHARGE = Charge(
    amount_pusd=1_000_000_000,
    basis=Basis.REPORTED,
    usage=TokenUsage(input_tokens=400, output_tokens=600),
    generation_id="gen-1",
)


async def measure(ledger: BudgetLedger, pairs: int, tasks: int) -> tuple[float, float]:
    """Pairs of reserve and post per second, and CPU milliseconds per pair."""
    numbers = iter(range(pairs))

    async def work() -> None:
        for number in numbers:
            entry_id = await ledger.reserve(
                2_000_000_000, account=ACCOUNT, endpoint="alpha/int4", request_id=str(number)
            )
            await ledger.post(entry_id, CHARGE)

    async with ledger:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*[work() for _ in range(tasks)])
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        balance = ledger.balance(ACCOUNT)
        if (balance.posted_entries, balance.open_entries) != (pairs, 0):
            raise SystemExit(f"wrong books: {balance}")
        await ledger.verify()
    return pairs / wall_s, 1e3 * cpu_s / pairs


async def main(options: argparse.Namespace) -> None:
    """Print a line per kind of ledger and number of tasks."""
    print(f"{'':10}{'tasks':>8}{'pairs/s':>10}{'CPU ms/pair':>14}")
    for tasks in (1, 100, 2_000):
        pairs = max(tasks, options.pairs if tasks > 1 else options.pairs // 20)
        for kind in ("memory", "file"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                ledger = (
                    BudgetLedger.in_memory(cap="1000000")
                    if kind == "memory"
                    else BudgetLedger.open(Path(folder) / "ledger.sqlite", cap="1000000")
                )
                rate, cpu_ms = await measure(ledger, pairs, tasks)
            print(f"{kind:10}{tasks:8}{rate:10.0f}{cpu_ms:14.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=None, help="for the file; a local disk")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.pairs = 2_000
    asyncio.run(main(chosen))
