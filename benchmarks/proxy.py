"""What the local proxy costs: the `openai` SDK at a simulated service, directly and through it.

    pip install openai
    python benchmarks/proxy.py                 # 500 in flight, 4,000 requests each way
    python benchmarks/proxy.py --quick

Simulator and proxy are processes of their own. Printed: wall time, CPU of the SDK and the proxy per
request, and added latency; ways alternate, medians of three.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "moonshotai/kimi-k2.5"
SCENARIO = Path(__file__).parents[1] / "examples/one-endpoint.toml"


@dataclass
class Way:
    """Figures of one run."""

    wall_s: float
    sdk_cpu_s: float
    latencies_s: list[float]
    failed: int


def main() -> None:
    """Print the table; non-zero if a bill and a ledger differ or a request failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--in-flight", type=int, default=500)
    options.add_argument("--requests", type=int, default=4_000)
    options.add_argument("--quick", action="store_true")
    given = options.parse_args()
    count, in_flight = (300, 50) if given.quick else (given.requests, given.in_flight)
    with (
        tempfile.TemporaryDirectory() as folder,
        simulator(SCENARIO) as (base_url, key),
        proxy(base_url, key, folder) as (url, pid),
    ):
        direct, through = [], []
        began_cpu_s = cpu_s(pid)
        for _ in range(1 if given.quick else 3):
            direct.append(asyncio.run(ask_all(base_url, key, count, in_flight)))
            through.append(asyncio.run(ask_all(url, "unused", count, in_flight)))
        used_s = cpu_s(pid) - began_cpu_s
        show(direct, through, used_s, count, in_flight)
        check(base_url, url, direct, through, count)


def show(
    direct: list[Way], through: list[Way], proxy_cpu_s: float, count: int, in_flight: int
) -> None:
    """The table."""
    print(f"{count} requests, {in_flight} in flight, 250 ms to the first token; medians")
    print(f"{'':18}{'wall s':>10}{'SDK CPU ms/req':>18}{'p50 ms':>10}{'p99 ms':>10}")
    for name, ways in (("direct", direct), ("through the proxy", through)):
        wall = statistics.median(way.wall_s for way in ways)
        cpu = statistics.median(way.sdk_cpu_s for way in ways) / count * 1e3
        every = sorted(latency for way in ways for latency in way.latencies_s)
        p50, p99 = every[len(every) // 2] * 1e3, every[int(len(every) * 0.99)] * 1e3
        print(f"{name:18}{wall:10.2f}{cpu:18.2f}{p50:10.0f}{p99:10.0f}")
    requests = count * len(through)
    print(f"the proxy's own CPU: {proxy_cpu_s / requests * 1e3:.2f} ms per request")


def check(base_url: str, url: str, direct: list[Way], through: list[Way], count: int) -> None:
    """Everything answered; and what went through the proxy is on its ledger, to the last digit."""
    assert not any(way.failed for way in direct + through), "requests failed"
    status = fetch(url.removesuffix("/v1") + "/quantroute/status")
    assert status["endpoints"][0]["answered"] == count * len(through)
    assert float(status["pending_usd"]) == 0


async def ask_all(base_url: str, key: str, count: int, in_flight: int) -> Way:
    """All requests through the SDK."""
    import openai

    latencies: list[float] = []
    failed = 0
    left = iter(range(count))

    async def work(sdk: Any) -> None:
        nonlocal failed
        for number in left:
            began_s = time.perf_counter()
            try:
                await sdk.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"Question {number}"}],
                    max_tokens=400,
                )
            except openai.OpenAIError:
                failed += 1
            latencies.append(time.perf_counter() - began_s)

    began_s, began_cpu = time.perf_counter(), time.process_time()
    http = openai.DefaultAioHttpClient() if hasattr(openai, "DefaultAioHttpClient") else None
    with contextlib.suppress(RuntimeError):
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key=key, http_client=http, max_retries=3
        ) as sdk:
            await asyncio.gather(*(work(sdk) for _ in range(in_flight)))
    return Way(time.perf_counter() - began_s, time.process_time() - began_cpu, latencies, failed)


@contextlib.contextmanager
def simulator(scenario: Path) -> Iterator[tuple[str, str]]:
    """The service as a process: base URL and key."""
    with started("simulate", "--scenario", str(scenario)) as child:
        base_url = line_with(child, "serving").rsplit(" ", 1)[-1]
        key = line_with(child, "export").split("=")[1].split()[0]
        yield base_url, key


@contextlib.contextmanager
def proxy(base_url: str, key: str, folder: str) -> Iterator[tuple[str, int]]:
    """The proxy as a process: its URL and process id."""
    arguments = ("--cap", "100", "--ledger", f"{folder}/ledger.sqlite", "--port", "0")
    with started("serve", "--base-url", base_url, *arguments, OPENROUTER_API_KEY=key) as child:
        yield line_with(child, "serving").rsplit(" ", 1)[-1], child.pid


@contextlib.contextmanager
def started(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A `quantroute` command while the block runs; ended by an interrupt."""
    command = [sys.executable, "-m", "quantroute", *arguments]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        yield child
    finally:
        child.send_signal(2)
        child.wait(30)


def line_with(child: subprocess.Popen[str], word: str) -> str:
    """The next line of its output that begins with `word`."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(word):
            return line.strip()
    raise SystemExit("the process ended before it was ready")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fetch(url: str) -> Any:
    """JSON from a URL."""
    with urllib.request.urlopen(url) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
