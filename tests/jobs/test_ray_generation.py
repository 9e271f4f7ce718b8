"""Generation by Ray actors: a killed one costs no row, and the cap is one for all."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_support import ROOT, quantroute
from quantroute.ledger import SharedLedger
from quantroute.simulator import DEFAULT_API_KEY, ThreadedSimulator, kimi_mission_scenario
from redis_support import RedisServer

SCRIPT = ROOT / "examples/generate_on_ray.py"
ROWS, PARTS = 800, 4


@pytest.mark.ray
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_actor_costs_no_row(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs quantroute[ray]")
    monkeypatch.setenv("OPENROUTER_API_KEY", DEFAULT_API_KEY)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": f"Row {n}?"}) + "\n" for n in range(ROWS)))
    with ThreadedSimulator(kimi_mission_scenario(time_scale=0.01), seed=5) as simulator:
        command = [sys.executable, str(SCRIPT), "--parts", str(PARTS), "--actors", "2"]
        command += [str(prompts), "--out", str(out), "--cap", "50", "--ledger", redis.url]
        command += ["--base-url", simulator.base_url, "--max-output-tokens", "256"]
        command += ["--max-in-flight", "240"]
        done: dict[int, int] = {}
        workers: set[str] = set()
        killed: str | None = None
        said: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)  # Ray's own words too, which may come between two of a line
                found = re.search(r"part (\d+) of \d+: exit code (\d+), process (\d+)", line)
                if not found:
                    continue
                done[int(found[1])] = int(found[2])
                workers.add(found[3])
                if killed is None:
                    killed = found[3]
                    wait_for_spending(simulator)  # now it is in the midst of its next part
                    os.kill(int(killed), signal.SIGKILL)
        assert process.returncode == 0
        assert done == dict.fromkeys(range(PARTS), 0), "".join(said)
        assert len(workers) == 3  # two, and the one in the dead one's place

        shared = ("--ledger", redis.url)
        settled = quantroute(
            "reconcile", out, "--base-url", simulator.base_url, "--quiet-s", "0", *shared
        )
        assert settled.code == 0, settled.err
        status = json.loads(quantroute("status", out, "--json", *shared).out)
        assert {item["state"] for item in status["rows"]} == {"finished"}
        assert sum(item["rows"] for item in status["rows"]) == ROWS
        exported = quantroute("export", out, tmp_path / "rows.jsonl", "--json")
        assert exported.code == 0, exported.err  # a row in two parts is an error
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        good = sum(item["rows"] for item in status["rows"] if item["class"] == "good")
        assert len(rows) == len({row["key"] for row in rows}) == good > 0
        assert asyncio.run(posted_pusd(redis.url, out.name)) == simulator.bill.total_pusd


def wait_for_spending(simulator: ThreadedSimulator) -> None:
    enough_pusd = simulator.bill.total_pusd * 5 // 4
    deadline_s = time.monotonic() + 60
    while simulator.bill.total_pusd < enough_pusd and time.monotonic() < deadline_s:
        time.sleep(0.01)


async def posted_pusd(url: str, name: str) -> int:
    async with SharedLedger.connect(url, name=name) as ledger:
        await ledger.unresolved()  # asks the server
        return ledger.balance().posted_pusd
