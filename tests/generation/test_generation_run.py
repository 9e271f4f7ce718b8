"""A run: every row once, whatever happens; stopped cleanly, resumed exactly."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from generation.fakes import (
    COST_PUSD,
    WORST_PUSD,
    FakeClient,
    Outcome,
    Script,
    echo,
    make_answer,
    make_config,
    make_prompts,
)
from quantroute.client import ChatRequest, GaveUp, RowRefused
from quantroute.domain import Sampling
from quantroute.errors import (
    ConfigurationError,
    CreditsExhausted,
    DatasetError,
    JournalError,
    KeyRejected,
    NoEligibleEndpoint,
)
from quantroute.generation import (
    Progress,
    Prompt,
    RowClass,
    RowState,
    RowStore,
    Run,
    RunReport,
    StopReason,
    StoredRow,
    read_prompts,
)
from quantroute.ledger import ROOT, Account, BudgetLedger
from quantroute.money import NO_CAP, to_usd
from quantroute.pricing import TokenUsage
from sqlite_support import database

LENGTH = "length"


@asynccontextmanager
async def opened(path: Path | None = None, cap: object = "1") -> AsyncIterator[BudgetLedger]:
    ledger = BudgetLedger.open(path, cap=cap) if path else BudgetLedger.in_memory(cap=cap)
    async with ledger:
        yield ledger


async def stored_rows(ledger: BudgetLedger, run: str = "run") -> list[StoredRow]:
    rows = RowStore(ledger.store)
    stored = await rows.run(run)
    return [row async for row in rows.rows(stored.run_id)]


async def execute(
    ledger: BudgetLedger, prompts: list[Prompt], script: Script = echo, **config: object
) -> RunReport:
    return await Run(FakeClient(ledger, script), make_config(**config), prompts).execute()


def fail_at(marker: str, outcome: Outcome) -> Script:
    """Echoes, except for the question with `marker`."""

    def script(request: ChatRequest) -> Outcome:
        return outcome if marker in request.messages[-1]["content"] else echo(request)

    return script


# -- rows -----------------------------------------------------------------------------------------


async def test_every_prompt_and_rollout_becomes_one_row_with_its_provenance() -> None:
    async with opened() as ledger:
        report = await execute(ledger, make_prompts(5), rollouts=2)
        rows = await stored_rows(ledger)
    assert (report.stop_reason, report.finished, report.is_complete) == (StopReason.DONE, 10, True)
    assert report.spent_pusd == 10 * COST_PUSD
    assert Counter((row.prompt.id, row.rollout) for row in rows) == Counter(
        (f"p{i}", rollout) for i in range(5) for rollout in range(2)
    )
    turn = rows[0].turns[0]
    assert turn.endpoint == "moonshotai/int4"
    assert (turn.input_usd_per_token, turn.output_usd_per_token) == ("0.0000006", "0.0000025")
    assert turn.precision["native"] == "int4"
    assert (turn.cost_pusd, turn.generation_id, turn.mode) == (COST_PUSD, "gen-1", "default")


async def test_each_turn_is_asked_on_the_models_own_earlier_answers() -> None:
    client_requests: list[ChatRequest] = []

    def script(request: ChatRequest) -> Outcome:
        client_requests.append(request)
        return make_answer(f" own {len(request.messages)}", reasoning="hidden thoughts")

    prompt = Prompt(id="1", dataset="set", system="Be brief.", turns=("a", "b", "c"))
    async with opened() as ledger:
        await execute(ledger, [prompt], script)
    last = client_requests[-1]
    assert list(last.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " own 2"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": " own 4"},
        {"role": "user", "content": "c"},
    ]
    assert last.account == "run/set"


async def test_reasoning_is_replayed_only_when_asked_and_makes_other_rows() -> None:
    seen: list[ChatRequest] = []

    def script(request: ChatRequest) -> Outcome:
        seen.append(request)
        return make_answer("A", reasoning="thoughts")

    (prompt,) = make_prompts(1, turns=2)
    async with opened() as ledger:
        await execute(ledger, [prompt], script, replay_reasoning=True)
    assert seen[-1].messages[1] == {"role": "assistant", "content": "A", "reasoning": "thoughts"}
    plain, replayed = make_config(), make_config(replay_reasoning=True)
    assert plain.row_key(prompt, 0) != replayed.row_key(prompt, 0)


async def test_equal_prompts_are_one_row() -> None:
    async with opened() as ledger:
        report = await execute(ledger, make_prompts(3) + make_prompts(3, dataset="other"))
        rows = await stored_rows(ledger)
    assert (report.finished, report.duplicates, len(rows)) == (3, 3, 3)


async def test_a_conversation_ends_at_an_answer_it_should_not_go_on_from() -> None:
    """Later turns would be paid for and never exported."""
    script = fail_at("question 1.0", make_answer("cut", finish_reason=LENGTH))
    async with opened() as ledger:
        report = await execute(ledger, make_prompts(2, turns=3), script)
        rows = {row.prompt.id: row for row in await stored_rows(ledger)}
    assert (report.finished, report.truncation_rates) == (2, {"set": 0.5})
    assert (rows["p1"].row_class, len(rows["p1"].turns)) == (RowClass.TRUNCATED, 1)
    assert (rows["p0"].row_class, len(rows["p0"].turns)) == (RowClass.GOOD, 3)


async def test_a_conversation_can_be_told_to_go_on() -> None:
    script = fail_at("question 0.0", make_answer("cut", finish_reason=LENGTH))
    classes = frozenset({RowClass.GOOD, RowClass.TRUNCATED})
    async with opened() as ledger:
        await execute(ledger, make_prompts(1, turns=2), script, continue_after=classes)
        (row,) = await stored_rows(ledger)
    assert (row.row_class, len(row.turns), row.is_whole) == (RowClass.TRUNCATED, 2, True)


async def test_large_and_odd_texts_are_stored_whole(tmp_path: Path) -> None:
    texts = ["x" * 6_000_000, "a\u2028b\u2029c\x85d\x00e\U0001f600", "lone \ud800 surrogate"]
    prompts = make_prompts(len(texts))

    def script(request: ChatRequest) -> Outcome:
        number = int(request.messages[-1]["content"].removeprefix("question ").split(".")[0])
        return make_answer(texts[number], reasoning=texts[number])

    async with opened(tmp_path / "l.sqlite") as ledger:
        await execute(ledger, prompts, script)
        rows = {row.prompt.id: row for row in await stored_rows(ledger)}
    for number, text in enumerate(texts):
        (turn,) = rows[f"p{number}"].turns
        assert (turn.content, turn.reasoning) == (text, text)


# -- failures of rows -----------------------------------------------------------------------------


async def test_one_rows_failure_is_its_own() -> None:
    script = fail_at("question 2", RowRefused(status=400, problem="too long", attempts=1))
    async with opened() as ledger:
        report = await execute(ledger, make_prompts(5), script)
        rows = {row.prompt.id: row for row in await stored_rows(ledger)}
    assert (report.stop_reason, report.finished, report.refused) == (StopReason.DONE, 4, 1)
    assert (rows["p2"].state, rows["p2"].problem) == (RowState.REFUSED, "too long")


async def test_refused_rows_are_asked_again_only_on_request_and_given_up_ones_always() -> None:
    prompts = make_prompts(3)

    def script(request: ChatRequest) -> Outcome:
        text = request.messages[-1]["content"]
        if text.startswith("question 0"):
            return RowRefused(status=400, problem="no", attempts=1)
        return (
            GaveUp(problem="down", attempts=8) if text.startswith("question 1") else echo(request)
        )

    async with opened() as ledger:
        first = await execute(ledger, prompts, script)
        assert (first.refused, first.gave_up, first.is_complete) == (1, 1, False)
        second = await execute(ledger, prompts)
        assert (second.finished, second.resumed, second.is_complete) == (1, 2, True)
        run = Run(FakeClient(ledger), make_config(), prompts, retry_refused=True)
        third = await run.execute()
        assert (third.finished, third.resumed) == (1, 2)
        assert {row.state for row in await stored_rows(ledger)} == {RowState.FINISHED}


# -- resuming -------------------------------------------------------------------------------------


async def test_a_plain_rerun_buys_nothing() -> None:
    async with opened() as ledger:
        await execute(ledger, make_prompts(4, turns=2))
        client = FakeClient(ledger)
        report = await Run(client, make_config(), make_prompts(4, turns=2)).execute()
    assert (report.resumed, report.finished, report.strays, client.requests) == (4, 0, 0, [])


async def test_a_conversation_resumes_at_its_first_missing_turn() -> None:
    prompts = make_prompts(3, turns=3)
    async with opened() as ledger:
        down = fail_at("question 1.1", GaveUp(problem="down", attempts=8))
        first = await execute(ledger, prompts, down)
        assert (first.finished, first.gave_up) == (2, 1)
        client = FakeClient(ledger)
        second = await Run(client, make_config(), prompts).execute()
        asked = [request.messages[-1]["content"] for request in client.requests]
        rows = await stored_rows(ledger)
    assert asked == ["question 1.1", "question 1.2"]
    assert client.requests[0].messages[1]["content"] == " re: question 1.0"
    assert (second.finished, second.resumed) == (1, 2)
    assert all(row.is_whole and len(row.turns) == 3 for row in rows)


async def test_rows_that_no_prompt_asks_for_any_more_are_reported() -> None:
    async with opened() as ledger:
        await execute(ledger, make_prompts(5))
        report = await execute(ledger, make_prompts(3))
    assert (report.resumed, report.strays) == (3, 2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sampling": Sampling(temperature=1.0)}, "temperature"),
        ({"model": "other/model"}, "model"),
        ({"policy_class": "fp8-allowed"}, "policy_class"),
        ({"max_output_tokens": 512}, "max_output_tokens"),
        ({"replay_reasoning": True}, "replay_reasoning"),
    ],
)
async def test_other_settings_under_the_same_name_are_refused(
    change: dict[str, object], name: str
) -> None:
    async with opened() as ledger:
        await execute(ledger, make_prompts(1))
        with pytest.raises(ConfigurationError, match=f"{name}.*new run name"):
            await execute(ledger, make_prompts(1), **change)
        again = await execute(ledger, make_prompts(1), name="run-2", **change)
    assert again.finished == 1


async def test_more_rollouts_and_datasets_only_add_rows() -> None:
    async with opened() as ledger:
        await execute(ledger, make_prompts(2), datasets=("set",))
        more = await execute(ledger, make_prompts(2), datasets=("set", "b"), rollouts=3)
        assert (more.resumed, more.finished) == (2, 4)
        with pytest.raises(ConfigurationError, match="rollouts was 3 and is 1"):
            await execute(ledger, make_prompts(2), datasets=("set", "b"), rollouts=1)


async def test_only_truncated_rows_are_redone_and_nothing_is_destroyed() -> None:
    prompts = make_prompts(3, turns=2)
    script = fail_at("question 1.1", make_answer("cut", finish_reason=LENGTH))
    redo = frozenset({RowClass.TRUNCATED})
    async with opened() as ledger:
        await execute(ledger, prompts, script)
        client = FakeClient(ledger)
        config = make_config(max_output_tokens=512)
        report = await Run(client, config, prompts, redo=redo).execute()
        rows = {row.prompt.id: row for row in await stored_rows(ledger)}
        kept = ledger.store.read(
            lambda c: c.execute("SELECT count(*) FROM generation_turns").fetchone()
        )
    assert [request.messages[-1]["content"] for request in client.requests] == ["question 1.1"]
    assert (report.resumed, report.finished) == (2, 1)
    assert [turn.max_output_tokens for turn in rows["p1"].turns] == [256, 512]
    assert [turn.revision for turn in rows["p1"].turns] == [0, 1]
    assert rows["p1"].row_class is RowClass.GOOD
    assert kept == (7,)


@pytest.mark.parametrize(("limit", "told"), [(256, 1), (512, 0)])
async def test_redoing_cut_rows_with_the_limit_that_cut_them_is_told_once(
    limit: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(3)
    async with opened() as ledger:
        await execute(ledger, prompts, lambda _: make_answer("cut", finish_reason=LENGTH))
        config = make_config(max_output_tokens=limit)
        redo = frozenset({RowClass.TRUNCATED})
        report = await Run(FakeClient(ledger), config, prompts, redo=redo).execute()
    assert report.finished == 3
    assert caplog.text.count("cut answers get no more room") == told


async def test_redoing_an_early_turn_makes_the_later_ones_out_of_date() -> None:
    prompts = make_prompts(1, turns=3)
    classes = frozenset({RowClass.GOOD, RowClass.TRUNCATED})
    cut = fail_at("question 0.1", make_answer("cut", finish_reason=LENGTH))
    again = fail_at("question 0.2", GaveUp(problem="down", attempts=8))
    async with opened() as ledger:
        await execute(ledger, prompts, cut, continue_after=classes)
        run = Run(
            FakeClient(ledger, again),
            make_config(continue_after=classes),
            prompts,
            redo=frozenset({RowClass.TRUNCATED}),
        )
        await run.execute()
        (halfway,) = await stored_rows(ledger)
        await execute(ledger, prompts, continue_after=classes)
        (row,) = await stored_rows(ledger)
    assert len(halfway.turns) == 2  # the old third answer was to the old second one
    assert [turn.content for turn in row.turns] == [f" re: question 0.{i}" for i in range(3)]
    assert [turn.revision for turn in row.turns] == [0, 1, 1]


async def test_a_second_process_on_the_same_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    gate = asyncio.Event()
    async with opened(path) as one, opened(path, cap=None) as two:
        client = FakeClient(one, gate=gate)
        running = asyncio.create_task(Run(client, make_config(), make_prompts(1)).execute())
        await client.are_in_flight(1)
        with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
            await execute(two, make_prompts(1))
        other = await execute(two, make_prompts(1), name="another")
        gate.set()
        assert ((await running).finished, other.finished) == (1, 1)


async def test_a_store_of_a_newer_version_is_refused() -> None:
    async with opened() as ledger:
        await RowStore(ledger.store).prepare()
        await ledger.store.submit(
            lambda c: c.execute("UPDATE generation_meta SET value = '99'").close()
        )
        with pytest.raises(JournalError, match="newer quantroute"):
            await execute(ledger, make_prompts(1))


# -- stopping -------------------------------------------------------------------------------------


async def test_the_cap_stops_the_run_and_raising_it_finishes_it(tmp_path: Path) -> None:
    path, prompts = tmp_path / "l.sqlite", make_prompts(40, turns=2)
    async with opened(path, cap="0.000000005") as ledger:  # 5,000 pUSD: some 40 of 80 answers
        report = await execute(ledger, prompts)
        assert report.stop_reason is StopReason.CAP_REACHED
        assert 4_000 < report.spent_pusd <= 5_000
        assert ledger.balance().pending_pusd == 0
    async with opened(path, cap="1") as ledger:
        again = await execute(ledger, prompts)
        rows = await stored_rows(ledger)
        balance = ledger.balance()
        await ledger.verify()
    assert again.stop_reason is StopReason.DONE
    assert len({row.key for row in rows}) == len(rows) == 40
    assert all(row.is_whole for row in rows)
    assert balance.posted_pusd == 80 * COST_PUSD  # nothing was bought twice


async def test_a_resumed_run_knows_the_lengths_of_its_answers() -> None:
    """With full limits first, what a resumed run has left might not cover a single one."""
    async with opened() as ledger:
        await execute(ledger, make_prompts(70))
        await ledger.set_cap(ROOT, "0.0000001")
        client = FakeClient(ledger)
        await Run(client, make_config(), make_prompts(71)).execute()
    assert [request.max_output_tokens for request in client.requests] == [21]  # 1.05 x 20


async def test_an_answer_that_a_learnt_limit_has_cut_is_not_asked_with_it_again() -> None:
    """The first start ends between the cut answer and the next try, with money still short."""
    asked: list[int] = []

    def script(request: ChatRequest) -> Outcome:
        is_long = request.messages[-1]["content"] == "question 100.0"
        if not is_long:
            return echo(request)
        asked.append(request.max_output_tokens)
        if len(asked) == 2:
            return KeyRejected(problem="unknown key", status=401)
        usage = TokenUsage(input_tokens=10, output_tokens=request.max_output_tokens)
        return make_answer(finish_reason="length", usage=usage)

    prompts = make_prompts(101)
    async with BudgetLedger.in_memory(cap=to_usd(101 * COST_PUSD + 4 * WORST_PUSD)) as ledger:
        for _ in range(2):
            await Run(FakeClient(ledger, script), make_config(), prompts).execute()
    cut, refused, again = asked[:3]
    assert cut < refused == again < make_config().max_output_tokens


async def test_a_reached_cap_ends_the_reading_of_prompts() -> None:
    async with opened(cap="0.000000002") as ledger:
        report = await execute(ledger, make_prompts(500))
    assert report.stop_reason is StopReason.CAP_REACHED
    assert report.strays is None
    assert report.finished + report.skipped < 60


async def test_a_datasets_own_cap_ends_only_that_dataset() -> None:
    prompts = make_prompts(20, dataset="small")
    prompts += [Prompt(id=f"q{i}", dataset="large", turns=(f"other {i}",)) for i in range(20)]
    async with opened() as ledger:
        await ledger.set_cap(Account("run/small"), "0.000000002")
        report = await execute(ledger, prompts)
        per_dataset = {count.dataset: count.rows for count in report.counts}
    assert report.stop_reason is StopReason.CAP_REACHED
    assert per_dataset["large"] == 20
    assert 10 <= per_dataset["small"] < 20
    assert report.skipped == 20 - per_dataset["small"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CreditsExhausted(problem="no funds", status=402), StopReason.OUT_OF_CREDITS),
        (KeyRejected(problem="bad key", status=401), StopReason.KEY_REJECTED),
        (NoEligibleEndpoint(model="m", reasons=["all down"]), StopReason.NO_ENDPOINT),
    ],
)
async def test_account_trouble_stops_the_run_once_and_resumably(
    error: CreditsExhausted | NoEligibleEndpoint, reason: StopReason
) -> None:
    prompts = make_prompts(30)
    async with opened() as ledger:
        client = FakeClient(ledger, fail_at("question 1", error))  # eleven of thirty
        report = await Run(client, make_config(), prompts).execute()
        assert (report.stop_reason, client.reason) == (reason, None)
        assert type(report.error) is type(error)
        assert len(client.requests) < 30
        assert ledger.balance().pending_pusd == 0
        again = await execute(ledger, prompts)
        rows = await stored_rows(ledger)
    assert (again.stop_reason, len(rows)) == (StopReason.DONE, 30)


async def test_a_request_to_stop_lets_what_is_in_flight_end() -> None:
    gate = asyncio.Event()
    async with opened() as ledger:
        client = FakeClient(ledger, gate=gate, max_in_flight=4)
        run = Run(client, make_config(), make_prompts(50))
        running = asyncio.create_task(run.execute())
        await client.are_in_flight(4)
        run.request_stop()
        run.request_stop()
        await asyncio.sleep(0.01)
        gate.set()
        report = await running
    assert (report.stop_reason, report.finished, report.cut_off) == (StopReason.INTERRUPTED, 4, 0)
    assert len(client.requests) == 4


async def test_the_drain_is_bounded_and_the_rest_is_held_not_lost() -> None:
    async with opened() as ledger:
        client = FakeClient(ledger, gate=asyncio.Event(), max_in_flight=3)
        run = Run(client, make_config(), make_prompts(50), drain_s=0.02)
        running = asyncio.create_task(run.execute())
        await client.are_in_flight(3)
        run.request_stop()
        report = await running
        balance = ledger.balance()
        assert (report.stop_reason, report.cut_off) == (StopReason.INTERRUPTED, 3)
        assert (balance.held_entries, balance.held_pusd) == (3, balance.pending_pusd)
        again = await execute(ledger, make_prompts(50))
    assert (again.stop_reason, again.finished) == (StopReason.DONE, 50)


async def test_the_first_signal_drains_and_the_second_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    async with opened() as ledger:
        client = FakeClient(ledger, gate=asyncio.Event(), max_in_flight=2)
        run = Run(client, make_config(), make_prompts(9))

        async def interrupted() -> RunReport:
            with run.install_signal_handlers():
                return await run.execute()

        running = asyncio.create_task(interrupted())
        await client.are_in_flight(2)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.02)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ledger.balance().held_entries == 2
    assert signal.getsignal(signal.SIGINT) is before


async def test_an_unreadable_prompt_raises_after_what_is_in_flight_has_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a", "2"]}\n{"turns": ["b", "2"]}\nbroken\n{"prompt": "c"}\n')
    async with opened() as ledger:
        run = Run(FakeClient(ledger), make_config(), read_prompts(path))
        with pytest.raises(DatasetError, match=r"p\.jsonl:3"):
            await run.execute()
        rows = await stored_rows(ledger)
    assert {row.prompt.turns[0]: len(row.turns) for row in rows} == {"a": 2, "b": 2}


async def test_a_run_object_runs_once() -> None:
    async with opened() as ledger:
        run = Run(FakeClient(ledger), make_config(), make_prompts(1))
        await run.execute()
        with pytest.raises(ConfigurationError, match="runs once"):
            await run.execute()


# -- flow -----------------------------------------------------------------------------------------


async def test_rows_under_way_are_bounded_and_progress_adds_up() -> None:
    seen: list[Progress] = []
    async with opened() as ledger:
        client = FakeClient(ledger, max_in_flight=5, rounds=3)
        report = await Run(client, make_config(), make_prompts(60)).execute(seen.append)
    assert client.peak_in_flight <= 5
    assert client.peak_live <= 10
    assert (seen[-1].finished, seen[-1].answers, seen[-1].output_tokens) == (60, 60, 1_200)
    assert seen[-1].classes == {RowClass.GOOD: 60}
    assert report.finished == 60


async def test_prompts_are_read_only_as_room_comes() -> None:
    read = 0

    def prompts() -> Iterator[Prompt]:
        nonlocal read
        for prompt in make_prompts(1_000):
            read += 1
            yield prompt

    async with opened() as ledger:
        client = FakeClient(ledger, gate=asyncio.Event(), max_in_flight=4)
        run = Run(client, make_config(), prompts(), drain_s=0)
        running = asyncio.create_task(run.execute())
        await client.are_in_flight(4)
        await asyncio.sleep(0.01)
        run.request_stop()
        await running
    assert read <= 9  # twice the requests in flight, and the one that waits


@pytest.mark.parametrize("seed", range(6))
async def test_cancelled_at_any_moment_every_row_ends_up_there_once(
    tmp_path: Path, seed: int
) -> None:
    """No paid answer is lost, none is bought twice, and each turn stands on the one before."""
    rng = random.Random(seed)
    path, prompts = tmp_path / "l.sqlite", make_prompts(30, turns=2)
    for start in range(200):
        async with opened(path) as ledger:
            client = FakeClient(ledger, max_in_flight=7, rounds=rng.randrange(1, 6))
            run = Run(client, make_config(), prompts)
            running = asyncio.create_task(run.execute())
            if start < 12:
                await asyncio.sleep(rng.uniform(0, 0.02))
                running.cancel()
            try:
                report = await running
            except asyncio.CancelledError:
                continue
            assert report.stop_reason is StopReason.DONE
            break
    async with opened(path, cap=None) as ledger:
        rows = await stored_rows(ledger)
        await ledger.verify()
        posted = ledger.balance().posted_entries
    assert len({row.key for row in rows}) == len(rows) == 30
    for row in rows:
        assert [turn.content for turn in row.turns] == [f" re: {text}" for text in row.prompt.turns]
    with database(path) as connection:
        (turns,) = connection.execute("SELECT count(*) FROM generation_turns").fetchone()
        (entries,) = connection.execute(
            "SELECT count(DISTINCT entry_id) FROM generation_turns"
        ).fetchone()
    assert posted == turns == entries == 60


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_memory_does_not_grow_with_the_number_of_prompts(tmp_path: Path) -> None:
    """A hundred thousand prompts of 1.2 kB; the keys of the last 65,536 are all that is kept."""

    def prompts() -> Iterator[Prompt]:
        for number in range(100_000):
            yield Prompt(id=str(number), dataset="set", turns=(f"{number} " * 200,))

    resident: dict[int, int] = {}

    def watch(progress: Progress) -> None:
        if progress.finished % 10_000 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.setdefault(progress.finished, pages * resource.getpagesize())

    async with opened(tmp_path / "l.sqlite", cap=NO_CAP) as ledger:
        client = FakeClient(ledger, max_in_flight=500, rounds=0, requests=_Forgetful())
        report = await Run(client, make_config(), prompts()).execute(watch)
    assert report.finished == 100_000
    assert resident[100_000] - resident[10_000] < 20 * 2**20


class _Forgetful(list[ChatRequest]):
    def append(self, request: ChatRequest) -> None:
        """Keep nothing."""
