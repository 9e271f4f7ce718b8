"""`Run`: prompts in, rows out; bounded, resumable, stopped cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Final

from quantroute._log import get_logger
from quantroute._shard import Shard
from quantroute._signals import STOP_SIGNALS, on_stop_signals
from quantroute.client import Attendance
from quantroute.clock import Clock, SystemClock
from quantroute.errors import BudgetExceeded, ConfigurationError, QuantrouteError, RefusedAlike
from quantroute.generation._admission import Admission
from quantroute.generation._alarms import QualityBook
from quantroute.generation._collector import calm_collector
from quantroute.generation._config import RunConfig
from quantroute.generation._conversation import ChatClient, Conversation
from quantroute.generation._deadline import Deadline
from quantroute.generation._feed import Feed
from quantroute.generation._known import KnownRows
from quantroute.generation._limits import LENGTHS_KEPT, OutputLimits
from quantroute.generation._measure import read_qualities
from quantroute.generation._pacing import Pacer
from quantroute.generation._prompts import Prompt
from quantroute.generation._qualities import EndpointQuality
from quantroute.generation._quality import RowClass
from quantroute.generation._readings import Readings
from quantroute.generation._records import RowId, RowState, StoredRow, StoredRun, TurnRecord
from quantroute.generation._report import (
    Interrupted,
    Progress,
    RunReport,
    StopReason,
    Tally,
    stop_reason,
)
from quantroute.generation._rows import RowStore
from quantroute.generation._run_lock import locked_run
from quantroute.generation._statistical import StatisticalReserve
from quantroute.generation._stopping import Stopping, all_done
from quantroute.ledger import Account

__all__ = ["DEFAULT_DRAIN_S", "Run"]

DEFAULT_DRAIN_S: Final = 120.0
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
        redo: classes of finished rows to be had anew, and no new ones beside them. The old answers
            stay as earlier revisions.
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
        self._redo = frozenset(redo)
        self._retry_refused = retry_refused
        self._drain_s = drain_s
        self._has_elastic_limits = elastic_limits and reserve is None
        self._reserve = reserve
        self._deadline = deadline
        self._pacer: Pacer | None = None
        self._shard = shard
        self._limits: dict[str, OutputLimits] = {}
        self._known_lengths: dict[str, list[int]] = {}
        self._clock: Clock = clock or SystemClock()
        self._rows = RowStore(client.ledger.store)
        self._run_id = -1
        self._tally = Tally()
        self._quality = QualityBook()
        self._live: set[asyncio.Task[None]] = set()
        self._config_of = functools.cache(config.of)  # asked for each row
        self._known = KnownRows(
            rows=self._rows,
            redo=self._redo,
            retry_refused=retry_refused,
            batch_rows=client.max_in_flight,
        )
        self._stopping = Stopping(client, run=config.name, live=self._live)
        self._admission = Admission(
            client,
            config=config,
            config_of=self._config_of,
            feeds=self._feeds,
            shard=shard,
            known=self._known,
            tally=self._tally,
            stopping=self._stopping,
            live=self._live,
            work=self._row,
            on_begin=self._show_first,
        )
        self._has_read_all = False
        self._is_short = False
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
        began_s = self._clock.now_s()
        self._pacer = self._make_pacer(began_s)
        with locked_run(self._rows.path, self.config.name, self._shard):
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
            try:
                async with self.client.attended() as attendance:
                    with calm_collector():
                        await self._perform()
                    await self._note_readings(stored)
            finally:
                self._stopping.admit_again()
                if self._pacer is not None:
                    await self._pacer.lift()
            await self._look_at_reason()
            report = await self._report(stored, self._clock.now_s() - began_s, attendance)
            _log_end(report)
            return report

    def request_stop(self) -> None:
        """Admit nothing more and drain what is in flight; call it on the run's event loop."""
        self._stopping.stop_for(Interrupted("the run was asked to stop; run it again to go on"))

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

    # -- the conductor ----------------------------------------------------------------------------

    async def _perform(self) -> None:
        if self._pacer is not None:
            await self._pacer.keep()  # before the first request
        async with asyncio.TaskGroup() as group:
            pacing = group.create_task(self._pacer.keep_on()) if self._pacer is not None else None
            stopped = group.create_task(self._stopping.wait())
            feeders = {group.create_task(self._admission.feed(group, feed)) for feed in self._feeds}
            fed = group.create_task(all_done(feeders))
            await asyncio.wait({fed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (fed, *feeders):
                task.cancel()
            self._has_read_all = self._admission.has_read_all
            rows = group.create_task(all_done(self._live))
            await asyncio.wait({rows, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not rows.done():
                self._tally.cut_off = await self._stopping.drain(rows, within_s=self._drain_s)
            stopped.cancel()
            if pacing is not None:
                pacing.cancel()

    def _make_pacer(self, began_s: float) -> Pacer | None:
        if self._deadline is None:
            return None
        return Pacer(
            self._deadline,
            client=self.client,
            config=self.config,
            feeds=self._feeds,
            known=self._known,
            tally=self._tally,
            clock=self._clock,
            began_s=began_s,
        )

    # -- one row ----------------------------------------------------------------------------------

    async def _row(self, feed: Feed, row: RowId) -> None:
        """One row to its end. Its failure is its own; a run-stopper is noted once."""
        try:
            done = None
            if self._known.is_started(row):
                done = await self._rows.find(self._run_id, row.key)
                self._look_at_room(done)
            conversation = Conversation(
                client=self.client,
                rows=self._rows,
                run_id=self._run_id,
                config=self._config_of(row.prompt.dataset),
                row=row,
                clock=self._clock,
                on_answer=functools.partial(self._count_answer, feed),
                on_verdict=functools.partial(self._count_verdict, row.prompt.dataset),
                limits=self._limits_of(row.prompt.dataset),
                reserve=self._reserve,
                done=done,
                redo=self._redo,
            )
            end = await conversation.run()
        except BudgetExceeded as error:
            self._known.note_started(row)  # some turns may be in, should the row be tried again
            self._admission.cap_reached(feed, row, error)
        except QuantrouteError as error:
            feed.count_missed()
            self._stopping.stop_for(error)
        except asyncio.CancelledError:
            feed.count_missed()
            raise
        else:
            self._known.note_end(row)
            self._tally.ends[end] += 1
            feed.count_end(end, conversation.accepted_tokens)
            self._show()
        finally:
            self._admission.row_is_over(feed)

    def _look_at_room(self, done: StoredRow | None) -> None:
        """Say once if answers that were cut are asked for again with no more room than before."""
        if self._is_short or done is None or RowClass.TRUNCATED not in self._redo:
            return
        limit_tokens = self._config_of(done.prompt.dataset).max_output_tokens
        cut_at_tokens = max(
            (
                record.max_output_tokens
                for record in done.turns
                if record.row_class is RowClass.TRUNCATED
            ),
            default=0,
        )
        if limit_tokens <= cut_at_tokens:
            self._is_short = True
            log.warning(
                "cut answers get no more room",
                dataset=done.prompt.dataset,
                max_output_tokens=limit_tokens,
                cut_at_tokens=cut_at_tokens,
            )

    def _count_answer(self, feed: Feed, record: TurnRecord) -> None:
        self._tally.count_answer(record)
        feed.count_answer(record)
        self._show()

    def _count_verdict(self, dataset: str, record: TurnRecord) -> None:
        """Answers that say something about their endpoint: not those that a limit of ours cut."""
        for alarm in self._quality.count(dataset, record):
            log.warning(
                "endpoint worse than the others",
                endpoint=alarm.endpoint,
                row_class=alarm.row_class.value,
                answers=alarm.answers,
                hits=alarm.hits,
                other_answers=alarm.other_answers,
                expected_hits=round(alarm.expected_hits, 1),
            )

    def _show_first(self) -> None:
        if not self._tally.answers:
            self._show()  # the first answer may be minutes away: show that rows are under way

    def _show(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                self._counted().progress(
                    live=len(self._live),
                    is_stopping=self._stopping.is_stopped,
                    alarms=tuple(self._quality.alarms),
                    pace=None if self._pacer is None else self._pacer.pace,
                )
            )

    def _limits_of(self, dataset: str) -> OutputLimits:
        limits = self._limits.get(dataset)
        if limits is None:
            limits = self._limits[dataset] = OutputLimits(
                full_tokens=self._config_of(dataset).max_output_tokens,
                # The money that is left is for the slots of all shards.
                slots=self.client.max_in_flight * (1 if self._shard is None else self._shard.count),
                datasets=self._admission.feeds_under_way,
                is_elastic=self._has_elastic_limits,
            )
            for output_tokens in self._known_lengths.pop(dataset, ()):
                limits.lengths.add(output_tokens)
        return limits

    # -- earlier starts and later ones ------------------------------------------------------------

    async def _look_back(self, stored: StoredRun) -> None:
        """What earlier starts have done."""
        await self._known.open(stored.run_id)
        readings = self._readings(stored)
        if self._redo or self._retry_refused:
            await readings.forget()
        else:
            await readings.pass_over(self._feeds, self._known)
        # Reads every answer, so not for feeds that are over already.
        if self._has_elastic_limits and any(feed.prompts != () for feed in self._feeds):
            self._known_lengths = await self._rows.lengths(stored.run_id, most=LENGTHS_KEPT)

    async def _note_readings(self, stored: StoredRun) -> None:
        """Let later starts pass over what was read whole, if every row of this start is done."""
        tally = self._tally
        if self._stopping.error or tally.skipped or tally.ends[RowState.GAVE_UP]:
            return
        if self._known.not_begun:
            return
        await self._readings(stored).note(self._feeds)

    def _readings(self, stored: StoredRun) -> Readings:
        return Readings(rows=self._rows, run=stored, shard=self._shard)

    async def _look_at_reason(self) -> None:
        """Raise what stopped the run, unless a report can tell it."""
        reason = self._stopping.reason
        if isinstance(reason, RefusedAlike):
            await self._reopen_refused(reason)
        if reason is not None and stop_reason(reason) is None:
            raise reason

    async def _reopen_refused(self, error: RefusedAlike) -> None:
        """The rows refused before it was clear that all are were not at fault either."""
        rows = await self._rows.reopen_refused(
            self._run_id, status=error.status, problem=error.refusal, at_s=self._clock.time_s()
        )
        moved = min(rows, self._tally.ends[RowState.REFUSED])
        self._tally.ends[RowState.REFUSED] -= moved
        self._tally.ends[RowState.GAVE_UP] += moved

    # -- bookkeeping ------------------------------------------------------------------------------

    def _counted(self) -> Tally:
        self._tally.resumed, self._tally.duplicates = self._known.resumed, self._known.duplicates
        return self._tally

    async def _qualities(self, stored: StoredRun) -> tuple[EndpointQuality, ...]:
        """Of the whole run; not read from a million answers if this start added none."""
        if not self._tally.answers:
            return ()
        return await read_qualities(self.client.ledger, run=stored.name, run_id=stored.run_id)

    def _strays(self, tally: Tally) -> int | None:
        """Rows that no prompt asked for; of a shard nobody can tell, others' are in the file."""
        if self._shard is not None or not self._has_read_all:
            return None
        return max(0, self._known.done_before - tally.resumed)

    async def _report(
        self, stored: StoredRun, elapsed_s: float, attendance: Attendance
    ) -> RunReport:
        error = self._stopping.error
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
            not_begun=self._known.not_begun,
            strays=self._strays(tally),
            counts=await self._rows.counts(stored.run_id),
            spent_pusd=self.client.ledger.balance(Account(stored.name)).posted_pusd,
            elapsed_s=elapsed_s,
            attendance=attendance,
            endpoints=await self._qualities(stored),
            alarms=tuple(self._quality.alarms),
            deadline_s=None if self._deadline is None else self._deadline.after_s,
        )


def _log_end(report: RunReport) -> None:
    log.info(
        "run ends",
        run=report.run,
        stop_reason=report.stop_reason.value,
        finished=report.finished,
        refused=report.refused,
        gave_up=report.gave_up,
        cut_off=report.cut_off,
        spent_pusd=report.spent_pusd,
        settled_entries=report.attendance.settled_entries,
        elapsed_s=round(report.elapsed_s, 3),
    )
