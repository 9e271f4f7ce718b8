"""A run that stops because all rows are refused alike holds none of that against the rows."""

from __future__ import annotations

from pathlib import Path

from quantroute import Client, Service
from quantroute.errors import RefusedAlike
from quantroute.generation import Prompt, Run, RunConfig, RunReport, StopReason
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

CONFIG = RunConfig(name="run", model="moonshotai/kimi-k2.5", max_output_tokens=200)
PROMPTS = [Prompt(id=str(n), dataset="d", turns=(f"Question {n}?",)) for n in range(40)]


async def start(path: Path, faults: Faults) -> RunReport:
    async with (
        Simulator(kimi_mission_scenario(time_scale=0.0, faults=faults), seed=1) as service,
        Client(
            cap_usd="1", ledger=path, service=Service(base_url=service.base_url), max_in_flight=4
        ) as client,
    ):
        return await Run(client, CONFIG, PROMPTS).execute()


async def test_rows_refused_before_the_stop_are_asked_again(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.sqlite"
    first = await start(path, Faults(moderation_403=1.0))
    assert first.stop_reason is StopReason.ACCOUNT
    assert isinstance(first.error, RefusedAlike)
    assert (first.refused, first.finished) == (0, 0)
    assert first.gave_up >= 24
    second = await start(path, Faults())
    assert (second.stop_reason, second.finished, second.resumed) == (StopReason.DONE, 40, 0)


async def test_rows_refused_one_by_one_stay_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.sqlite"
    first = await start(path, Faults(moderation_403=0.3))
    assert first.stop_reason is StopReason.DONE
    assert first.refused > 0
    second = await start(path, Faults())
    assert (second.finished, second.resumed) == (0, 40)
