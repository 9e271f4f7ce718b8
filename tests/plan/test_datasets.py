"""Several datasets in one run: targets, caps that flow, resume; on a ledger without a network."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from generation.fakes import (
    COST_PUSD,
    MODEL,
    WORST_PUSD,
    FakeClient,
    Outcome,
    echo,
    make_answer,
)
from plan_support import AT, INCEPTRON, write_prompts, write_spec
from quantroute.client import AnswerSink, ChatRequest, Completion
from quantroute.domain import Sampling
from quantroute.errors import BudgetExceeded, ConfigurationError, DatasetError, KeyRejected
from quantroute.generation import (
    DatasetRun,
    DatasetsProgress,
    DatasetsReport,
    Feed,
    RowClass,
    RowStore,
    Run,
    RunSpec,
    Shard,
    StopReason,
    load_run_spec,
    plan_run,
    probe_run,
    read_standings,
    run_datasets,
    take_census,
)
from quantroute.generation._census import known_census
from quantroute.ledger import ROOT, Account, BudgetLedger
from quantroute.money import to_usd
from quantroute.policy import BoundPolicy, ExclusionPolicy
from quantroute.pricing import TokenUsage

pytestmark = pytest.mark.timeout(20)


@dataclass
class PlanningFake(FakeClient):
    """A fake client that also knows one endpoint."""

    async def verdicts(self, model: str, *, sampling: Sampling | None = None) -> BoundPolicy:
        return ExclusionPolicy().bind([INCEPTRON], at=AT)


@asynccontextmanager
async def opened(cap_pusd: int, path: Path | None = None) -> AsyncIterator[BudgetLedger]:
    cap = to_usd(cap_pusd)
    ledger = BudgetLedger.open(path, cap=cap) if path else BudgetLedger.in_memory(cap=cap)
    async with ledger:
        yield ledger


def dataset(folder: Path, name: str, rows: int, more: str = "") -> str:
    """TOML of a dataset with prompts of its own."""
    write_prompts(folder / f"{name}.jsonl", [f"{name} {number}" for number in range(rows)])
    return (
        f'[[dataset]]\nname = "{name}"\nprompts = "{name}.jsonl"\nmax_output_tokens = 100\n{more}\n'
    )


def spec_of(folder: Path, *datasets: str, cap_pusd: int, run: str = "") -> RunSpec:
    cap = f"{to_usd(cap_pusd):f}"
    return load_run_spec(write_spec(folder, "\n".join(datasets), cap=cap, run=run))


async def stored_keys(ledger: BudgetLedger) -> Counter[str]:
    rows = RowStore(ledger.store)
    stored = await rows.run("job")
    return Counter([row.key async for row in rows.rows(stored.run_id)])


def by_name(report: DatasetsReport) -> dict[str, tuple[int, int]]:
    """Accepted rows and tokens."""
    return {item.name: (item.accepted_rows, item.accepted_tokens) for item in report.datasets}


PLENTY = 10**9


# -- targets --------------------------------------------------------------------------------------


async def test_a_token_target_stops_the_feeding_within_the_rows_under_way(tmp_path: Path) -> None:
    """Every answer has 20 tokens; 8 are in flight, 16 under way."""
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "a", 500, "target_output_tokens = 1000\nexpected_output_tokens = 20"),
        dataset(tmp_path, "b", 30),
        cap_pusd=PLENTY,
    )
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
    assert report.stop_reason is StopReason.DONE
    assert report.is_complete
    found = by_name(report)
    assert found["b"] == (30, 600)
    assert 1_000 <= found["a"][1] <= 1_040


async def test_a_wrong_expectation_is_corrected_by_what_comes(tmp_path: Path) -> None:
    """100 tokens are expected and 20 come: the feeding goes on until there are enough."""
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "a", 500, "target_output_tokens = 1000\nexpected_output_tokens = 100"),
        cap_pusd=PLENTY,
    )
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
    assert 1_000 <= by_name(report)["a"][1] <= 1_000 + 16 * 20


async def test_only_accepted_answers_count_for_a_target(tmp_path: Path) -> None:
    """Every other answer is cut; twenty rows are wanted."""

    def script(request: ChatRequest) -> Outcome:
        number = int(str(request.messages[-1]["content"]).split()[1])
        return make_answer(finish_reason="length") if number % 2 else echo(request)

    spec = spec_of(tmp_path, dataset(tmp_path, "a", 200, "target_rows = 20"), cap_pusd=PLENTY)
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger, script), spec)
        (standing,) = (await read_standings(ledger.store, "job")).values()
    rows, tokens = by_name(report)["a"]
    assert 20 <= rows <= 36
    assert tokens == rows * 20 == standing.accepted.output_tokens
    assert standing.sample.truncated > 0


async def test_a_target_that_was_reached_costs_nothing_again(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, dataset(tmp_path, "a", 100, "target_rows = 10"), cap_pusd=PLENTY)
    async with opened(PLENTY) as ledger:
        await run_datasets(PlanningFake(ledger), spec)
        again = PlanningFake(ledger)
        report = await run_datasets(again, spec)
    assert again.requests == []
    assert report.is_complete


async def test_a_raised_target_adds_what_is_missing(tmp_path: Path) -> None:
    async with opened(PLENTY) as ledger:
        for target in (10, 60):
            spec = spec_of(
                tmp_path, dataset(tmp_path, "a", 100, f"target_rows = {target}"), cap_pusd=PLENTY
            )
            report = await run_datasets(PlanningFake(ledger), spec)
            assert target <= by_name(report)["a"][0] <= target + 16
        assert set((await stored_keys(ledger)).values()) == {1}


async def test_prompts_that_run_out_before_the_target_are_told(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, dataset(tmp_path, "a", 5, "target_rows = 9"), cap_pusd=PLENTY)
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
    assert (report.stop_reason, report.is_complete) == (StopReason.DONE, False)
    assert report.plan.datasets[0].rollouts_needed == 2


# -- money ----------------------------------------------------------------------------------------


async def test_datasets_share_the_cap_and_an_own_cap_holds(tmp_path: Path) -> None:
    """What the bounded one may not use goes to the others; nobody exceeds anything."""
    own = f'cap_usd = "{to_usd(3_000):f}"'
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "bounded", 200, own),
        dataset(tmp_path, "b", 200),
        dataset(tmp_path, "c", 200),
        cap_pusd=30_000,
    )
    async with opened(30_000) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
        whole = ledger.balance()
    assert report.stop_reason is StopReason.CAP_REACHED
    spent = {item.name: item.spent_pusd for item in report.datasets}
    assert 3_000 - WORST_PUSD < spent["bounded"] <= 3_000
    # 27,000 for two, and what one leaves (less than a request may cost) goes to the others.
    assert all(abs(spent[name] - 13_500) <= 2 * WORST_PUSD for name in "bc")
    assert 30_000 - 3 * WORST_PUSD < whole.posted_pusd == sum(spent.values()) <= 30_000


async def test_money_that_a_finished_dataset_leaves_flows_to_the_others(tmp_path: Path) -> None:
    """Equal shares are 10,000; the small one needs 500, the large one 15,000."""
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "small", 5),
        dataset(tmp_path, "large", 150),
        cap_pusd=20_000,
    )
    async with opened(20_000) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
        caps = {name: ledger.balance(Account(f"job/{name}")).cap for name in ("small", "large")}
    assert report.stop_reason is StopReason.DONE
    assert by_name(report) == {"small": (5, 100), "large": (150, 3_000)}
    assert caps["small"] == 500
    assert report.run.spent_pusd == 155 * COST_PUSD


async def test_rows_that_did_not_fit_are_bought_once_another_dataset_leaves_money(
    tmp_path: Path,
) -> None:
    """The large one reaches its half of the cap while the small one is still being answered."""
    turns = [{"turns": [f"first {number}", f"second {number}"]} for number in range(75)]
    (tmp_path / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    large = '[[dataset]]\nname = "large"\nprompts = "large.jsonl"\nmax_output_tokens = 100'
    spec = spec_of(tmp_path, dataset(tmp_path, "small", 5), large, cap_pusd=20_000)
    is_short = asyncio.Event()

    @dataclass
    class Waiting(PlanningFake):
        async def complete(
            self, request: ChatRequest, *, sink: AnswerSink | None = None
        ) -> Completion:
            if request.account == "job/small":
                await is_short.wait()
            try:
                return await super().complete(request, sink=sink)
            except BudgetExceeded:
                is_short.set()
                raise

    async with opened(20_000) as ledger:
        client = Waiting(ledger)
        report = await run_datasets(client, spec)
    assert is_short.is_set()
    assert report.is_complete
    assert by_name(report) == {"small": (5, 100), "large": (75, 3_000)}
    # No turn was bought twice, although rows were given back between their turns.
    assert len(client.requests) == 155
    assert report.run.skipped == 0


async def test_a_dataset_that_waits_for_money_leaves_the_slots_to_the_others(
    tmp_path: Path,
) -> None:
    """The first can hold two requests at once and would line up all its rows."""
    own = f'cap_usd = "{2 * WORST_PUSD}e-12"'
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "poor", 300, own),
        dataset(tmp_path, "rich", 100),
        cap_pusd=1_000_000,
    )
    peak = 0

    def watch(progress: DatasetsProgress) -> None:
        nonlocal peak
        poor, rich = progress.datasets
        peak = max(peak, rich.live)
        assert rich.is_over or poor.live <= 8  # half of the sixteen rows under way

    async with opened(1_000_000) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec, watch)
    assert by_name(report)["rich"] == (100, 2_000)
    assert peak >= 6
    assert report.datasets[0].spent_pusd <= 2 * WORST_PUSD


async def test_a_higher_cap_goes_on_where_the_lower_one_stopped(tmp_path: Path) -> None:
    sets = (dataset(tmp_path, "a", 60), dataset(tmp_path, "b", 60, "rollouts = 2"))
    path = tmp_path / "run.sqlite"
    for cap_pusd in (6_000, PLENTY):
        spec = spec_of(tmp_path, *sets, cap_pusd=cap_pusd)
        async with opened(cap_pusd, path) as ledger:
            report = await run_datasets(PlanningFake(ledger), spec)
            await ledger.verify()
            keys = await stored_keys(ledger)
            assert set(keys.values()) == {1}
    assert report.stop_reason is StopReason.DONE
    assert len(keys) == 180
    assert report.run.spent_pusd == 180 * COST_PUSD


# -- stopping and resuming ------------------------------------------------------------------------


async def test_a_stop_drains_every_dataset_and_the_next_start_finishes(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, dataset(tmp_path, "a", 80), dataset(tmp_path, "b", 80), cap_pusd=PLENTY
    )
    async with opened(PLENTY) as ledger:
        client = PlanningFake(ledger)
        job = await DatasetRun.prepare(client, spec)

        def stop_early(progress: DatasetsProgress) -> None:
            if progress.run.finished >= 30:
                job.request_stop()

        first = await job.execute(stop_early)
        assert first.stop_reason is StopReason.INTERRUPTED
        assert 30 <= first.run.finished < 160
        second = await run_datasets(PlanningFake(ledger), spec)
        assert second.is_complete
        assert len(await stored_keys(ledger)) == 160
        assert second.run.spent_pusd == 160 * COST_PUSD


@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_at_any_moment_every_row_is_bought_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "a", 40, "target_rows = 40"),
        dataset(tmp_path, "b", 40),
        cap_pusd=PLENTY,
    )
    async with opened(PLENTY, tmp_path / "run.sqlite") as ledger:
        for _ in range(6):
            task = asyncio.ensure_future(run_datasets(PlanningFake(ledger), spec))
            for _ in range(rng.randrange(400)):
                if task.done():
                    break
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        report = await run_datasets(PlanningFake(ledger), spec)
        keys = await stored_keys(ledger)
    assert report.stop_reason is StopReason.DONE
    assert (len(keys), set(keys.values())) == (80, {1})


async def test_a_rejected_key_stops_all_datasets(tmp_path: Path) -> None:
    def script(request: ChatRequest) -> Outcome:
        if request.messages[-1]["content"] == "a 5":
            return KeyRejected(problem="no", status=401)
        return echo(request)

    spec = spec_of(
        tmp_path, dataset(tmp_path, "a", 300), dataset(tmp_path, "b", 300), cap_pusd=PLENTY
    )
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger, script), spec)
    assert report.stop_reason is StopReason.KEY_REJECTED
    assert report.run.finished < 100


async def test_other_settings_of_one_dataset_are_refused(tmp_path: Path) -> None:
    async with opened(PLENTY) as ledger:
        spec = spec_of(tmp_path, dataset(tmp_path, "a", 3), cap_pusd=PLENTY)
        await run_datasets(PlanningFake(ledger), spec)
        more = dataset(tmp_path, "a", 3, "rollouts = 2"), dataset(tmp_path, "b", 3)
        report = await run_datasets(PlanningFake(ledger), spec_of(tmp_path, *more, cap_pusd=PLENTY))
        assert report.run.finished == 6
        other = dataset(tmp_path, "a", 3, "sampling = { top_p = 0.5 }\nrollouts = 2"), more[1]
        with pytest.raises(ConfigurationError, match="sampling of a was"):
            await run_datasets(PlanningFake(ledger), spec_of(tmp_path, *other, cap_pusd=PLENTY))


async def test_the_order_of_datasets_is_no_setting(tmp_path: Path) -> None:
    """The first one's limit is nobody else's: another before it, or another order, adds rows."""
    a = dataset(tmp_path, "a", 3)
    b = dataset(tmp_path, "b", 3).replace("= 100", "= 60")
    async with opened(PLENTY) as ledger:
        for datasets, finished in (([a], 3), ([b, a], 3), ([a, b], 0)):
            spec = spec_of(tmp_path, *datasets, cap_pusd=PLENTY)
            report = await run_datasets(PlanningFake(ledger), spec)
            assert report.run.finished == finished
        other = spec_of(tmp_path, b.replace("= 60", "= 61"), a, cap_pusd=PLENTY)
        with pytest.raises(ConfigurationError, match="max_output_tokens of b was 60"):
            await run_datasets(PlanningFake(ledger), other)


async def test_rollouts_with_a_seed_would_buy_one_answer_again(tmp_path: Path) -> None:
    same = dataset(tmp_path, "a", 3, "rollouts = 2\nsampling = { seed = 7 }")
    with pytest.raises(ConfigurationError, match=r"(?s)dataset.*2 rollouts with one seed"):
        spec_of(tmp_path, same, cap_pusd=PLENTY)


async def test_what_no_dataset_can_use_alone_is_one_sum_in_the_end(tmp_path: Path) -> None:
    """Each of three shares ends with less than a request's worst case."""
    names = ("a", "b", "c")
    cap_pusd = 3 * (10 * COST_PUSD + WORST_PUSD - 1)
    spec = spec_of(tmp_path, *(dataset(tmp_path, name, 60) for name in names), cap_pusd=cap_pusd)
    async with opened(cap_pusd) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
        left_pusd = cap_pusd - ledger.balance().posted_pusd
    assert report.stop_reason is StopReason.CAP_REACHED
    assert left_pusd < WORST_PUSD
    assert sum(item.cap_pusd for item in report.datasets) <= cap_pusd


async def test_a_dataset_has_all_though_another_ran_out_of_money(tmp_path: Path) -> None:
    small = f'cap_usd = "{to_usd(20 * COST_PUSD):f}"'
    spec = spec_of(
        tmp_path, dataset(tmp_path, "a", 5), dataset(tmp_path, "b", 50, small), cap_pusd=PLENTY
    )
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
    assert report.stop_reason is StopReason.CAP_REACHED
    assert [item.is_reached for item in report.datasets] == [True, False]


async def test_a_deadline_knows_what_a_shard_and_a_redo_have_to_do(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, dataset(tmp_path, "a", 90), cap_pusd=PLENTY, run='deadline = "10m"')
    async with opened(PLENTY) as ledger:
        part = await DatasetRun.prepare(PlanningFake(ledger), spec, shard=Shard(1, 3))
        assert [feed.remaining_rows for feed in part._feeds] == [30]
        cut = PlanningFake(ledger, lambda _: make_answer(finish_reason="length"))
        await Run(cut, spec.config(), feeds=[Feed(prompts=spec.datasets[0].read())]).execute()
        again = await DatasetRun.prepare(
            PlanningFake(ledger), spec, redo=frozenset({RowClass.TRUNCATED})
        )
        assert [feed.remaining_rows for feed in again._feeds] == [90]


async def test_a_redo_takes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    """Beside a reached target, and beside rows that no money was left for."""

    def script(request: ChatRequest) -> Outcome:
        number = int(str(request.messages[-1]["content"]).split()[1])
        is_cut = number % 2 and request.max_output_tokens == 100
        return make_answer(finish_reason="length") if is_cut else echo(request)

    many = dataset(tmp_path, "a", 200, "target_rows = 10"), dataset(tmp_path, "b", 200)
    redo = frozenset({RowClass.TRUNCATED})
    cap_pusd = 20_000
    async with opened(cap_pusd) as ledger:
        first = await run_datasets(
            PlanningFake(ledger, script), spec_of(tmp_path, *many, cap_pusd=cap_pusd)
        )
        cut = sum(item.rows for item in first.run.counts if item.row_class in redo)
        assert first.stop_reason is StopReason.CAP_REACHED
        await ledger.set_cap(ROOT, to_usd(PLENTY))
        client = PlanningFake(ledger, script)
        raised = [text.replace("= 100", "= 200") for text in many]
        spec = spec_of(tmp_path, *raised, cap_pusd=PLENTY)
        again = await (await DatasetRun.prepare(client, spec, redo=redo)).execute()
        assert len(client.requests) == again.run.finished == cut > 20
        assert not [item for item in again.run.counts if item.row_class in redo]
        assert again.run.not_begun > 0
        assert [item.is_reached for item in again.datasets] == [True, False]
        whole = await run_datasets(PlanningFake(ledger, script), spec)
        assert whole.is_complete  # what the redo passed over is not taken for done
        assert by_name(whole)["b"][0] == 200


async def test_datasets_are_asked_in_their_own_way(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "a", 2, "sampling = { temperature = 0.5 }"),
        dataset(tmp_path, "b", 2, "rollouts = 3"),
        cap_pusd=PLENTY,
        run="[sampling]\ntemperature = 1.0",
    )
    async with opened(PLENTY) as ledger:
        client = PlanningFake(ledger)
        await run_datasets(client, spec)
    asked = Counter((request.account, request.sampling.temperature) for request in client.requests)
    assert asked == {("job/a", 0.5): 2, ("job/b", 1.0): 6}


# -- counting and probing -------------------------------------------------------------------------


def test_duplicates_within_and_across_datasets_are_counted(tmp_path: Path) -> None:
    write_prompts(tmp_path / "x.jsonl", ["one", "two", "two", "three"])
    write_prompts(tmp_path / "y.jsonl", ["three", "four", "one"])
    lines = (
        '[[dataset]]\nname = "{0}"\nprompts = "{0}.jsonl"\nmax_output_tokens = 9\nrollouts = {1}'
    )
    spec = spec_of(tmp_path, lines.format("x", 2), lines.format("y", 3), cap_pusd=PLENTY)
    x, y = take_census(spec.datasets, spec.config())
    assert (x.prompts, x.duplicates_within, x.duplicates_across, x.rows) == (4, 1, 0, 6)
    # "three" and "one" have two rollouts in x already: the third is y's own.
    assert (y.prompts, y.duplicates_within, y.duplicates_across, y.rows) == (3, 0, 2, 5)
    assert x.input_bytes == 2 * len("onetwothree")


async def test_prompts_are_counted_once_for_all_starts(tmp_path: Path) -> None:
    """What a start counted holds as long as files and settings are the same."""
    write_prompts(tmp_path / "x.jsonl", ["one", "two", "two"])
    line = '[[dataset]]\nname = "x"\nprompts = "x.jsonl"\nmax_output_tokens = 9\nrollouts = {}'
    spec = spec_of(tmp_path, line.format(1), cap_pusd=PLENTY)
    counted = take_census(spec.datasets, spec.config())
    async with opened(PLENTY) as ledger:
        rows = RowStore(ledger.store)
        await rows.prepare()
        assert await known_census(rows, spec.datasets, spec.config()) is None
        await run_datasets(PlanningFake(ledger), spec)
        assert await known_census(rows, spec.datasets, spec.config()) == counted
        more = spec_of(tmp_path, line.format(2), cap_pusd=PLENTY)
        assert await known_census(rows, more.datasets, more.config()) is None
        write_prompts(tmp_path / "x.jsonl", ["one", "two", "six"])
        assert await known_census(rows, spec.datasets, spec.config()) is None


def test_the_same_prompt_with_other_sampling_is_no_duplicate(tmp_path: Path) -> None:
    write_prompts(tmp_path / "x.jsonl", ["one"])
    lines = '[[dataset]]\nname = "{}"\nprompts = "x.jsonl"\nmax_output_tokens = 9\n{}'
    other = lines.format("y", "sampling = { seed = 1 }")
    spec = spec_of(tmp_path, lines.format("x", ""), other, cap_pusd=PLENTY)
    assert [count.duplicates_across for count in take_census(spec.datasets, spec.config())] == [
        0,
        0,
    ]


async def test_rows_that_two_datasets_share_are_bought_once(tmp_path: Path) -> None:
    write_prompts(tmp_path / "x.jsonl", [f"question {number}" for number in range(40)])
    lines = '[[dataset]]\nname = "{}"\nprompts = "x.jsonl"\nmax_output_tokens = 9'
    spec = spec_of(tmp_path, lines.format("x"), lines.format("y"), cap_pusd=PLENTY)
    async with opened(PLENTY) as ledger:
        report = await run_datasets(PlanningFake(ledger), spec)
        keys = await stored_keys(ledger)
    assert (len(keys), report.run.duplicates) == (40, 40)
    assert report.run.spent_pusd == 40 * COST_PUSD


def test_every_unusable_line_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "good"}\n{"prompt": 1}\nnot json\n')
    (tmp_path / "y.jsonl").write_text('{"prompt": ""}\n')
    lines = '[[dataset]]\nname = "{0}"\nprompts = "{0}.jsonl"\nmax_output_tokens = 9'
    spec = spec_of(tmp_path, lines.format("x"), lines.format("y"), cap_pusd=PLENTY)
    with pytest.raises(DatasetError, match=r"x.jsonl:2: .*\(2 more problems like this\)"):
        take_census(spec.datasets, spec.config())


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    line = '[[dataset]]\nname = "x"\nprompts = "x.jsonl"\nmax_output_tokens = 9'
    spec = spec_of(tmp_path, line, cap_pusd=PLENTY)
    with pytest.raises(DatasetError, match="no prompt"):
        take_census(spec.datasets, spec.config())


async def test_a_probe_is_spread_measured_and_never_paid_twice(tmp_path: Path) -> None:
    """Ten rows each of two datasets with answers of 60 tokens, a third of them reasoning."""

    def script(request: ChatRequest) -> Outcome:
        usage = TokenUsage(input_tokens=7, output_tokens=60, reasoning_tokens=20)
        return make_answer("Fine.", reasoning="Hm.", usage=usage, total_s=3.0)

    spec = spec_of(
        tmp_path,
        dataset(tmp_path, "a", 100, "target_output_tokens = 3000\nrollouts = 2"),
        dataset(tmp_path, "b", 50),
        cap_pusd=PLENTY,
    )
    async with opened(PLENTY) as ledger:
        client = PlanningFake(ledger, script)
        before = await plan_run(client, spec)
        assert [item.expectation.answers for item in before.datasets] == [0, 0]
        report = await probe_run(client, spec, rows=20)
        assert report.finished == 20
        questions = {str(request.messages[-1]["content"]) for request in client.requests}
        assert {"a 0", "a 50", "a 90", "b 0", "b 25", "b 45"} <= questions
        after = await plan_run(client, spec)
        await probe_run(client, spec, rows=20)
        assert len(client.requests) == 20
        final = await run_datasets(client, spec)
        assert len(client.requests) == len(await stored_keys(ledger))
    item = after.datasets[0]
    assert (item.expectation.answers, item.expectation.output_tokens) == (10, 60.0)
    assert item.expectation.reasoning_share == pytest.approx(1 / 3)
    assert item.expectation.answer_s == pytest.approx(3.0)
    assert (item.accepted.output_tokens, item.ended_rows, item.needed_rows) == (600, 10, 40)
    assert item.input_tokens == 40 * 7
    assert final.is_complete
    assert 3_000 <= by_name(final)["a"][1] <= 3_000 + 16 * 60


async def test_planning_sends_nothing_and_a_probe_needs_a_row(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, dataset(tmp_path, "a", 5), cap_pusd=PLENTY)
    async with opened(PLENTY) as ledger:
        client = PlanningFake(ledger)
        plan = await plan_run(client, spec)
        assert (plan.model, client.requests) == (MODEL, [])
        with pytest.raises(ConfigurationError):
            await probe_run(client, spec, rows=0)
