"""One call of `quantroute generate`: check everything, then run, then look at what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from quantroute.cli import _loop
from quantroute.cli._log import EVENTS
from quantroute.cli._options import Overrun
from quantroute.cli._output import show
from quantroute.cli._progress import Reporter, prices_of
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target
from quantroute.cli._wording import as_options
from quantroute.client import AttemptObserver, Client, Reconciliation
from quantroute.errors import DatasetError, NoEligibleEndpoint
from quantroute.generation import (
    Deadline,
    Prompt,
    Reading,
    RowClass,
    RowFailures,
    RowStore,
    Run,
    RunConfig,
    RunReport,
    Shard,
    StatisticalReserve,
    builtin_prompts,
    known_reading,
    read_failures,
    read_prompts,
    worst_request_pusd,
)
from quantroute.ledger import Balance, BudgetLedger, StatementLine
from quantroute.money import format_usd
from quantroute.policy import BoundPolicy, ExclusionPolicy
from quantroute.registry import ProviderRegistry
from quantroute.report import RunFacts, verdict_table, write_facts
from quantroute.routing import LimitSettings, RoutingMode

__all__ = [
    "RECORDS_WITHIN_S",
    "Job",
    "Outcome",
    "check_prompts",
    "count_rows",
    "perform",
    "worker_settings",
]

RECORDS_WITHIN_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one call of the command is about. `total_rows` counts duplicates too."""

    folder: RunFolder
    config: RunConfig
    files: tuple[Path, ...]
    total_rows: int
    policy: ExclusionPolicy
    cap: str | None
    max_in_flight: int
    routing: RoutingMode
    deadline_s: float | None
    redo: frozenset[RowClass]
    retry_refused: bool
    elastic_limits: bool
    overrun: Overrun | None
    as_json: bool
    log_json: Path | None = None
    metrics_port: int | None = None
    observer: AttemptObserver | None = None

    @property
    def hard_cap(self) -> str | None:
        """The ledger's cap; None keeps the one it has."""
        return self.cap if self.overrun is None else self.overrun.hard_cap

    def prompts(self) -> Iterator[Prompt]:
        """The prompts, read lazily."""
        if not self.files:
            return builtin_prompts()
        return chain.from_iterable(read_prompts(path) for path in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What there is to tell at the end. `billed_pusd` is the embedded simulator's own bill."""

    report: RunReport
    bound: BoundPolicy
    statement: tuple[StatementLine, ...]
    balance: Balance
    spent_now_pusd: int
    reconciled: Reconciliation
    billed_pusd: int | None
    failures: tuple[RowFailures, ...] = ()


def count_rows(
    folder: RunFolder, config: RunConfig, files: tuple[Path, ...], *, is_redo: bool
) -> int:
    """Rows of this worker, duplicates among them: known of files with all rows done, else counted.

    Raises:
        DatasetError: as `check_prompts`.
    """
    source = source_of(config)
    if source is not None and not is_redo and folder.store.exists():
        reading = _loop.run(_recorded(folder, config, source))
        if reading is not None:
            return reading.rows + reading.duplicates
    shards = 1 if folder.shard is None else folder.shard.count
    return check_prompts(files) * config.rollouts // shards


async def _recorded(folder: RunFolder, config: RunConfig, source: str) -> Reading | None:
    async with BudgetLedger.open(folder.store) as ledger:
        return await known_reading(
            RowStore(ledger.store), config, source=source, shard=folder.shard
        )


def source_of(config: RunConfig) -> str | None:
    """What tells the prompts of a run from any others: the files' names and contents."""
    found = [f"{item.name}:{item.sha256}" for item in config.sources]
    return " ".join(found) or None


def check_prompts(files: tuple[Path, ...]) -> int:
    """The number of prompts, each of them read once: before money is spent, not half-way.

    Raises:
        DatasetError: the first line that cannot be used, and how many more there are.
    """
    if not files:
        return sum(1 for _ in builtin_prompts())
    total, problems = 0, list[DatasetError]()
    for path in files:
        count = sum(1 for _ in read_prompts(path, on_error=problems.append))
        if not count and not problems:
            raise DatasetError(path=str(path), problem="there is no prompt in it")
        total += count
    if not problems:
        return total
    first, more = problems[0], len(problems) - 1
    also = f" ({more:,} more lines cannot be used either)" if more else ""
    raise DatasetError(path=first.path, line=first.line, problem=f"{first.problem}{also}")


async def perform(job: Job, target: Target) -> Outcome:
    """Judge, run, reconcile.

    Nothing is written to disk before the key, the model and every name have proved good.
    Raises:
        NoEligibleEndpoint: nothing is left to ask; the verdicts have been printed.
    """
    target.key.read()
    target.check_descriptors(min(job.max_in_flight, job.total_rows))
    async with ProviderRegistry(service=target.service, key=target.key) as registry:
        bound = await _verdicts(job, target, registry)
        if not job.as_json:
            show(verdict_table(bound, title=job.config.model, wording=as_options))
        if not bound.eligible:
            raise NoEligibleEndpoint(model=job.config.model, reasons=bound.reasons())
        events = job.log_json or job.folder.events
        reserve = _statistical_reserve(job, bound)
        with EVENTS.written_to(events, key=target.key):
            write_facts(job.folder.facts, RunFacts.of(bound, wording=as_options))
            return await _open_and_run(job, target, registry, bound, reserve)


async def _open_and_run(
    job: Job,
    target: Target,
    registry: ProviderRegistry,
    bound: BoundPolicy,
    reserve: StatisticalReserve | None,
) -> Outcome:
    job.folder.check_division()
    async with (
        job.folder.opening(job.hard_cap) as ledger,
        Client(
            ledger=ledger,
            policy=job.policy,
            service=target.service,
            key=target.key,
            registry=registry,
            **worker_settings(job.folder.shard, job.max_in_flight),
            routing=job.routing,
            observer=job.observer,
        ) as client,
    ):
        return await _run(job, target, client, bound, reserve)


def worker_settings(shard: Shard | None, max_in_flight: int) -> dict[str, Any]:
    """A worker's part of what one client alone would ask of the endpoints."""
    if shard is None:
        return {"max_in_flight": max_in_flight}
    limits = LimitSettings()
    return {
        "max_in_flight": shard.share(max_in_flight),
        "limits": replace(
            limits, initial=shard.share(limits.initial), ceiling=shard.share(limits.ceiling)
        ),
    }


async def _verdicts(job: Job, target: Target, registry: ProviderRegistry) -> BoundPolicy:
    """What requests of this job would meet; asked without a ledger, so that no file is made."""
    async with Client(
        cap_usd="0",
        policy=job.policy,
        service=target.service,
        key=target.key,
        registry=registry,
    ) as client:
        return await client.verdicts(job.config.model, sampling=job.config.sampling)


def _statistical_reserve(job: Job, bound: BoundPolicy) -> StatisticalReserve | None:
    """The soft cap that was asked for; its worst case is printed, and must have been accepted.

    Raises:
        ConfigurationError: too little overrun was accepted.
    """
    if job.overrun is None:
        return None
    reserve = StatisticalReserve(
        target_pusd=job.overrun.target_pusd,
        worst_pusd=worst_request_pusd(bound.eligible, job.prompts(), job.config.max_output_tokens),
        probability=job.overrun.probability,
    )
    accepted_pusd = job.overrun.accepted_pusd
    reserve.check_accepted(accepted_pusd=accepted_pusd, requests=job.max_in_flight)
    if not job.as_json:
        worst = format_usd(reserve.worst_overrun_pusd(job.max_in_flight))
        show(
            f"statistical reserve: {format_usd(job.overrun.target_pusd)} is a target, not a hard "
            f"cap. If every answer in flight hit its limit, {worst} more could be spent; the hard "
            f"cap is {format_usd(job.overrun.target_pusd + accepted_pusd)}."
        )
    return reserve


async def _run(
    job: Job,
    target: Target,
    client: Client,
    bound: BoundPolicy,
    reserve: StatisticalReserve | None,
) -> Outcome:
    ledger = client.ledger
    before_pusd = ledger.balance().posted_pusd
    # The embedded simulator starts with an account of its own each time.
    await client.note_baseline(renew=target.simulator is not None)
    run = Run(
        client,
        job.config,
        job.prompts(),
        source=source_of(job.config),
        redo=job.redo,
        retry_refused=job.retry_refused,
        elastic_limits=job.elastic_limits,
        reserve=reserve,
        shard=job.folder.shard,
        deadline=(
            None
            if job.deadline_s is None
            else Deadline(after_s=job.deadline_s, rows=job.total_rows)
        ),
    )
    reporter = Reporter(
        client,
        rows_total=job.total_rows,
        prices=prices_of(bound.eligible),
        is_silent=job.as_json,
        run=job.config.name,
    )
    # A word at once: silence would provoke a second Ctrl+C.
    with reporter, run.install_signal_handlers(on_stopping=reporter.note_stopping):
        async with reporter.telling(job.metrics_port):
            report = await run.execute(reporter.on_progress)
    reconciled = await client.reconcile(patience_s=RECORDS_WITHIN_S)
    balance = ledger.balance()
    return Outcome(
        report=report,
        bound=bound,
        statement=await ledger.statement(),
        balance=balance,
        spent_now_pusd=balance.posted_pusd - before_pusd,
        reconciled=reconciled,
        billed_pusd=None if target.simulator is None else target.simulator.bill.total_pusd,
        failures=await read_failures(ledger, run=report.run),
    )
