"""Which row begins next, and when: room, targets, and whether there is money for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from quantroute._shard import Shard
from quantroute.errors import BudgetExceeded, QuantrouteError
from quantroute.generation._config import RunConfig
from quantroute.generation._conversation import ChatClient, account_of
from quantroute.generation._feed import Feed
from quantroute.generation._known import DueRows, KnownRows
from quantroute.generation._records import RowId, digest
from quantroute.generation._report import Tally
from quantroute.generation._stopping import Stopping

__all__ = ["Admission"]

#: Rows that wait out a pause hold no slot; so many rows per slot may be under way in all.
_LIVE_ROWS_PER_SLOT: Final = 2
#: With so many slots for each, several rows begin in one turn of the loop: a turn asks the system
#: what has arrived, which costs as much as beginning a row.
_SLOTS_PER_ROW_AT_ONCE: Final = 64


class Admission:
    """Reads the feeds of a run and begins their rows.

    Args:
        config_of: the settings of a dataset, by its name.
        live: the rows under way; it is kept here.
        work: takes a row to its end and calls `row_is_over`. Of what goes wrong nothing may come
            out of it.
        on_begin: called for each row that has begun.
    """

    def __init__(
        self,
        client: ChatClient,
        *,
        config: RunConfig,
        config_of: Callable[[str], RunConfig],
        feeds: Sequence[Feed],
        shard: Shard | None,
        known: KnownRows,
        tally: Tally,
        stopping: Stopping,
        live: set[asyncio.Task[None]],
        work: Callable[[Feed, RowId], Coroutine[Any, Any, None]],
        on_begin: Callable[[], None],
    ) -> None:
        self._client = client
        self._config = config
        self._config_of = config_of
        self._feeds = feeds
        self._shard = shard
        self._known = known
        self._tally = tally
        self._stopping = stopping
        self._live = live
        self._work = work
        self._on_begin = on_begin
        self._most_live = max(2, _LIVE_ROWS_PER_SLOT * client.max_in_flight)
        self._rows_per_turn = max(1, client.max_in_flight // _SLOTS_PER_ROW_AT_ONCE)
        self._room = asyncio.Semaphore(self._most_live)

    @property
    def has_read_all(self) -> bool:
        """Whether every feed was read to its end."""
        return all(feed.is_read for feed in self._feeds)

    def feeds_under_way(self) -> int:
        """Feeds that may still begin rows; at least one, as others are shared among them."""
        return max(1, sum(not feed.is_over for feed in self._feeds))

    async def feed(self, group: asyncio.TaskGroup, feed: Feed) -> None:
        """Begin rows as there is room; a stop cancels this where it waits."""
        rows, begun = DueRows(self._all_rows(feed), self._known, feed), 0
        try:
            while (row := await self._next_row(feed, rows)) is not None:
                await self._room.acquire()
                if begun % self._rows_per_turn == 0:
                    await asyncio.sleep(0)  # let those take their slots before looking for room
                    await self._client.slot()
                self._begin(group, feed, row)
                begun += 1
            feed.is_over = True
            if feed.purse is not None and feed.dataset is not None:
                while feed.live:
                    await feed.row_ended()
                await feed.purse.close(feed.dataset)
        except QuantrouteError as error:
            self._stopping.stop_for(error)

    def cap_reached(self, feed: Feed, row: RowId, error: BudgetExceeded) -> None:
        """A dataset's own cap ends it unless its purse has more; any other cap ends the run."""
        account = account_of(self._config, row.prompt.dataset)
        if error.account == account and feed.purse is not None and not feed.is_over:
            feed.unpaid.append(row)
            feed.shortage = error
            return
        self._skip(feed)
        if error.account == account:
            self._stopping.capped.setdefault(account, error)
        else:
            self._stopping.stop_for(error)

    async def _next_row(self, feed: Feed, rows: DueRows) -> RowId | None:
        """The row to begin next; None when the feed is over. Waits for rows that will decide."""
        while not feed.has_enough:
            if feed.shortage is not None and not await self._has_more_money(feed):
                return None
            if feed.wants_more and feed.live < self._share():
                row = feed.unpaid.popleft() if feed.unpaid else await rows.next()
                if row is not None:
                    if self._may_pay(feed, row):
                        return row
                    continue
                feed.is_read = True
                if feed.purse is None or not feed.live:
                    return None
            await feed.row_ended()
        return None

    def _share(self) -> int:
        """Rows under way of one feed, lest one that waits for money take all the room."""
        return max(1, self._most_live // self.feeds_under_way())

    async def _has_more_money(self, feed: Feed) -> bool:
        assert feed.purse is not None
        assert feed.dataset is not None
        shortage, feed.shortage = feed.shortage, None
        assert shortage is not None
        if await feed.purse.more(feed.dataset, above_pusd=shortage.cap_pusd):
            return True
        self._stopping.capped.setdefault(account_of(self._config, feed.dataset), shortage)
        self._tally.skipped += len(feed.unpaid)
        return False

    def _may_pay(self, feed: Feed, row: RowId) -> bool:
        """Whether there is money for it; else it is skipped."""
        if account_of(self._config, row.prompt.dataset) not in self._stopping.capped:
            return True
        self._skip(feed)
        return False

    def _skip(self, feed: Feed) -> None:
        self._tally.skipped += 1
        feed.count_missed()

    def _all_rows(self, feed: Feed) -> Iterator[RowId]:
        """Every row of the feed's prompts, done or not."""
        for prompt in feed.prompts:
            config = self._config_of(prompt.dataset)
            for rollout in range(feed.rollouts or config.rollouts):
                key = config.row_key(prompt, rollout)
                if self._shard is None or self._shard.owns(digest(key)):
                    yield RowId(key=key, prompt=prompt, rollout=rollout)

    def _begin(self, group: asyncio.TaskGroup, feed: Feed, row: RowId) -> None:
        self._live.add(group.create_task(self._work(feed, row)))
        feed.begin_row()
        self._on_begin()

    def row_is_over(self, feed: Feed) -> None:
        """The running task has taken its row to an end, whatever that is.

        To be called by the work itself: a callback of its task would be one more turn of the loop.
        """
        task = asyncio.current_task()
        assert task is not None
        self._live.discard(task)
        self._room.release()
        feed.end_row()
