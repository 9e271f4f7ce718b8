"""Routing by the cost of an accepted row, with the real client against the simulated service."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from local_server import LocalServer, running
from quantroute import ConfigurationError, LocalEndpoint, Sampling, Service
from quantroute.client import Client
from quantroute.domain import EndpointKey
from quantroute.generation import (
    Deadline,
    Pace,
    Progress,
    Prompt,
    RowClass,
    RowStore,
    Run,
    RunConfig,
    RunReport,
    deadline_s,
)
from quantroute.routing import LimitSettings, Mix
from quantroute.simulator import Faults, Simulator, TrafficSpec, kimi_mission_scenario

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


@pytest.mark.parametrize(
    ("fault", "row_class"),
    [
        ("length", RowClass.TRUNCATED),
        ("content_null", RowClass.REASONING_ONLY),
        ("think_tags", RowClass.LEAKED_THINKING),
        ("loop", RowClass.LOOP),
        ("reasoning_although_off", RowClass.WRONG_MODE),
        ("content_filter", RowClass.REFUSED),
        ("finish_missing", RowClass.ERROR),
        ("wrong_model", RowClass.WRONG_PROVIDER),
        ("provider_missing", RowClass.UNVERIFIED),
    ],
)
async def test_each_class_can_be_rehearsed(
    tmp_path: Path, key: str, fault: str, row_class: RowClass
) -> None:
    scenario = kimi_mission_scenario(faults=Faults(**{fault: 1.0}))
    async with (
        Simulator(scenario, seed=4) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
        ) as client,
    ):
        report = await Run(client, config(sampling=Sampling(reasoning=False)), prompts(3)).execute()
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
    assert [(item.row_class, item.rows) for item in report.counts] == [(row_class, 3)]


async def with_deadline(
    path: Path, seconds: float, *, rows: int = 150, **settings: object
) -> tuple[RunReport, Counter[str], list[Progress]]:
    """A run on two endpoints whose cheaper one takes four requests at once, about 0.06 s each."""
    scenario = kimi_mission_scenario(
        time_scale=0.02, provider_traffic={"inceptron": TrafficSpec(max_concurrent=4)}
    )
    seen: list[Progress] = []
    async with (
        Simulator(scenario, seed=4) as simulator,
        Client(
            cap_usd="5",
            ledger=path,
            service=Service(base_url=simulator.base_url),
            only=["inceptron", "moonshotai"],
            max_in_flight=32,
            limits=LimitSettings(initial=4, ceiling=32, pause_s=0.05, max_pause_s=0.2),
        ) as client,
    ):
        run = Run(
            client,
            config(),
            prompts(rows),
            elastic_limits=False,
            deadline=Deadline(after_s=seconds, rows=rows),
        )
        report = await run.execute(seen.append)
        return report, await endpoints_of(client), seen


async def test_a_loose_deadline_buys_nothing_from_dear_endpoints(tmp_path: Path, key: str) -> None:
    report, had, seen = await with_deadline(tmp_path / "run.sqlite", 600.0, rows=50)
    assert had == {"inceptron/int4": 50}
    assert not report.is_late
    assert all(item.pace is not None and item.pace.mix.is_enough for item in seen)


async def test_a_tight_deadline_uses_them(tmp_path: Path, key: str) -> None:
    _, had, _ = await with_deadline(tmp_path / "run.sqlite", 2.0)
    assert had["moonshotai/int4"] > 50


async def test_a_deadline_out_of_reach_is_told_and_the_run_goes_on(
    tmp_path: Path, key: str
) -> None:
    report, had, seen = await with_deadline(tmp_path / "run.sqlite", 0.01)
    assert report.is_late
    assert sum(had.values()) == 150
    last = seen[-1].pace
    assert last is not None
    assert not last.mix.is_enough
    assert "every endpoint in use" in str(last)


async def test_a_deadline_that_is_only_assumed_to_be_missed_is_no_warning(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    report, _, _ = await with_deadline(tmp_path / "run.sqlite", 30.0)
    assert not report.is_late
    assert "deadline cannot be met" not in caplog.text


def test_one_endpoint_is_spoken_of_as_one() -> None:
    quotas = {EndpointKey("m/x", "alpha"): 3}
    mix = Mix(quotas=quotas, rate_per_s=2.0, needed_per_s=1.0, is_enough=True)
    assert str(Pace(left_s=60.0, remaining_rows=9, mix=mix)) == (
        "deadline in 60 s, 1 endpoint needed"
    )


@pytest.mark.parametrize(("seconds", "bursts"), [(600.0, False), (1.0, True)])
async def test_the_service_is_paid_only_for_what_own_servers_cannot_do_in_time(
    tmp_path: Path, key: str, seconds: float, bursts: bool
) -> None:
    """A free server that takes four at once, 0.06 s each: some 66 answers a second, not more."""
    box = LocalServer(answer_s=0.06)
    rows = 150 if bursts else 40
    async with (
        running(box),
        Simulator(kimi_mission_scenario(time_scale=0.02), seed=4) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
            local=[
                LocalEndpoint(
                    name="box",
                    base_url=box.base_url,
                    serves=MODEL,
                    model=box.model,
                    quantization="int4",
                    max_in_flight=4,
                )
            ],
            max_in_flight=32,
        ) as client,
    ):
        await run_with(client, rows, deadline=Deadline(after_s=seconds, rows=rows))
        had = await endpoints_of(client)
        spent_pusd = client.ledger.balance().posted_pusd
        assert spent_pusd == simulator.bill.total_pusd
    own = had.pop("local/box")
    assert own == len(box.bodies) > 0
    assert box.peak_in_flight == 4  # busy to its limit in both cases: it costs nothing
    assert (had.total() > 30, spent_pusd > 0) == (bursts, bursts)


def test_a_deadline_needs_to_know_the_work(key: str) -> None:
    client = Client(cap_usd="1")
    with pytest.raises(ConfigurationError, match="rows"):
        Run(client, config(), prompts(1), deadline=Deadline(after_s=5.0))


@pytest.mark.parametrize(
    ("text", "seconds"), [("45m", 2_700.0), ("1h30m", 5_400.0), ("90s", 90.0), ("0.5h", 1_800.0)]
)
def test_deadlines_are_written_as_people_write_them(text: str, seconds: float) -> None:
    assert deadline_s(text) == seconds


@pytest.mark.parametrize("text", ["", "45", "m", "-3m", "1d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        deadline_s(text)
