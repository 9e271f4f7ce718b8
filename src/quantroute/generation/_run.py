"""`Run`: prompts in, rows out; bounded, resumable, stopped cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final

from quantroute._log import get_logger
from quantroute._signals import STOP_SIGNALS, on_stop_signals
from quantroute.client import Attendance
from quantroute.clock import Clock, SystemClock
from quantroute.errors import (
    BudgetExceeded,
    ConfigurationError,
    DatasetError,
    JournalError,
    NoEligibleEndpoint,
    QuantrouteError,
    RefusedAlike,
    RegistryError,
)
from quantroute.generation._alarms import QualityBook
from quantroute.generation._collector import calm_collector
from quantroute.generation._config import RunConfig
from quantroute.generation._conversation import ChatClient, Conversation, account_of
from quantroute.generation._deadline import REPLAN_EVERY_S, Deadline, Pace, needed_per_s
from quantroute.generation._expect import assumed
from quantroute.generation._feed import Feed
from quantroute.generation._known import DueRows, KnownRows
from quantroute.generation._limits import LENGTHS_KEPT, OutputLimits
from quantroute.generation._measure import read_qualities
from quantroute.generation._prompts import Prompt
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowState, TurnRecord, digest
from quantroute.generation._report import (
    Interrupted,
    Progress,
    RunReport,
    StopReason,
    Tally,
    stop_reason,
)
from quantroute.generation._rows import Reading, RowId, RowStore, StoredRun
from quantroute.generation._shard import Shard
from quantroute.generation._statistical import StatisticalReserve
from quantroute.ledger import Account
from quantroute.routing import Mix
from quantroute.storage import MEMORY, FileLock, is_locked

__all__ = ["DEFAULT_DRAIN_S", "Run"]

DEFAULT_DRAIN_S: Final = 120.0
#: Rows that wait out a pause hold no slot; so many rows per slot may be under way in all.
_LIVE_ROWS_PER_SLOT: Final = 2
#: With so many slots for each, several rows begin in one turn of the loop: a turn asks the system
#: what has arrived, which costs as much as beginning a row.
_SLOTS_PER_ROW_AT_ONCE: Final = 64

ProgressHook = Callable[[Progress], None]
log = get_logger("quantroute.generation")


class Run:
    """Generates the rows of one configuration. Running it again on the same store resumes it.

    >>> run = Run(client, RunConfig(name="b3", model=..., max_output_tokens=8192), prompts)
    >>> with run.install_signal_handlers():
    ...     report = await run.execute()

    Each row is in the store exactly once, whatever happened before: rows are found by the key of
    their content. Rows, their charges and the run's settings share the ledger's file.

    Memory: rows under way (twice the client's requests in flight at most), the keys of the last
    65,536 rows and a bit per row that is done; never the prompts.

    Args:
        client: an open client; its ledger's store takes the rows.
        prompts: read once, lazily, as room comes; when resuming, up to 256 rows ahead.
        source: a name for exactly what `prompts` yields; see `Feed`.
        feeds: instead of `prompts`: datasets with targets and purses of their own, read at the same
            time, each with its share of the rows under way.
        redo: classes of finished rows to be had anew. The old answers stay as earlier revisions.
        retry_refused: ask again for rows that the service refused.
        drain_s: how long requests in flight may take to end when the run is stopped.
        elastic_limits: reserve less per request while money is short for the asked concurrency, by
            asking with lower output limits; answers cut by those are asked for again. Never above
            the configured limit. See docs/design/0007-tight-cap.md.
        reserve: a soft cap by expectation, under the ledger's hard one; output limits stay whole.
        deadline: use the cheapest endpoints that finish in time, no others; a run that is late goes
            on with everything.
        shard: only this part of the rows; other workers have the others, under the same ledger.
        clock: a seam for tests.
    """

    def __init__(
        self,
        client: ChatClient,
        config: RunConfig,
        prompts: Iterable[Prompt] = (),
        *,
        source: str | None = None,
        feeds: Sequence[Feed] = (),
        redo: Set[RowClass] = frozenset(),
        retry_refused: bool = False,
        drain_s: float = DEFAULT_DRAIN_S,
        elastic_limits: bool = True,
        reserve: StatisticalReserve | None = None,
        deadline: Deadline | None = None,
        shard: Shard | None = None,
        clock: Clock | None = None,
    ) -> None:
        if drain_s < 0:
            raise ConfigurationError(f"drain_s must not be negative: {drain_s}")
        self.client = client
        self.config = config
        planned = deadline.rows if deadline is not None else None
        self._feeds = tuple(feeds) or (Feed(prompts=prompts, source=source, planned_rows=planned),)
        if deadline is not None and any(feed.remaining_rows is None for feed in self._feeds):
            raise ConfigurationError("a deadline needs to know how many rows are wanted: rows=...")
        self._configs: dict[str, RunConfig] = {}
        self._redo = frozenset(redo)
        self._retry_refused = retry_refused
        self._drain_s = drain_s
        self._has_elastic_limits = elastic_limits and reserve is None
        self._reserve = reserve
        self._deadline = deadline
        self._pace: Pace | None = None
        self._began_s = 0.0
        self._shard = shard
        self._limits: dict[str, OutputLimits] = {}
        self._known_lengths: dict[str, list[int]] = {}
        self._clock: Clock = clock or SystemClock()
        self._rows = RowStore(client.ledger.store)
        self._run_id = -1
        self._known = KnownRows(rows=self._rows, run_id=-1)
        self._capped: dict[Account, BudgetExceeded] = {}
        self._tally = Tally()
        self._quality = QualityBook()
        self._live: set[asyncio.Task[None]] = set()
        self._most_live = max(2, _LIVE_ROWS_PER_SLOT * client.max_in_flight)
        self._rows_per_turn = max(1, client.max_in_flight // _SLOTS_PER_ROW_AT_ONCE)
        self._room = asyncio.Semaphore(self._most_live)
        self._stop = asyncio.Event()
        self._stopped_by: QuantrouteError | None = None
        self._has_read_all = False
        self._main: asyncio.Task[Any] | None = None
        self._on_progress: ProgressHook | None = None

    # -- the public face --------------------------------------------------------------------------

    async def execute(self, on_progress: ProgressHook | None = None) -> RunReport:
        """Run until everything is done or something stops it; see `RunReport.stop_reason`.

        `on_progress` is called after every answer and every end of a row: keep it short. If this is
        cancelled it ends at once; what was in flight is held as unknown by the ledger.
        Raises:
            ConfigurationError: the run was begun with other settings, or this object has run.
            JournalError: another process has this run, or the store failed.
            DatasetError: a prompt cannot be read; what was in flight has been finished.
        """
        if self._main is not None:
            raise ConfigurationError("a Run runs once; make another one to go on")
        self._main = asyncio.current_task()
        self._on_progress = on_progress
        began_s = self._began_s = self._clock.now_s()
        with self._locked():
            await self._rows.prepare()
            stored = await self._rows.open_run(
                self.config, at_s=self._clock.time_s(), redo=self._redo
            )
            self._run_id = stored.run_id
            log.info(
                "run begins",
                run=self.config.name,
                model=self.config.model,
                max_in_flight=self.client.max_in_flight,
            )
            await self._look_back(stored)
            if self._has_elastic_limits:
                self._known_lengths = await self._rows.lengths(self._run_id, most=LENGTHS_KEPT)
            try:
                async with self.client.attended() as attendance:
                    with calm_collector():
                        await self._perform()
                    await self._note_readings(stored)
            finally:
                if self._stop.is_set():
                    self.client.admit_again()
                if self._deadline is not None:
                    await self._set_pace(None)
            if isinstance(self._stopped_by, RefusedAlike):
                await self._reopen_refused(self._stopped_by)
            if self._stopped_by is not None and stop_reason(self._stopped_by) is None:
                raise self._stopped_by
            report = await self._report(stored, self._clock.now_s() - began_s, attendance)
            log.info(
                "run ends",
                run=report.run,
                stop_reason=report.stop_reason.value,
                finished=report.finished,
                refused=report.refused,
                gave_up=report.gave_up,
                cut_off=report.cut_off,
                spent_pusd=report.spent_pusd,
                settled_entries=attendance.settled_entries,
                elapsed_s=round(report.elapsed_s, 3),
            )
            return report

    def request_stop(self) -> None:
        """Admit nothing more and drain what is in flight; call it on the run's event loop."""
        self._stop_for(Interrupted("the run was asked to stop; run it again to go on"))

    @contextlib.contextmanager
    def install_signal_handlers(
        self,
        signals: Iterable[signal.Signals] = STOP_SIGNALS,
        *,
        on_stopping: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """While in the block, the first signal asks the run to stop; the second cancels it.

        Needs the main thread's event loop to be running. The handlers that were there before are
        put back. `on_stopping` is called at once with the first signal, to say that it was heard.
        """
        task = asyncio.current_task()

        def drain() -> None:
            if on_stopping is not None:
                on_stopping()
            self.request_stop()

        def leave() -> None:
            running = self._main or task
            assert running is not None
            running.cancel()

        with on_stop_signals(drain, leave, signals=signals):
            yield

    # -- admission --------------------------------------------------------------------------------

    async def _perform(self) -> None:
        if self._deadline is not None:
            await self._keep_pace(self._deadline)  # before the first request
        async with asyncio.TaskGroup() as group:
            pacer = None
            if self._deadline is not None:
                pacer = group.create_task(self._pacing(self._deadline))
            stopped = group.create_task(self._stop.wait())
            feeders = {group.create_task(self._feed(group, feed)) for feed in self._feeds}
            fed = group.create_task(_all_done(feeders))
            await asyncio.wait({fed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (fed, *feeders):
                task.cancel()
            self._has_read_all = all(feed.is_read for feed in self._feeds)
            rows = group.create_task(_all_done(self._live))
            await asyncio.wait({rows, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not rows.done():
                await self._drain(rows)
            stopped.cancel()
            if pacer is not None:
                pacer.cancel()

    async def _feed(self, group: asyncio.TaskGroup, feed: Feed) -> None:
        """Start rows as there is room; a stop cancels this where it waits."""
        rows, begun = DueRows(self._all_rows(feed), self._known, feed), 0
        try:
            while (row := await self._next_row(feed, rows)) is not None:
                await self._room.acquire()
                if begun % self._rows_per_turn == 0:
                    await asyncio.sleep(0)  # let those take their slots before looking for room
                    await self.client.slot()
                self._begin(group, feed, row)
                begun += 1
            feed.is_over = True
            if feed.purse is not None and feed.dataset is not None:
                while feed.live:
                    await feed.row_ended()
                await feed.purse.close(feed.dataset)
        except QuantrouteError as error:
            self._stop_for(error)

    async def _next_row(self, feed: Feed, rows: DueRows) -> RowId | None:
        """The row to begin next; None when the feed is over. Waits for rows that will decide."""
        while not feed.is_reached:
            if feed.shortage is not None and not await self._has_more_money(feed):
                return None
            if feed.wants_more and feed.live < self._share():
                row = feed.unpaid.popleft() if feed.unpaid else await rows.next()
                if row is not None:
                    if self._may_pay(row):
                        return row
                    continue
                feed.is_read = True
                if feed.purse is None or not feed.live:
                    return None
            await feed.row_ended()
        return None

    def _share(self) -> int:
        """Rows under way of one feed, lest one that waits for money take all the room."""
        return max(1, self._most_live // self._feeds_under_way())

    def _feeds_under_way(self) -> int:
        return max(1, sum(not feed.is_over for feed in self._feeds))

    async def _has_more_money(self, feed: Feed) -> bool:
        assert feed.purse is not None
        assert feed.dataset is not None
        shortage, feed.shortage = feed.shortage, None
        assert shortage is not None
        if await feed.purse.more(feed.dataset, above_pusd=shortage.cap_pusd):
            return True
        self._capped.setdefault(account_of(self.config, feed.dataset), shortage)
        self._tally.skipped += len(feed.unpaid)
        return False

    def _begin(self, group: asyncio.TaskGroup, feed: Feed, row: RowId) -> None:
        task = group.create_task(self._row(feed, row))
        feed.begin_row()
        self._live.add(task)
        task.add_done_callback(functools.partial(self._row_is_over, feed))
        if not self._tally.answers:
            self._show()  # the first answer may be minutes away: show that rows are under way

    def _all_rows(self, feed: Feed) -> Iterator[RowId]:
        """Every row of the feed's prompts, done or not."""
        for prompt in feed.prompts:
            config = self._config_of(prompt.dataset)
            for rollout in range(feed.rollouts or config.rollouts):
                key = config.row_key(prompt, rollout)
                if self._shard is None or self._shard.owns(digest(key)):
                    yield RowId(key=key, prompt=prompt, rollout=rollout)

    def _may_pay(self, row: RowId) -> bool:
        """Whether there is money for it; else it is skipped."""
        if account_of(self.config, row.prompt.dataset) not in self._capped:
            return True
        self._tally.skipped += 1
        return False

    def _config_of(self, dataset: str) -> RunConfig:
        config = self._configs.get(dataset)
        if config is None:
            config = self._configs[dataset] = self.config.of(dataset)
        return config

    def _limits_of(self, dataset: str) -> OutputLimits:
        limits = self._limits.get(dataset)
        if limits is None:
            limits = self._limits[dataset] = OutputLimits(
                full_tokens=self._config_of(dataset).max_output_tokens,
                # The money that is left is for the slots of all shards.
                slots=self.client.max_in_flight * (1 if self._shard is None else self._shard.count),
                datasets=self._feeds_under_way,
                is_elastic=self._has_elastic_limits,
            )
            for output_tokens in self._known_lengths.pop(dataset, ()):
                limits.lengths.add(output_tokens)
        return limits

    def _row_is_over(self, feed: Feed, task: asyncio.Task[None]) -> None:
        self._live.discard(task)
        self._room.release()
        feed.end_row()

    # -- the deadline -----------------------------------------------------------------------------

    async def _pacing(self, deadline: Deadline) -> None:
        while True:
            await self._clock.sleep(REPLAN_EVERY_S)
            await self._keep_pace(deadline)

    async def _keep_pace(self, deadline: Deadline) -> None:
        """Choose the mix anew, by what is left to do and the time left for it."""
        left_s = deadline.after_s - (self._clock.now_s() - self._began_s)
        rows = sum(feed.remaining_rows or 0.0 for feed in self._feeds)
        if len(self._feeds) == 1 and self._feeds[0].dataset is None:
            rows = max(0.0, rows - self._tally.resumed - self._tally.duplicates)
        ended = sum(self._tally.ends.values())
        per_row = max(1.0, self._tally.answers / ended) if ended else 1.0
        answer_s = self._answer_s()
        mix = await self._set_pace(
            needed_per_s(answers=rows * per_row, left_s=left_s, answer_s=answer_s)
        )
        if mix is None:
            return
        was_enough = self._pace is None or self._pace.mix.is_enough
        self._pace = Pace(left_s=left_s, remaining_rows=rows, mix=mix)
        if was_enough and not mix.is_enough:
            log.warning("deadline cannot be met", state=str(self._pace), remaining_rows=round(rows))

    async def _set_pace(self, wanted_per_s: float | None) -> Mix | None:
        try:
            return await self.client.pace(
                self.config.model,
                self.config.sampling,
                needed_per_s=wanted_per_s,
                answer_s=self._assumed_s(),
            )
        except (RegistryError, NoEligibleEndpoint):
            return None  # requests will say so, if it lasts

    def _assumed_s(self) -> float:
        """Seconds an answer is assumed to take before any has come."""
        return assumed(max_output_tokens=self.config.max_output_tokens).answer_s

    def _answer_s(self) -> float:
        """Seconds an answer takes, in the mean of those that have come."""
        tally = self._tally
        return tally.answer_s / tally.answers if tally.answers else self._assumed_s()

    # -- one row ----------------------------------------------------------------------------------

    async def _row(self, feed: Feed, row: RowId) -> None:
        """One row to its end. Its failure is its own; a run-stopper is noted once."""
        try:
            done = None
            if self._known.is_started(row):
                done = await self._rows.find(self._run_id, row.key)
            conversation = Conversation(
                client=self.client,
                rows=self._rows,
                run_id=self._run_id,
                config=self._config_of(row.prompt.dataset),
                row=row,
                clock=self._clock,
                on_answer=functools.partial(self._count_answer, feed),
                on_verdict=self._count_verdict,
                limits=self._limits_of(row.prompt.dataset),
                reserve=self._reserve,
                done=done,
                redo=self._redo,
            )
            end = await conversation.run()
        except BudgetExceeded as error:
            self._known.note_started(row)  # some turns may be in, should the row be tried again
            self._cap_reached(feed, row, error)
        except QuantrouteError as error:
            self._stop_for(error)
        else:
            self._known.note_end(row)
            self._tally.ends[end] += 1
            feed.count_end(end, conversation.accepted_tokens)
            self._show()

    def _count_answer(self, feed: Feed, record: TurnRecord) -> None:
        self._tally.count_answer(record)
        feed.count_answer(record)
        self._show()

    def _count_verdict(self, record: TurnRecord) -> None:
        """Answers that say something about their endpoint: not those that a limit of ours cut."""
        for alarm in self._quality.count(record):
            log.warning(
                "endpoint worse than the others",
                endpoint=alarm.endpoint,
                row_class=alarm.row_class.value,
                answers=alarm.answers,
                hits=alarm.hits,
                other_answers=alarm.other_answers,
                other_hits=alarm.other_hits,
            )

    def _show(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                self._counted().progress(
                    live=len(self._live),
                    is_stopping=self._stop.is_set(),
                    alarms=tuple(self._quality.alarms),
                    pace=self._pace,
                )
            )

    # -- stopping ---------------------------------------------------------------------------------

    def _cap_reached(self, feed: Feed, row: RowId, error: BudgetExceeded) -> None:
        """A dataset's own cap ends it unless its purse has more; any other cap ends the run."""
        account = account_of(self.config, row.prompt.dataset)
        if error.account == account and feed.purse is not None and not feed.is_over:
            feed.unpaid.append(row)
            feed.shortage = error
            return
        self._tally.skipped += 1
        if error.account == account:
            self._capped.setdefault(account, error)
        else:
            self._stop_for(error)

    def _stop_for(self, error: QuantrouteError) -> None:
        """Stop admitting, for the first reason that comes; many rows may bring the same one."""
        if self._stop.is_set():
            return
        self._stopped_by = error
        self._stop.set()
        log.info("run stops", run=self.config.name, reason=str(error), live=len(self._live))
        if not isinstance(error, BudgetExceeded | DatasetError):
            # Rows that wait (for a slot, a pause, money) end here; those in flight go on. When the
            # cap is reached, waiting rows may still fit into what those in flight give back; an
            # unreadable prompt is no reason for the rows before it to end.
            self.client.stop_admitting(error)

    async def _reopen_refused(self, error: RefusedAlike) -> None:
        """The rows refused before it was clear that all are were not at fault either."""
        rows = await self._rows.reopen_refused(
            self._run_id, status=error.status, problem=error.refusal, at_s=self._clock.time_s()
        )
        moved = min(rows, self._tally.ends[RowState.REFUSED])
        self._tally.ends[RowState.REFUSED] -= moved
        self._tally.ends[RowState.GAVE_UP] += moved

    async def _drain(self, rows: asyncio.Task[None]) -> None:
        await asyncio.wait({rows}, timeout=self._drain_s)
        self._tally.cut_off = len(self._live)
        for task in tuple(self._live):
            task.cancel()

    # -- earlier starts and later ones ------------------------------------------------------------

    async def _look_back(self, stored: StoredRun) -> None:
        """What earlier starts have done."""
        self._known = KnownRows(
            rows=self._rows,
            run_id=stored.run_id,
            redo=self._redo,
            retry_refused=self._retry_refused,
            batch_rows=self.client.max_in_flight,
        )
        await self._known.open()
        if self._redo or self._retry_refused:
            await self._rows.forget_readings(stored.run_id)
            return
        for feed in self._feeds:
            reading = await self._earlier_reading(stored, feed)
            if reading is not None:
                feed.prompts = ()
                self._known.note_unread(feed, reading)

    async def _earlier_reading(self, stored: StoredRun, feed: Feed) -> Reading | None:
        if feed.source is None:
            return None
        return await self._rows.reading(
            stored.run_id, self._source_of(feed), config_hash=stored.config_hash
        )

    def _source_of(self, feed: Feed) -> str:
        """The feed's source, with what else decides about the rows that it gives."""
        part = "" if self._shard is None else f":{self._shard}"
        return f"{feed.dataset or ''}:{feed.rollouts or ''}:{feed.source}{part}"

    async def _note_readings(self, stored: StoredRun) -> None:
        """Let later starts pass over what was read whole, if every row of this start is done."""
        tally = self._tally
        if self._stopped_by or self._capped or tally.skipped or tally.ends[RowState.GAVE_UP]:
            return
        for feed in self._feeds:
            if feed.source is not None and feed.is_read:
                await self._rows.note_reading(
                    stored.run_id,
                    self._source_of(feed),
                    Reading(rows=feed.rows, duplicates=feed.duplicates),
                    config_hash=stored.config_hash,
                )

    def _counted(self) -> Tally:
        self._tally.resumed, self._tally.duplicates = self._known.resumed, self._known.duplicates
        return self._tally

    # -- bookkeeping ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process per run or shard: two would buy every row twice.

        Raises:
            JournalError: another has it, or others work on it that divide it otherwise.
        """
        if self._rows.path == MEMORY:
            yield
            return
        store = Path(self._rows.path)
        begin = f"{store.name}.run-{self.config.name}"
        part = "" if self._shard is None else f".{self._shard.folder}"
        with FileLock(store.with_name(f"{begin}{part}.lock")) as mine:
            alike = f"-of-{self._shard.count:03d}.lock" if self._shard is not None else ".lock"
            for other in store.parent.glob(f"{glob.escape(begin)}*.lock"):
                is_part = other.name.removeprefix(begin).startswith(".shard-")
                if not is_part and other.name != f"{begin}.lock":
                    continue  # a run whose name begins like this one's
                fits = is_part and self._shard is not None and other.name.endswith(alike)
                if other != mine.path and not fits and is_locked(other):
                    raise JournalError(
                        path=str(other),
                        problem="in use by a worker that divides this run otherwise; all must be "
                        "given the same number of shards",
                    )
            yield

    def _strays(self, tally: Tally) -> int | None:
        """Rows that no prompt asked for; of a shard nobody can tell, others' are in the file."""
        if self._shard is not None or not self._has_read_all:
            return None
        return max(0, self._known.done_before - tally.resumed)

    async def _report(
        self, stored: StoredRun, elapsed_s: float, attendance: Attendance
    ) -> RunReport:
        error: QuantrouteError | None = self._stopped_by
        if error is None:
            error = next(iter(self._capped.values()), None)
        tally = self._counted()
        return RunReport(
            run=stored.name,
            stop_reason=(stop_reason(error) if error else None) or StopReason.DONE,
            error=error,
            finished=tally.ends[RowState.FINISHED],
            resumed=tally.resumed,
            duplicates=tally.duplicates,
            refused=tally.ends[RowState.REFUSED],
            gave_up=tally.ends[RowState.GAVE_UP],
            skipped=tally.skipped,
            cut_off=tally.cut_off,
            strays=self._strays(tally),
            counts=await self._rows.counts(stored.run_id),
            spent_pusd=self.client.ledger.balance(Account(stored.name)).posted_pusd,
            elapsed_s=elapsed_s,
            attendance=attendance,
            endpoints=await read_qualities(
                self.client.ledger, run=stored.name, run_id=stored.run_id
            ),
            alarms=tuple(self._quality.alarms),
            deadline_s=None if self._deadline is None else self._deadline.after_s,
        )


async def _all_done(tasks: Set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
