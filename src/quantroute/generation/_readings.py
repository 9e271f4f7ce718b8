"""Sources that were read whole and whose rows are all done: later starts pass over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantroute.generation._feed import Feed
from quantroute.generation._known import KnownRows
from quantroute.generation._records import Reading, StoredRun
from quantroute.generation._rows import RowStore
from quantroute.generation._shard import Shard

__all__ = ["Readings"]


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
        part = "" if self.shard is None else f":{self.shard}"
        return f"{feed.dataset or ''}:{feed.rollouts or ''}:{feed.source}{part}"
