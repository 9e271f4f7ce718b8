"""The main job against the simulated service, with the real client and ledger."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from quantroute import BudgetLedger, Service
from quantroute.client import Client
from quantroute.domain import Sampling
from quantroute.generation import (
    Prompt,
    RowClass,
    RowStore,
    Run,
    RunConfig,
    RunReport,
    StopReason,
    builtin_prompts,
    export_rows,
    read_rows,
)
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

CONFIG = RunConfig(
    name="demo",
    model="moonshotai/kimi-k2.5",
    max_output_tokens=2_048,
    sampling=Sampling(temperature=1.0),
    datasets=("builtin",),
)


async def start(service: Simulator, path: Path, cap_usd: str) -> tuple[RunReport, int]:
    """One start of the run; its report, and what the ledger has posted after reconciling."""
    async with Client(
        cap_usd=cap_usd, ledger=path, service=Service(base_url=service.base_url), max_in_flight=16
    ) as client:
        await client.note_baseline()
        report = await Run(client, CONFIG, islice(builtin_prompts(), 24)).execute()
        await client.reconcile(quiet_s=0)
        await client.ledger.verify()
        return report, client.ledger.balance().posted_pusd


async def test_a_cap_that_bites_half_way_and_a_second_start_give_every_row_once(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "run.sqlite"
    async with Simulator(kimi_mission_scenario(), seed=1) as service:
        first, posted_pusd = await start(service, path, "0.03")
        assert first.stop_reason is StopReason.CAP_REACHED
        assert posted_pusd == service.bill.total_pusd <= 30_000_000_000
        second, posted_pusd = await start(service, path, "5")
        assert second.stop_reason is StopReason.DONE
        assert first.finished + second.finished == 24
        assert posted_pusd == service.bill.total_pusd == second.spent_pusd
        third, _ = await start(service, path, "5")
        assert (third.resumed, third.finished) == (24, 0)


async def test_whatever_the_service_does_only_verified_whole_answers_go_out(
    tmp_path: Path, key: str
) -> None:
    odd = Faults(
        upstream_429=0.1,
        error_in_200=0.1,
        choices_null=0.1,
        length=0.1,
        reasoning_only=0.1,
        usage_null=0.1,
        wrong_provider=0.2,
    )
    path = tmp_path / "run.sqlite"
    async with Simulator(kimi_mission_scenario(faults=odd), seed=2) as service:
        report, posted_pusd = await start(service, path, "5")
        assert posted_pusd == service.bill.total_pusd
        async with Client(
            cap_usd="5", ledger=path, service=Service(base_url=service.base_url)
        ) as client:
            rows = RowStore(client.ledger.store)
            done = await export_rows(rows, run="demo", path=tmp_path / "rows.jsonl", partial=True)
    classes = {count.row_class for count in report.counts}
    assert {RowClass.GOOD, RowClass.TRUNCATED, RowClass.WRONG_PROVIDER} <= classes
    exported = list(read_rows(done.path))
    assert 0 < len(exported) == done.rows < 24
    for row in exported:
        for turn in row["turns"]:
            assert (turn["row_class"], turn["finish_reason"]) == ("good", "stop")
            assert turn["served_provider"] == turn["provider_name"]
            assert turn["provider_name"] not in ("Fireworks", "BaseTen")


async def test_costs_found_out_later_stand_in_the_rows(tmp_path: Path, key: str) -> None:
    """An answer without a cost is stored at once; its row shows the charge after reconciling."""
    scenario = kimi_mission_scenario(faults=Faults(cost_missing=1.0))
    async with (
        Simulator(scenario) as simulator,
        BudgetLedger.open(tmp_path / "run.sqlite", cap="5") as ledger,
        Client(ledger=ledger, service=Service(base_url=simulator.base_url)) as client,
    ):
        config = RunConfig(name="r", model=CONFIG.model, max_output_tokens=400, datasets=("d",))
        prompts = [Prompt(id=str(n), dataset="d", turns=(f"q{n}",)) for n in range(5)]
        await Run(client, config, prompts).execute()
        rows = RowStore(ledger.store)
        run_id = (await rows.run("r")).run_id
        before = [row.turns[0].cost_pusd async for row in rows.rows(run_id)]
        await client.reconcile(quiet_s=0.0, patience_s=2.0)
        after = [row.turns[0].cost_pusd async for row in rows.rows(run_id)]
        assert before == [None] * 5
        assert sum(cost or 0 for cost in after) == simulator.bill.total_pusd > 0


async def spent_share(path: Path, *, elastic_limits: bool) -> tuple[float, int]:
    """Share of a cap that a run spends before it stops, and the rows it finished."""
    async with (
        Simulator(kimi_mission_scenario(time_scale=0.001), seed=3) as simulator,
        BudgetLedger.open(path, cap="0.30") as ledger,
        Client(
            ledger=ledger, service=Service(base_url=simulator.base_url), max_in_flight=32
        ) as client,
    ):
        config = RunConfig(name="r", model=CONFIG.model, max_output_tokens=16_384, datasets=("d",))
        prompts = (Prompt(id=str(n), dataset="d", turns=(f"q{n}",)) for n in range(2_000))
        report = await Run(client, config, prompts, elastic_limits=elastic_limits).execute()
        assert report.stop_reason is StopReason.CAP_REACHED
        assert simulator.bill.total_pusd == ledger.balance().posted_pusd <= 3 * 10**11
        await ledger.verify()
        return ledger.balance().posted_pusd / (3 * 10**11), report.finished


async def test_elastic_limits_spend_the_cap_and_cut_no_row_for_good(
    tmp_path: Path, key: str
) -> None:
    """Limits far above the mean leave a tenth of this cap unspent; elastic ones do not."""
    fixed, rows_fixed = await spent_share(tmp_path / "fixed.sqlite", elastic_limits=False)
    elastic, rows_elastic = await spent_share(tmp_path / "elastic.sqlite", elastic_limits=True)
    assert fixed < 0.9
    assert elastic > 0.98
    assert rows_elastic > rows_fixed
    async with BudgetLedger.open(tmp_path / "elastic.sqlite") as ledger:
        rows = RowStore(ledger.store)
        run_id = (await rows.run("r")).run_id
        finished = [row async for row in rows.rows(run_id) if row.row_class is not None]
        assert {row.row_class for row in finished} == {RowClass.GOOD}
        assert min(row.turns[0].max_output_tokens for row in finished) < 2_000
