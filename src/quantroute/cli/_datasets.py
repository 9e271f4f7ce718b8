"""`quantroute generate run.toml`: all datasets of a run file at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantroute.cli._exit import ExitCode
from quantroute.cli._job import RECORDS_WITHIN_S, Outcome
from quantroute.cli._log import EVENTS
from quantroute.cli._output import say
from quantroute.cli._plan import as_run_settings, opened_client, serving, show_plan
from quantroute.cli._progress import Reporter, prices_of
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target
from quantroute.cli._summary import exit_code, outcome_data, print_run, run_remarks
from quantroute.cli._wording import as_options, as_word, counted_rows
from quantroute.client import AttemptObserver, Client
from quantroute.generation import (
    DatasetRun,
    DatasetsReport,
    Plan,
    RowClass,
    RunSpec,
    StopReason,
    plan_run,
    read_failures,
)
from quantroute.money import format_usd
from quantroute.registry import ProviderRegistry
from quantroute.report import RunFacts, WantedDataset, write_facts

__all__ = [
    "DatasetsJob",
    "DatasetsOutcome",
    "datasets_data",
    "datasets_exit_code",
    "perform_datasets",
    "print_datasets",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsJob:
    """What one call of the command is about."""

    spec: RunSpec
    folder: RunFolder
    redo: frozenset[RowClass]
    retry_refused: bool
    as_json: bool
    log_json: Path | None = None
    metrics_port: int | None = None
    observer: AttemptObserver | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsOutcome:
    """What there is to tell at the end."""

    report: DatasetsReport
    books: Outcome


async def perform_datasets(job: DatasetsJob, target: Target) -> DatasetsOutcome:
    """Plan, run, reconcile. Nothing is written before the key, the model and all names are good.

    Raises:
        NoEligibleEndpoint: some dataset can be served by nobody.
    """
    if not job.spec.local:
        target.key.read()  # before anything is asked
    target.check_descriptors(job.spec.max_in_flight)
    async with ProviderRegistry(service=target.service, key=target.key) as registry:
        async with opened_client(job.spec, registry) as client:
            plan = await plan_run(client, job.spec)
        target.check_key(serving(plan))
        if not job.as_json:
            show_plan(plan)
        with EVENTS.written_to(job.log_json or job.folder.events, key=target.key):
            async with opened_client(
                job.spec,
                registry,
                spends=True,
                folder=job.folder,
                service=target.service,
                key=target.key,
                observer=job.observer,
            ) as client:
                if job.folder.ledger_url is not None:
                    plan = await plan_run(client, job.spec)  # with what all workers have spent
                return await _run(job, plan, target, client)


async def _run(job: DatasetsJob, plan: Plan, target: Target, client: Client) -> DatasetsOutcome:
    ledger = client.ledger
    before_pusd = ledger.balance().posted_pusd
    # The embedded simulator starts with an account of its own each time.
    await client.note_baseline(renew=target.simulator is not None)
    run = await DatasetRun.prepare(
        client,
        job.spec,
        plan=plan,
        redo=job.redo,
        retry_refused=job.retry_refused,
        shard=job.folder.shard,
    )
    bound = await client.verdicts(job.spec.model, sampling=job.spec.datasets[0].sampling)
    write_facts(
        job.folder.facts,
        RunFacts.of(bound, datasets=map(WantedDataset.of, plan.datasets), wording=as_run_settings),
    )
    listed = (item.endpoint for item in plan.endpoints)
    reporter = Reporter(
        client, prices=prices_of(listed), is_silent=job.as_json, run=job.spec.config().name
    )
    with reporter, run.install_signal_handlers(on_stopping=reporter.note_stopping):
        async with reporter.telling(job.metrics_port):
            report = await run.execute(reporter.on_progress)
    reconciled = await client.reconcile(patience_s=RECORDS_WITHIN_S)
    balance = ledger.balance()
    books = Outcome(
        report=report.run,
        bound=bound,
        statement=await ledger.statement(),
        balance=balance,
        spent_now_pusd=balance.posted_pusd - before_pusd,
        reconciled=reconciled,
        billed_pusd=None if target.simulator is None else target.simulator.bill.total_pusd,
        failures=await read_failures(ledger, run=report.run.run),
    )
    return DatasetsOutcome(report=report, books=books)


def datasets_exit_code(report: DatasetsReport) -> ExitCode:
    """The documented code; a target that the prompts could not reach counts as incomplete."""
    code = exit_code(report.run)
    return ExitCode.INCOMPLETE if code is ExitCode.DONE and not report.is_complete else code


def print_datasets(job: DatasetsJob, outcome: DatasetsOutcome) -> None:
    """Ledger, books, datasets, and what to do next."""
    books, report = outcome.books, outcome.report
    print_run(books, job.folder)
    for item in report.datasets:
        reached = "has all that was wanted" if item.is_reached else "is short of what was wanted"
        say(
            f"{item.name} {reached}: {item.accepted_rows:,} accepted rows, "
            f"{item.accepted_tokens:,} output tokens, {format_usd(item.spent_pusd)}"
        )
    for line in (*_cut_lines(job, report), *run_remarks(report.run)):
        say(line)
    say(_closing_line(job, report), bold=True)


def _cut_lines(job: DatasetsJob, report: DatasetsReport) -> list[str]:
    """Which datasets have rows that the limit cut, and how to have them again."""
    limits = {item.name: item.max_output_tokens for item in job.spec.datasets}
    return [
        f"{count.rows:,} rows of {count.dataset} were cut at {limits[count.dataset]:,} tokens; "
        "have them again with a higher max_output_tokens there and --redo truncated"
        for count in report.run.counts
        if count.row_class is RowClass.TRUNCATED and count.dataset in limits
    ]


def _closing_line(job: DatasetsJob, report: DatasetsReport) -> str:
    match report.stop_reason:
        case StopReason.DONE if report.is_complete:
            return f"done; next: quantroute export {as_word(job.folder.path)} rows.jsonl"
        case StopReason.DONE if report.run.gave_up:
            return (
                f"{counted_rows(report.run.gave_up)} failed for now; the same command tries again"
            )
        case StopReason.DONE if report.run.not_begun:
            return "redone; the same command without --redo goes on with the rest"
        case StopReason.DONE:
            return "the prompts are used up: add prompts or rollouts to reach every target"
        case StopReason.INTERRUPTED:
            return "interrupted; the same command goes on from here"
        case reason:
            return f"stopped: {as_options(str(report.run.error or reason.value))}"


def datasets_data(outcome: DatasetsOutcome) -> dict[str, Any]:
    """The same as JSON values."""
    report = outcome.report
    return outcome_data(outcome.books) | {
        "exit_code": int(datasets_exit_code(report)),
        "datasets": [
            {
                "dataset": item.name,
                "accepted_rows": item.accepted_rows,
                "accepted_tokens": item.accepted_tokens,
                "is_reached": item.is_reached,
                "cap_pusd": item.cap_pusd,
                "spent_pusd": item.spent_pusd,
            }
            for item in report.datasets
        ],
    }
