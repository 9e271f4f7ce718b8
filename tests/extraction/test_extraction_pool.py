"""The queue of shards and its workers, without anything that runs them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import SourceError
from quantroute.extraction._manifest import ShardRecord
from quantroute.extraction._plan import Selection, ShardCursor, plan_shards
from quantroute.extraction._pool import PoolEvent, ShardQueue, WorkerLost, work_off
from states_support import examples


def record(index: int) -> ShardRecord:
    return ShardRecord(
        index=index,
        keys_sha256="",
        sha256="",
        size_bytes=1,
        rows_sha256="",
        examples=1,
        tokens=1,
        loss_tokens=1,
    )


@dataclass
class Crew:
    """Workers that die at their n-th shard; `turns` are how long each shard takes."""

    deaths: dict[int, int] = field(default_factory=dict)
    turns: Mapping[int, int] = field(default_factory=dict)
    kills: int | None = None
    started: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    done: Counter[int] = field(default_factory=Counter)

    async def start(self, number: int) -> Hand:
        await asyncio.sleep(0)
        name = f"{number}.{len(self.started)}"
        self.started.append(name)
        return Hand(self, name, self.deaths.pop(number, None))


@dataclass
class Hand:
    crew: Crew
    name: str
    dies_at: int | None
    count: int = 0

    async def extract(self, index: int) -> ShardRecord:
        for _ in range(self.crew.turns.get(index, 1)):
            await asyncio.sleep(0)
        self.count += 1
        if index == self.crew.kills or (self.dies_at is not None and self.count >= self.dies_at):
            raise WorkerLost("gone")
        self.crew.done[index] += 1
        return record(index)

    def close(self) -> None:
        self.crew.closed.append(self.name)


@given(
    shards=st.sets(st.integers(0, 60), max_size=25),
    workers=st.integers(1, 4),
    lanes=st.integers(1, 3),
    deaths=st.dictionaries(st.integers(0, 3), st.integers(1, 5)),
    turns=st.dictionaries(st.integers(0, 60), st.integers(1, 9)),
)
def test_every_shard_is_done_once_whoever_dies(
    shards: set[int],
    workers: int,
    lanes: int,
    deaths: dict[int, int],
    turns: dict[int, int],
) -> None:
    crew, events = Crew(deaths=dict(deaths), turns=turns), list[PoolEvent]()
    asyncio.run(
        work_off(
            ShardQueue(shards), crew.start, workers=workers, lanes=lanes, on_event=events.append
        )
    )
    assert crew.done == Counter(shards)
    assert sorted(event.index for event in events if event.record) == sorted(shards)
    assert sorted(crew.started) == sorted(crew.closed)


async def test_a_slow_worker_does_not_keep_the_others_from_its_share() -> None:
    crew, by_worker = Crew(turns={0: 500}), Counter[str]()
    await work_off(
        ShardQueue(range(20)),
        crew.start,
        workers=2,
        lanes=1,
        on_event=lambda event: by_worker.update([event.worker[0]]),
    )
    assert sorted(by_worker.values()) == [1, 19]


async def test_a_shard_that_kills_its_workers_is_named() -> None:
    crew = Crew(kills=3)
    with pytest.raises(SourceError, match="shard 3: 3 workers died"):
        await work_off(
            ShardQueue(range(9)), crew.start, workers=2, lanes=1, on_event=lambda _: None
        )
    assert sorted(crew.started) == sorted(crew.closed)


async def test_a_closed_queue_ends_the_work_after_what_is_in_hand() -> None:
    queue, crew = ShardQueue(range(50)), Crew()

    def close(event: PoolEvent) -> None:
        if event.index == 4:
            queue.close()

    await work_off(queue, crew.start, workers=2, lanes=2, on_event=close)
    assert 5 <= len(crew.done) < 12


@given(st.lists(st.integers(0, 9), max_size=12))
def test_a_cursor_gives_each_shard_as_the_plan_does(asked: list[int]) -> None:
    rows = examples(30)
    plan = plan_shards(lambda: rows, shard_tokens=60, selection=Selection())
    whole = dict(plan.members(lambda: rows, set(range(len(plan.shards)))))
    cursor = ShardCursor(plan, lambda: rows)
    for index in asked:
        span, members = cursor.at(index)
        assert span == plan.shards[index]
        assert members == whole[span]
