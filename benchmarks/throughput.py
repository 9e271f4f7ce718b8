"""Rows per second and CPU time per row: quantroute with everything on, against bare aiohttp.

    python benchmarks/throughput.py            # about two minutes
    python benchmarks/throughput.py --quick    # a self-check, 15 seconds

quantroute runs with its normal settings: policy, budget ledger and durable rows in an SQLite file,
every answer checked and classified. aiohttp sends the same requests from a bounded pool of workers
and appends a line per answer to a file. The two alternate, each in a process of its own, pinned to
one core where the machine has two; the server (`_server.py`) is pinned to another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

MODEL = "moonshotai/kimi-k2.5"
PROMPT = ("Rewrite the following passage and keep every fact in it. " * 30)[:1_500]
KEY = "sk-or-v1-benchmark-without-value"


# -- the two clients ------------------------------------------------------------------------------


async def raw(base_url: str, rows: int, in_flight: int, folder: Path) -> dict[str, Any]:
    """The least that any client over aiohttp has to do."""
    import aiohttp

    numbers = iter(range(rows))
    done = 0
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with (folder / "rows.jsonl").open("wb", buffering=0) as file:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:

            async def work() -> None:
                nonlocal done
                for number in numbers:
                    messages = [{"role": "user", "content": f"row-{number} {PROMPT}"}]
                    body = {"model": MODEL, "messages": messages, "max_tokens": 4_096}
                    async with session.post(
                        f"{base_url}/chat/completions", data=json.dumps(body), headers=headers
                    ) as response:
                        answer = json.loads(await response.read())
                    text = answer["choices"][0]["message"]["content"]
                    line = {"id": number, "content": text, "usage": answer["usage"]}
                    file.write(json.dumps(line).encode() + b"\n")
                    done += 1

            meter = Meter()
            await asyncio.gather(*[work() for _ in range(min(in_flight, rows))])
            return meter.read(done)


async def quantroute(base_url: str, rows: int, in_flight: int, folder: Path) -> dict[str, Any]:
    """A run as anybody would start it."""
    from quantroute import BudgetLedger, Client, Service
    from quantroute.generation import Prompt, Run, RunConfig

    os.environ["OPENROUTER_API_KEY"] = KEY
    prompts = (
        Prompt(id=str(number), dataset="bench", turns=(f"row-{number} {PROMPT}",))
        for number in range(rows)
    )
    config = RunConfig(name="bench", model=MODEL, max_output_tokens=4_096, datasets=("bench",))
    async with (
        BudgetLedger.open(folder / "run.sqlite", cap="1000") as ledger,
        Client(
            ledger=ledger, service=Service(base_url=base_url), max_in_flight=in_flight
        ) as client,
    ):
        await client.verdicts(MODEL)
        meter = Meter()
        report = await Run(client, config, prompts).execute()
        figures = meter.read(report.finished)
        await ledger.verify()
    bad = [str(count) for count in report.counts if getattr(count.row_class, "value", "") != "good"]
    if bad or report.finished != rows:
        raise SystemExit(f"{report.finished} of {rows} rows; not good: {bad}")
    return figures


class Meter:
    """Wall and CPU time from its making on."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self, rows: int) -> dict[str, Any]:
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        return {
            "rows": rows,
            "rows_per_s": rows / wall_s,
            "cpu_ms": 1e3 * cpu_s / max(1, rows),
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


CLIENTS = {"aiohttp": raw, "quantroute": quantroute}


# -- processes ------------------------------------------------------------------------------------


def pinned(core: int) -> dict[str, Any]:
    """Keywords for a sub-process on one core; none where that cannot be had."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        return {}
    return {"preexec_fn": lambda: os.sched_setaffinity(0, {cores[core]})}


@contextlib.contextmanager
def server(latency_s: float) -> Iterator[str]:
    """The base URL of a server in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("_server.py"))]
    command += ["--latency-s", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pinned(0)) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/api/v1"
        finally:
            process.kill()


def measure(client: str, loop: str, base_url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one client in a fresh process."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, __file__, "--worker", client, "--loop", loop]
        command += ["--base-url", base_url, "--folder", folder]
        command += ["--rows", str(options.rows), "--in-flight", str(options.in_flight)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=options.timeout_s,
            **pinned(-1),
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def work(options: argparse.Namespace) -> None:
    """In the sub-process: run one client and print its figures."""
    client: Coroutine[Any, Any, dict[str, Any]] = CLIENTS[options.worker](
        options.base_url, options.rows, options.in_flight, options.folder
    )
    if options.loop == "uvloop":
        import uvloop

        figures = uvloop.run(client)
    else:
        figures = asyncio.run(client)
    print(json.dumps(figures))


# -- the table ------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    """Alternate the clients and print each run, then the medians and their ratios."""
    print(f"{options.rows} rows, {options.in_flight} in flight, latency {options.latency_s} s")
    print(f"{'':24}{'rows/s':>10}{'CPU ms/row':>12}{'RSS MB':>9}{'rows/s vs aiohttp':>19}")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with server(options.latency_s) as base_url:
        for _ in range(options.rounds):
            for loop in options.loops:
                for client in CLIENTS:
                    figures = measure(client, loop, base_url, options)
                    found.setdefault((client, loop), []).append(figures)
                    show(f"{client}, {loop}", figures)
    print("medians")
    for loop in options.loops:
        base = median(found["aiohttp", loop])
        for client in CLIENTS:
            figures = median(found[client, loop])
            show(f"{client}, {loop}", figures, figures["rows_per_s"] / base["rows_per_s"])


def median(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(name: str, figures: dict[str, Any], ratio: float | None = None) -> None:
    """One line of the table."""
    line = f"{name:24}{figures['rows_per_s']:10.0f}{figures['cpu_ms']:12.3f}"
    line += f"{figures['rss_mb']:9.0f}"
    print(line + (f"{ratio:19.2f}" if ratio is not None else ""), flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=2_000)
    parser.add_argument("--latency-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one client's run")
    parser.add_argument("--folder", type=Path, default=None, help="for files; a local disk")
    parser.add_argument("--loops", nargs="+", default=["stdlib", "uvloop"])
    parser.add_argument("--quick", action="store_true", help="few rows, short latency, one round")
    parser.add_argument("--worker", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--loop", default="stdlib", help=argparse.SUPPRESS)
    parser.add_argument("--base-url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.in_flight, options.latency_s = 600, 200, 0.1
        options.rounds, options.timeout_s = 1, 10.0
    return options


if __name__ == "__main__":
    chosen = parsed()
    if chosen.worker:
        work(chosen)
    else:
        compare(chosen)
