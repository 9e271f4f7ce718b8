"""Eight workers, one cap: what a shared ledger promises, with a worker and the server killed.

    python benchmarks/shared_budget.py             # 8 workers, 2,000 requests in flight: minutes
    python benchmarks/shared_budget.py --quick     # 3 workers, 90 in flight

Starts a simulator, a redis-server (`appendfsync always`) and so many `quantroute generate --shard`
processes with far more prompts than the cap pays for. At 30% of the cap one worker is killed with
SIGKILL, at 45% the server is, and comes back two seconds later; at 60% the worker is started again,
as a scheduler would. When all have stopped at the cap, what the dead worker left unknown is
reconciled and the workers are started once more to use what that sets free.

Then: never more than the cap posted and reserved, at least 99% of it used, the simulator's own bill
equal to the ledger, every row in one shard. Exit code 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantroute import Client, EnvKey, Service
from quantroute.errors import LedgerUnreachable
from quantroute.generation import RowStore, Shard, ShardedRows
from quantroute.ledger import BudgetLedger, SharedLedger
from quantroute.simulator import AnswerSpec, ThreadedSimulator, kimi_mission_scenario

KEY = "OPENROUTER_API_KEY"
LIMIT_TOKENS = 1_024


@dataclass
class RedisServer:
    """A server process on a folder of its own."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start; it loads its data while others may be knocking already."""
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self) -> None:
        """As a power cut."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running server that is gone afterwards."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(folder, port)
    server.start()
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.02)
        yield server
    finally:
        server.kill()


@dataclass
class Show:
    """One run of the benchmark."""

    args: argparse.Namespace
    folder: Path
    redis: RedisServer
    simulator: ThreadedSimulator
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    most_used_pusd: int = 0

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def cap_pusd(self) -> int:
        """The cap."""
        return round(self.args.cap * 100) * 10**10

    def start(self, index: int) -> None:
        """Start one worker."""
        log = (self.folder / f"worker-{index}.log").open("ab")
        self.workers[index] = subprocess.Popen(
            [sys.executable, "-c", "from quantroute.cli import main; main()", "generate",
             str(self.folder / "prompts.jsonl"), "--out", str(self.out), "--cap",
             f"{self.args.cap:.2f}", "--shard", f"{index}/{self.args.workers}",
             "--ledger", self.redis.url, "--max-in-flight", str(self.args.in_flight),
             "--max-output-tokens", str(LIMIT_TOKENS), "--base-url", self.simulator.base_url,
             "--json"],
            stdout=log, stderr=log,
        )  # fmt: skip

    def store(self, index: int) -> Path:
        """A worker's file."""
        return self.out / Shard(index, self.args.workers).folder / "run.sqlite"

    async def until(self, watcher: SharedLedger, share: float) -> None:
        """Until so much of the cap is posted, or all workers have ended."""
        while any(worker.poll() is None for worker in self.workers.values()):
            with contextlib.suppress(LedgerUnreachable):
                await watcher.unresolved()  # asks the server
            balance = watcher.balance()
            used_pusd = balance.posted_pusd + balance.pending_pusd
            self.most_used_pusd = max(self.most_used_pusd, used_pusd)
            if balance.posted_pusd >= share * self.cap_pusd:
                return
            await asyncio.sleep(0.1)

    async def perform(self) -> bool:
        """The whole show; whether everything held."""
        name = "run"
        async with SharedLedger.connect(
            self.redis.url, name=name, cap=f"{self.args.cap:.2f}", patience_s=2.0
        ) as watcher:
            began_s = time.monotonic()
            for index in range(self.args.workers):
                self.start(index)
            victim = self.args.workers // 2
            await self.until(watcher, 0.30)
            self.workers[victim].send_signal(signal.SIGKILL)
            self.workers[victim].wait()
            self.say("killed worker", victim, watcher)
            await self.until(watcher, 0.45)
            self.redis.kill()
            self.say("killed redis", "", watcher)
            await asyncio.sleep(2.0)
            self.redis.start()
            await self.until(watcher, 0.60)
            self.start(victim)
            self.say("started worker again", victim, watcher)
            await self.until(watcher, 2.0)
            took_s = time.monotonic() - began_s
            self.say("all stopped", f"after {took_s:.0f} s", watcher)
            await self.settle(watcher)
            for _ in range(3):
                if watcher.balance().posted_pusd >= 0.99 * self.cap_pusd:
                    break
                for index in range(self.args.workers):
                    self.start(index)
                await self.until(watcher, 2.0)
                await self.settle(watcher)
                self.say("all started once more and stopped", "", watcher)
            await watcher.verify()
            return await self.judge(watcher, took_s)

    async def settle(self, watcher: SharedLedger) -> None:
        """Find out what lost answers cost."""
        async with Client(
            ledger=watcher, service=Service(base_url=self.simulator.base_url), key=EnvKey(KEY)
        ) as client:
            done = await client.reconcile(quiet_s=0.0, patience_s=5.0)
        await watcher.unresolved()
        self.say("reconciled", f"{done}", watcher)

    def say(self, what: str, which: object, watcher: SharedLedger) -> None:
        """A line on stderr."""
        share = watcher.balance().posted_pusd / self.cap_pusd
        print(f"{share:7.2%}  {what} {which}", file=sys.stderr, flush=True)

    async def judge(self, watcher: SharedLedger, took_s: float) -> bool:
        """Print the figures."""
        balance, billed_pusd = watcher.balance(), self.simulator.bill.total_pusd
        rows = await self.count_rows()
        found = {
            "workers": self.args.workers,
            "in_flight": self.args.in_flight,
            "cap_pusd": self.cap_pusd,
            "most_posted_and_reserved_pusd": self.most_used_pusd,
            "over_cap_pusd": max(0, self.most_used_pusd - self.cap_pusd),
            "used_share": round(balance.posted_pusd / self.cap_pusd, 6),
            "posted_pusd": balance.posted_pusd,
            "simulator_bill_pusd": billed_pusd,
            "still_held": balance.held_entries,
            "requests": balance.posted_entries + balance.voided_entries,
            "rows": rows,
            "seconds_to_the_cap": round(took_s, 1),
            "exit_codes": sorted({worker.returncode for worker in self.workers.values()}),
        }
        print(json.dumps(found, indent=2))
        return (
            found["over_cap_pusd"] == 0
            and balance.posted_pusd >= 0.99 * self.cap_pusd
            and billed_pusd == balance.posted_pusd
            and not balance.open_entries
        )

    async def count_rows(self) -> int:
        """Rows in all shards; a row in two of them raises."""
        async with contextlib.AsyncExitStack() as stack:
            ledgers = [
                await stack.enter_async_context(BudgetLedger.open(self.store(index)))
                for index in range(self.args.workers)
            ]
            rows = ShardedRows([RowStore(ledger.store) for ledger in ledgers])
            stored = await rows.run("run")
            return sum([1 async for _ in rows.rows(stored.run_id)])


def main() -> None:
    """Parse, set up, perform."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=2_000, help="of all workers together")
    parser.add_argument("--cap", type=float, default=8.0)
    parser.add_argument("--mean", type=float, default=300.0)
    parser.add_argument("--time-scale", type=float, default=0.5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.workers, args.in_flight, args.cap, args.time_scale = 3, 90, 0.4, 0.2
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed")
    scenario = kimi_mission_scenario(
        time_scale=args.time_scale, answers=AnswerSpec(mean_tokens=args.mean, sigma=0.5)
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        prompts = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": f"Question {n}?"}) for n in range(int(args.cap * 6_000))]
        prompts.write_text("\n".join(lines) + "\n")
        redis = stack.enter_context(redis_server(Path(folder) / "redis"))
        simulator = stack.enter_context(ThreadedSimulator(scenario, seed=1))
        os.environ[KEY] = simulator.api_key
        show = Show(args, Path(folder), redis, simulator)
        try:
            has_held = asyncio.run(show.perform())
        finally:
            for worker in show.workers.values():
                worker.kill()
                worker.wait()
        if not has_held:
            for log in sorted(Path(folder).glob("worker-*.log")):
                print(f"== {log.name}\n{log.read_text()[-2_000:]}", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    main()
