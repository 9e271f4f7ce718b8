"""Workers that take shards from one queue: whoever is free takes the next, a dead one's are redone.

Nothing here knows what runs the workers; `_ray` puts actors behind it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from quantroute.errors import SourceError
from quantroute.extraction._filler import first_of
from quantroute.extraction._manifest import ShardRecord

__all__ = ["PoolEvent", "ShardQueue", "Worker", "WorkerLost", "work_off"]

#: A shard whose workers die so often is what kills them.
_DEATHS_PER_SHARD: Final = 3


class WorkerLost(Exception):
    """The worker is gone: its process, its machine or the way to it."""


class Worker(Protocol):
    """Extracts and commits shards; `name` says where it runs."""

    name: str

    async def extract(self, index: int) -> ShardRecord:
        """One shard, committed.

        Raises:
            WorkerLost: it died; whether the shard was committed is not known.
        """

    def close(self) -> None:
        """End it, whatever it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A shard was committed (`record`), or a worker died (None) with the shard in its hands."""

    worker: str
    index: int
    record: ShardRecord | None


class ShardQueue:
    """Numbers of shards to do, the smallest first. Those given back are done again."""

    def __init__(self, indexes: Iterable[int]) -> None:
        self._waiting = sorted(indexes)
        self._taken = 0
        self._deaths: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def take(self) -> int | None:
        """The next one; waits while others may still give some back. None: nothing is left."""
        while not self._is_closed:
            if self._waiting:
                self._taken += 1
                return heapq.heappop(self._waiting)
            if not self._taken:
                break
            self._changed.clear()
            await self._changed.wait()
        return None

    def done(self) -> None:
        """One that was taken is committed."""
        self._taken -= 1
        self._changed.set()

    def give_back(self, index: int) -> None:
        """Its worker died.

        Raises:
            SourceError: as others did before at the same shard.
        """
        self._taken -= 1
        self._deaths[index] += 1
        heapq.heappush(self._waiting, index)
        self._changed.set()
        if self._deaths[index] >= _DEATHS_PER_SHARD:
            raise SourceError(
                source=f"shard {index}",
                problem=f"{_DEATHS_PER_SHARD} workers died while they extracted it; look at their "
                "logs (memory?) and run again: what is committed stays",
            )

    def close(self) -> None:
        """Give out nothing more."""
        self._is_closed = True
        self._changed.set()


async def work_off(
    queue: ShardQueue,
    start: Callable[[int], Awaitable[Worker]],
    *,
    workers: int,
    lanes: int,
    on_event: Callable[[PoolEvent], None],
) -> None:
    """Until the queue is empty. A worker that died is started anew.

    Args:
        start: makes worker number 0, 1, ...; raises what makes all of them pointless.
        lanes: shards in one worker's hands at a time.

    Raises:
        SourceError: a shard kills its workers. Other errors of a worker or of `start` pass through.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(_serve(_Post(queue, start, number, on_event), lanes))
    except BaseExceptionGroup as group_error:
        raise first_of(group_error) from None


async def _serve(post: _Post, lanes: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(post.work())
    finally:
        post.close()


class _Post:
    """A worker's place: one worker at a time, the next when it dies."""

    def __init__(
        self,
        queue: ShardQueue,
        start: Callable[[int], Awaitable[Worker]],
        number: int,
        on_event: Callable[[PoolEvent], None],
    ) -> None:
        self._queue, self._start, self._number, self._on_event = queue, start, number, on_event
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()

    async def work(self) -> None:
        while (index := await self._queue.take()) is not None:
            worker = await self._living()
            try:
                record = await worker.extract(index)
            except WorkerLost:
                self._on_event(PoolEvent(worker=worker.name, index=index, record=None))
                self._leave(worker)
                self._queue.give_back(index)
                continue
            self._on_event(PoolEvent(worker=worker.name, index=index, record=record))
            self._queue.done()

    def close(self) -> None:
        if self._worker is not None:
            self._leave(self._worker)

    async def _living(self) -> Worker:
        async with self._starting:
            if self._worker is None:
                self._worker = await self._start(self._number)
            return self._worker

    def _leave(self, worker: Worker) -> None:
        """The first lane that sees its death takes its place free; the others find it so."""
        if worker is self._worker:
            self._worker = None
            worker.close()
