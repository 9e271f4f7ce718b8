"""The rows of a run whose shards lie in several files, read as if they lay in one.

Each row must be there exactly once. A row in two files was bought twice, by workers that divided
the run differently: that is an error which names both, never a choice made in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from quantroute.errors import DatasetError
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowCounts, RowState, StoredRow, StoredRun
from quantroute.generation._rows import RowStore

__all__ = ["RowSource", "ShardedRows"]


class RowSource(Protocol):
    """Stored rows to read: one file's, or those of all shards."""

    async def prepare(self) -> None:
        """Make the tables that are missing."""

    async def run(self, name: str) -> StoredRun:
        """The stored run of that name."""

    def rows(self, run_id: int) -> AsyncIterator[StoredRow]:
        """All rows, in the order of their keys."""

    async def counts(self, run_id: int) -> tuple[RowCounts, ...]:
        """Rows per dataset, state and class."""


class ShardedRows:
    """A `RowSource` over one `RowStore` per shard; a batch of each at a time in memory."""

    def __init__(self, shards: Sequence[RowStore]) -> None:
        self._shards = tuple(shards)
        self._run_ids: tuple[int, ...] = ()

    @property
    def run_ids(self) -> tuple[int, ...]:
        """The run's id in each shard, once `run` has been asked."""
        return self._run_ids

    async def prepare(self) -> None:
        """Make the tables that are missing."""
        for shard in self._shards:
            await shard.prepare()

    async def run(self, name: str) -> StoredRun:
        """The run, which must have the same settings in every shard.

        Raises:
            DatasetError: a shard lacks it, or has it with other settings.
        """
        found = [await shard.run(name) for shard in self._shards]
        for shard, run in zip(self._shards, found, strict=True):
            if run.config_hash != found[0].config_hash:
                raise DatasetError(
                    path=shard.path,
                    problem=f"run {name!r} has other settings here than in {self._shards[0].path}; "
                    "start all shards with the same command",
                )
        self._run_ids = tuple(run.run_id for run in found)
        return replace(found[0], created_at_s=min(run.created_at_s for run in found))

    async def rows(self, run_id: int) -> AsyncIterator[StoredRow]:
        """All rows, in the order of their keys; `run_id` is the one that `run` gave.

        Raises:
            DatasetError: a row is in two shards.
        """
        del run_id
        streams = [
            shard.rows(own_id) for shard, own_id in zip(self._shards, self._run_ids, strict=True)
        ]
        heads = [await anext(stream, None) for stream in streams]
        while any(heads):
            key = min(row.key for row in heads if row is not None)
            found = [place for place, row in enumerate(heads) if row is not None and row.key == key]
            row = heads[found[0]]
            assert row is not None
            if len(found) > 1:
                raise self._twice(row, found[0], found[1])
            yield row
            heads[found[0]] = await anext(streams[found[0]], None)

    def _twice(self, row: StoredRow, first: int, second: int) -> DatasetError:
        return DatasetError(
            path=self._shards[second].path,
            problem=f"row {row.key[:12]} ({row.prompt.dataset} {row.prompt.id}) is "
            f"also in {self._shards[first].path}: each row must be in one shard; "
            "leave out the file that does not belong to this run",
        )

    async def counts(self, run_id: int) -> tuple[RowCounts, ...]:
        """Rows per dataset, state and class, of all shards together."""
        sums: Counter[tuple[str, RowState, RowClass | None]] = Counter()
        for shard, own_id in zip(self._shards, self._run_ids, strict=True):
            for count in await shard.counts(own_id):
                sums[count.dataset, count.state, count.row_class] += count.rows
        return tuple(
            RowCounts(dataset=dataset, state=state, row_class=row_class, rows=rows)
            for (dataset, state, row_class), rows in sorted(sums.items(), key=str)
        )
