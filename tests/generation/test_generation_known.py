"""Which rows are still to be had, without keeping all keys, and which files need no reading."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from generation.fakes import FakeClient, Script, echo, make_answer, make_config, make_prompts
from quantroute.client import ChatRequest, GaveUp, RowRefused
from quantroute.errors import DatasetError
from quantroute.generation import (
    Feed,
    Prompt,
    RowClass,
    RowStore,
    Run,
    RunReport,
    Shard,
    _known,
    known_reading,
)
from quantroute.ledger import BudgetLedger
from quantroute.money import NO_CAP


@pytest.fixture
def few_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget rows after a handful instead of sixty-five thousand."""
    monkeypatch.setattr(_known, "_MOST_MARKS", 5)


def unread() -> Iterator[Prompt]:
    """Prompts that nobody may read."""
    raise AssertionError("read although all is done")
    yield


def asked(client: FakeClient) -> list[str]:
    return [request.messages[-1]["content"] for request in client.requests]


async def start(
    ledger: BudgetLedger,
    prompts: Iterator[Prompt] | list[Prompt],
    script: Script = echo,
    *,
    source: str | None = "file-1",
    redo: frozenset[RowClass] = frozenset(),
    retry_refused: bool = False,
    **config: object,
) -> RunReport:
    run = Run(
        FakeClient(ledger, script),
        make_config(**config),
        prompts,
        source=source,
        redo=redo,
        retry_refused=retry_refused,
    )
    return await run.execute()


# -- each row once --------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_marks")
@pytest.mark.parametrize("seed", range(8))
async def test_prompts_that_repeat_are_asked_once_though_their_keys_were_forgotten(
    seed: int, tmp_path: Path
) -> None:
    """Repeats at any distance, in two feeds at once, in a first start and in a second."""
    rng = random.Random(seed)
    distinct = make_prompts(60)
    feeds = [[rng.choice(distinct) for _ in range(90)] for _ in range(2)]
    texts = {prompt.turns[0] for prompts in feeds for prompt in prompts}
    async with BudgetLedger.open(tmp_path / "l.sqlite", cap=NO_CAP) as ledger:
        client = FakeClient(ledger, max_in_flight=rng.choice((1, 3, 16)), rounds=rng.randrange(3))
        run = Run(client, make_config(), feeds=[Feed(prompts=prompts) for prompts in feeds])
        report = await run.execute()
        assert sorted(asked(client)) == sorted(texts)
        assert (report.finished, report.duplicates) == (len(texts), 180 - len(texts))

        more = [rng.choice(distinct) for _ in range(90)] + distinct
        client = FakeClient(ledger, max_in_flight=4)
        report = await Run(client, make_config(), more).execute()
        assert sorted(asked(client)) == sorted({prompt.turns[0] for prompt in distinct} - texts)
        assert (report.resumed, report.duplicates, report.strays) == (len(texts), 90, 0)


@pytest.mark.usefixtures("few_marks")
async def test_a_row_that_gave_up_is_not_tried_twice_in_one_start() -> None:
    def down(request: ChatRequest) -> GaveUp:
        return GaveUp(problem="down", attempts=8)

    async with BudgetLedger.in_memory(cap="1") as ledger:
        report = await start(ledger, make_prompts(20) + make_prompts(20), down)
        assert (report.gave_up, report.duplicates) == (20, 20)
        report = await start(ledger, make_prompts(20) + make_prompts(20), down)
        assert (report.gave_up, report.duplicates) == (20, 20)


async def test_rows_before_an_unreadable_prompt_are_had_when_resuming_too() -> None:
    def broken() -> Iterator[Prompt]:
        yield from make_prompts(5)
        raise DatasetError(path="x.jsonl", line=6, problem="not JSON")

    async with BudgetLedger.in_memory(cap="1") as ledger:
        await start(ledger, make_prompts(2))
        with pytest.raises(DatasetError, match="not JSON"):
            await start(ledger, broken(), source=None)
        report = await start(ledger, make_prompts(5), source=None)
    assert (report.resumed, report.finished) == (5, 0)


# -- sources that need no reading -----------------------------------------------------------------


async def test_a_source_with_all_rows_done_is_not_read_again() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        first = await start(ledger, make_prompts(6) + make_prompts(2))
        again = await start(ledger, unread())
    assert (first.finished, first.duplicates) == (6, 2)
    assert (again.finished, again.resumed, again.duplicates, again.strays) == (0, 6, 2, 0)
    assert again.is_complete


async def test_refused_rows_count_as_done_until_they_are_asked_for_again() -> None:
    def refuse(request: ChatRequest) -> RowRefused:
        return RowRefused(status=400, problem="no", attempts=1)

    async with BudgetLedger.in_memory(cap="1") as ledger:
        await start(ledger, make_prompts(2), refuse)
        assert (await start(ledger, unread())).resumed == 2
        retried = await start(ledger, make_prompts(2), retry_refused=True)
        assert retried.finished == 2
        assert (await start(ledger, unread())).resumed == 2


async def test_what_a_source_gave_is_known_before_a_start() -> None:
    """Rows and duplicates of files with all rows done, for these very settings and no others."""
    async with BudgetLedger.in_memory(cap="1") as ledger:
        rows, config = RowStore(ledger.store), make_config()
        assert await known_reading(rows, config, source="file-1") is None
        await start(ledger, make_prompts(6) + make_prompts(2))
        assert await known_reading(rows, config, source="file-1") == (6, 2)
        assert await known_reading(rows, config, source="file-2") is None
        assert await known_reading(rows, make_config(rollouts=2), source="file-1") is None
        shard = Shard(index=1, count=2)
        assert await known_reading(rows, config, source="file-1", shard=shard) is None


async def test_another_source_or_other_settings_are_read() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await start(ledger, make_prompts(3))
        assert (await start(ledger, make_prompts(5), source="file-2")).finished == 2
        assert (await start(ledger, make_prompts(4), source=None)).resumed == 4
        assert (await start(ledger, make_prompts(3), rollouts=2)).finished == 3
        assert (await start(ledger, unread(), rollouts=2)).resumed == 6


async def test_what_did_not_end_well_is_read_again() -> None:
    def half(request: ChatRequest) -> object:
        if request.messages[-1]["content"] == "question 1.0":
            return GaveUp(problem="down", attempts=8)
        return echo(request)

    async with BudgetLedger.in_memory(cap="1") as ledger:
        assert (await start(ledger, make_prompts(3), half)).gave_up == 1  # type: ignore[arg-type]
        assert (await start(ledger, make_prompts(3))).finished == 1
        assert (await start(ledger, unread())).resumed == 3


async def test_redoing_reads_and_what_it_leaves_undone_is_read_again() -> None:
    def cut(request: ChatRequest) -> object:
        return make_answer("An answer.", finish_reason="length")

    def down(request: ChatRequest) -> GaveUp:
        return GaveUp(problem="down", attempts=8)

    redo = frozenset({RowClass.TRUNCATED})
    async with BudgetLedger.in_memory(cap="1") as ledger:
        assert (await start(ledger, make_prompts(2), cut)).finished == 2  # type: ignore[arg-type]
        assert (await start(ledger, make_prompts(2), down, redo=redo)).gave_up == 2
        # They gave up, so they are due; nothing says any more that this source is done.
        assert (await start(ledger, make_prompts(2))).finished == 2
        assert (await start(ledger, unread())).resumed == 2
