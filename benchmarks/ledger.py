"""Reservations and charges per second of the budget ledger: in memory, in a file, on a server.

    python benchmarks/ledger.py            # about two minutes
    python benchmarks/ledger.py --quick    # a self-check, a few seconds

Each of so many tasks reserves, posts, and begins again. In a file or on a server each of the two is
durable before it returns: what many tasks write shares a commit. Then 1, 2 and 4 worker processes
on one ledger, each with as many tasks as make 2,000 together: on one shared file, and on a
redis-server (`appendfsync always`) with a file per worker, if one is installed. `share` is the
first row's cost per request divided by this one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from shared_budget import redis_server

from quantroute import BudgetLedger
from quantroute.ledger import Account, Basis, Charge, SharedLedger
from quantroute.pricing import TokenUsage

ACCOUNT = Account("bench/rows")
CHARGE = Charge(
    amount_pusd=1_000_000_000,
    basis=Basis.REPORTED,
    usage=TokenUsage(input_tokens=400, output_tokens=600),
    generation_id="gen-1",
)


async def measure(
    ledger: BudgetLedger | SharedLedger, pairs: int, tasks: int, *, is_alone: bool = True
) -> tuple[float, float]:
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
        if is_alone and (balance.posted_entries, balance.open_entries) != (pairs, 0):
            raise SystemExit(f"wrong books: {balance}")
        if is_alone:
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


# -- several workers ------------------------------------------------------------------------------


def opened(place: str, folder: Path, number: int) -> BudgetLedger | SharedLedger:
    """A worker's view of the one ledger."""
    if place.startswith("redis://"):
        store = folder / f"{number}.sqlite"
        return SharedLedger.connect(place, name="bench", cap="1000000", store=store)
    return BudgetLedger.open(place, cap="1000000")


def work(options: argparse.Namespace) -> None:
    """One worker: says when it is ready, waits for the word, prints its figures."""
    place, folder, number, pairs, tasks = options.worker
    print("ready", flush=True)
    sys.stdin.readline()
    ledger = opened(place, Path(folder), int(number))
    rate, cpu_ms = asyncio.run(measure(ledger, int(pairs), int(tasks), is_alone=False))
    print(json.dumps([rate, cpu_ms]), flush=True)


def together(place: str, folder: Path, workers: int, pairs: int) -> tuple[float, float]:
    """Pairs per second of all workers together, and CPU milliseconds per pair of a worker."""
    each = [place, str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", *each, str(number), str(pairs // workers),
             str(2_000 // workers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(workers)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    wall_s = time.perf_counter()
    ends = [json.loads(process.communicate()[0]) for process in _told(processes)]
    wall_s = time.perf_counter() - wall_s
    return pairs / wall_s, sum(cpu_ms for _, cpu_ms in ends) / workers


def _told(processes: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for process in processes:  # all at once, before the first is waited for
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def several(options: argparse.Namespace) -> None:
    """Print a line per kind of ledger and number of workers."""
    print(f"\n{'':10}{'workers':>8}{'pairs/s':>10}{'CPU ms/pair':>14}{'share':>8}")
    kinds = ["file"] + (["redis"] if shutil.which("redis-server") else [])
    for kind in kinds:
        first_ms = None
        for workers in (1, 2, 4):
            with tempfile.TemporaryDirectory(dir=options.folder) as name, ExitStack() as stack:
                folder = Path(name)
                place = str(folder / "ledger.sqlite")
                if kind == "redis":
                    place = stack.enter_context(redis_server(folder / "redis")).url
                rate, cpu_ms = together(place, folder, workers, options.pairs)
            first_ms = first_ms or cpu_ms
            print(
                f"{kind:10}{workers:8}{rate:10.0f}{cpu_ms:14.3f}{first_ms / cpu_ms:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=None, help="for the file; a local disk")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.pairs = 2_000
    if chosen.worker:
        work(chosen)
    else:
        asyncio.run(main(chosen))
        several(chosen)
