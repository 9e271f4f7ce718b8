"""`kill -9` at random moments of a run: nothing lost, nothing twice, books equal in the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.simulator import Faults, Scenario, ThreadedSimulator, kimi_mission_scenario

WORKER = textwrap.dedent(
    """
    import asyncio, sys
    from quantroute import BudgetLedger, Client, Service
    from quantroute.generation import Prompt, Run, RunConfig

    def prompts(count):
        for number in range(count):
            yield Prompt(id=str(number), dataset="d", turns=(f"question {number}?",))

    async def main(path, url, count):
        async with (
            BudgetLedger.open(path, cap="50") as ledger,
            Client(ledger=ledger, service=Service(base_url=url), max_in_flight=100) as client,
        ):
            await client.note_baseline()
            config = RunConfig(
                name="r", model="moonshotai/kimi-k2.5", max_output_tokens=400, datasets=("d",)
            )
            print("begun", flush=True)
            report = await Run(client, config, prompts(count)).execute()
            print(report.stop_reason.value, flush=True)

    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    """
)


def scenario() -> Scenario:
    """Answers take a tenth of a second or so; some come after early headers and padding."""
    return kimi_mission_scenario(
        time_scale=0.03,
        faults=Faults(padding=0.5, upstream_503=0.02, cut_content_length=0.01, cost_missing=0.01),
    )


def start(path: Path, simulator: ThreadedSimulator, rows: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), simulator.base_url, str(rows)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OPENROUTER_API_KEY": simulator.api_key},
    )


def kill_after(worker: subprocess.Popen[str], seconds: float) -> None:
    assert worker.stdout is not None
    worker.stdout.readline()
    time.sleep(seconds)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()


def stored(path: Path) -> tuple[int, int]:
    """Answers in the store, and the sum of what is posted and reserved."""
    connection = sqlite3.connect(path)
    try:
        (money,) = connection.execute(
            "SELECT posted_pusd + pending_pusd FROM accounts WHERE path = ''"
        ).fetchone()
        has_turns = connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'generation_turns'"
        )
        if has_turns.fetchone() is None:
            return 0, money
        return connection.execute("SELECT count(*) FROM generation_turns").fetchone()[0], money
    finally:
        connection.close()


async def settle(path: Path, simulator: ThreadedSimulator) -> None:
    """Reconcile, then compare with the simulator's bill to the last digit."""
    async with (
        BudgetLedger.open(path) as ledger,
        Client(
            ledger=ledger, service=Service(base_url=simulator.base_url), key=EnvKey("SIM_KEY")
        ) as client,
    ):
        done = await client.reconcile(quiet_s=0.0, patience_s=3.0)
        assert done.still_held == 0
        assert ledger.balance().posted_pusd == simulator.bill.total_pusd
        assert done.key_difference_pusd == 0
        await ledger.verify()


def run_with_kills(
    path: Path, *, kills: int, rows: int, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(11)
    with ThreadedSimulator(scenario(), seed=3) as simulator:
        monkeypatch.setenv("SIM_KEY", simulator.api_key)
        answers = 0
        for _ in range(kills):
            kill_after(start(path, simulator, rows), longest_s * rng.random())
            bill_pusd = simulator.bill.total_pusd
            now_stored, money = stored(path)
            assert now_stored >= answers  # what was stored stays stored
            assert money >= bill_pusd  # the ledger never understates
            answers = now_stored
        assert answers < rows  # the kills fell into the run, not behind it
        last = start(path, simulator, rows)
        assert last.communicate(timeout=120)[0].split() == ["begun", "done"]
        deadline_s = time.monotonic() + 20
        while simulator.stats.in_flight and time.monotonic() < deadline_s:
            time.sleep(0.05)  # requests of killed processes run on at the service
        connection = sqlite3.connect(path)
        distinct, total, finished = connection.execute(
            "SELECT count(DISTINCT key), count(*), sum(state = 'finished') FROM generation_rows"
        ).fetchone()
        connection.close()
        assert distinct == total == finished == rows
        asyncio.run(settle(path, simulator))


def test_two_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_kills(
        tmp_path / "run.sqlite", kills=2, rows=300, longest_s=0.4, monkeypatch=monkeypatch
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_during_two_thousand_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_kills(
        tmp_path / "run.sqlite", kills=20, rows=2000, longest_s=0.4, monkeypatch=monkeypatch
    )
