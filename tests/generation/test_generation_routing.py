"""Routing by the cost of an accepted row, with the real client against the simulated service."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from quantroute import Service
from quantroute.client import Client
from quantroute.generation import Prompt, RowClass, RowStore, Run, RunConfig, RunReport
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

MODEL = "moonshotai/kimi-k2.5"


def prompts(rows: int) -> list[Prompt]:
    return [Prompt(id=str(n), dataset="d", turns=(f"question {n}",)) for n in range(rows)]


async def endpoints_of(client: Client, run: str = "r") -> Counter[str]:
    rows = RowStore(client.ledger.store)
    run_id = (await rows.run(run)).run_id
    return Counter([row.turns[0].endpoint async for row in rows.rows(run_id)])


def config(**changes: object) -> RunConfig:
    settings = {"name": "r", "model": MODEL, "max_output_tokens": 1_024, "datasets": ("d",)}
    return RunConfig(**(settings | changes))  # type: ignore[arg-type]


async def run_with(client: Client, rows: int, **settings: object) -> RunReport:
    return await Run(client, config(), prompts(rows), elastic_limits=False, **settings).execute()  # type: ignore[arg-type]


async def test_the_cheapest_loses_its_traffic_when_its_rows_are_bad(
    tmp_path: Path, key: str
) -> None:
    """inceptron is 12 % cheaper than atlas-cloud; with most rows bad it is dearer per good row."""
    scenario = kimi_mission_scenario(provider_faults={"inceptron": Faults(reasoning_only=0.7)})
    async with (
        Simulator(scenario, seed=4) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
            only=["inceptron", "atlas-cloud"],
            max_in_flight=8,
        ) as client,
    ):
        report = await run_with(client, 500)
        had = await endpoints_of(client)
    assert had["inceptron/int4"] < 200
    assert had["atlas-cloud/int4"] > 300
    (alarm,) = report.alarms
    # The simulated model runs into its limit while it still reasons: that is called truncated.
    assert (alarm.endpoint, alarm.row_class) == ("inceptron/int4", RowClass.TRUNCATED)
    quality = {item.endpoint: item for item in report.endpoints}
    assert quality["inceptron/int4"].answers == had["inceptron/int4"]
    assert quality["inceptron/int4"].rate(RowClass.GOOD) < 0.5
    assert sum(item.cost_pusd for item in report.endpoints) == simulator.bill.total_pusd


async def test_equal_endpoints_leave_the_traffic_with_the_cheapest(
    tmp_path: Path, key: str
) -> None:
    async with (
        Simulator(kimi_mission_scenario(), seed=4) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
            only=["inceptron", "moonshotai"],
            max_in_flight=8,
        ) as client,
    ):
        report = await run_with(client, 300)
        assert await endpoints_of(client) == {"inceptron/int4": 300}
    assert report.alarms == ()
