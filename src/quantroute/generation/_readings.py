"""Sources that were read whole and whose rows are all done: later starts pass over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantroute._shard import Shard
from quantroute.generation._config import RunConfig
from quantroute.generation._feed import Feed
from quantroute.generation._known import KnownRows
from quantroute.generation._records import Reading, StoredRun
from quantroute.generation._rows import RowStore

__all__ = ["Readings", "known_reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What is recorded of the sources of one run or shard."""

    rows: RowStore
    run: StoredRun
    shard: Shard | None = None

    async def forget(self) -> None:
        """Rows that were done are to be had anew."""
        await self.rows.forget_readings(self.run.run_id)

    async def pass_over(self, feeds: Iterable[Feed], known: KnownRows) -> None:
        """Empty the feeds whose rows are known to be done."""
        for feed in feeds:
            reading = await self._earlier(feed)
            if reading is not None:
                feed.prompts = ()
                known.note_unread(feed, reading)

    async def note(self, feeds: Iterable[Feed]) -> None:
        """Record the feeds that were read to their end; all their rows must be done."""
        for feed in feeds:
            if feed.source is not None and feed.is_read:
                await self.rows.note_reading(
                    self.run.run_id,
                    self._name_of(feed),
                    Reading(rows=feed.rows, duplicates=feed.duplicates),
                    config_hash=self.run.config_hash,
                )

    async def _earlier(self, feed: Feed) -> Reading | None:
        if feed.source is None:
            return None
        return await self.rows.reading(
            self.run.run_id, self._name_of(feed), config_hash=self.run.config_hash
        )

    def _name_of(self, feed: Feed) -> str:
        """The feed's source, with what else decides about the rows that it gives."""
        return _source_name(feed.source, self.shard, f"{feed.dataset or ''}:{feed.rollouts or ''}")


async def known_reading(
    rows: RowStore, config: RunConfig, *, source: str, shard: Shard | None = None
) -> Reading | None:
    """What a run of one feed without datasets has read of `source`, if all those rows are done.

    For whoever wants to know before it starts how many rows there are. None for anything else.
    """
    await rows.prepare()
    run = next((run for run in await rows.runs() if run.name == config.name), None)
    if run is None:
        return None
    name = _source_name(source, shard, ":")
    return await rows.reading(run.run_id, name, config_hash=config.config_hash())


def _source_name(source: str | None, shard: Shard | None, part_read: str) -> str:
    part = "" if shard is None else f":{shard}"
    return f"{part_read}:{source}{part}"
