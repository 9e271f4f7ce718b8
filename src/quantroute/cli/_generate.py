"""`quantroute generate`: the main job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._progress import Reporter
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target, opened_target
from quantroute.client import DEFAULT_MAX_IN_FLIGHT, Client, Reconciliation
from quantroute.errors import ConfigurationError
from quantroute.generation import (
    DatasetSource,
    Prompt,
    Run,
    RunConfig,
    RunReport,
    StopReason,
    builtin_prompts,
    dataset_name,
    read_prompts,
)
from quantroute.ledger import BudgetLedger, StatementLine
from quantroute.money import format_usd
from quantroute.policy import BoundPolicy, ExclusionPolicy
from quantroute.report import balance_line, ledger_table, verdict_table

_EXIT_CODES = {
    StopReason.DONE: ExitCode.DONE,
    StopReason.CAP_REACHED: ExitCode.CAP_REACHED,
    StopReason.OUT_OF_CREDITS: ExitCode.ACCOUNT,
    StopReason.KEY_REJECTED: ExitCode.ACCOUNT,
    StopReason.ACCOUNT: ExitCode.ACCOUNT,
    StopReason.NO_ENDPOINT: ExitCode.NO_ENDPOINT,
    StopReason.INTERRUPTED: ExitCode.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one call of the command is about."""

    folder: RunFolder
    config: RunConfig
    files: tuple[Path, ...]
    policy: ExclusionPolicy
    cap: str | None
    max_in_flight: int
    as_json: bool

    def prompts(self) -> Iterator[Prompt]:
        """The prompts, read lazily."""
        if not self.files:
            return builtin_prompts()
        return chain.from_iterable(read_prompts(path) for path in self.files)

    def count_rows(self) -> int:
        """Rows to be had in all, duplicates included; one quick pass over the files."""
        if not self.files:
            return sum(1 for _ in builtin_prompts()) * self.config.rollouts
        return sum(_count_lines(path) for path in self.files) * self.config.rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What there is to tell at the end. `billed_pusd` is the embedded simulator's own bill."""

    report: RunReport
    bound: BoundPolicy
    statement: tuple[StatementLine, ...]
    balance: str
    spent_now_pusd: int
    reconciled: Reconciliation
    billed_pusd: int | None


def generate(
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(help="Prompt files (JSONL or .txt); the embedded set if none is given."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run's folder; an existing run is resumed.")
    ] = Path("runs/default"),
    cap: Annotated[
        str | None,
        typer.Option(help="Hard cap in USD, for the whole run; kept from last time if left out."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model id.")] = options.DEFAULT_MODEL,
    max_output_tokens: Annotated[
        int, typer.Option(help="Most tokens of one answer, reasoning included.")
    ] = 4_096,
    rollouts: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed sent to the model.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--instant", help="Reasoning on or off; default: the model's."),
    ] = None,
    exclude: options.Exclude = None,
    only: options.Only = None,
    accept: options.Accept = None,
    accept_unknown: options.AcceptUnknown = None,
    native: options.Native = None,
    evidence: options.Evidence = None,
    max_input_price: options.MaxInputPrice = None,
    max_output_price: options.MaxOutputPrice = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests on the wire at once.")
    ] = DEFAULT_MAX_IN_FLIGHT,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Rehearse against the embedded simulator: no key, free."),
    ] = False,
    scenario: Annotated[Path | None, typer.Option(help="Scenario file for --simulate.")] = None,
    simulator_seed: Annotated[int, typer.Option(help="Seed for --simulate.")] = 0,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Generate answers to PROMPTS from eligible endpoints, within a hard cap.

    Running the same command again goes on where the last one stopped: every row exists once, every
    answer that was paid for is kept. Exit code 3 means that the cap was reached: raise it.
    """
    files = tuple(prompts or ())
    policy = options.build_policy(
        exclude=exclude,
        only=only,
        accept=accept,
        accept_unknown=accept_unknown,
        native=native,
        evidence=evidence,
        max_input_price=max_input_price,
        max_output_price=max_output_price,
    )
    folder = RunFolder(out)
    if cap is None and not folder.store.exists():
        raise ConfigurationError("--cap is needed for a new run: a hard limit in USD such as 5.00")
    config = RunConfig(
        name=folder.name,
        model=model,
        max_output_tokens=max_output_tokens,
        sampling=options.build_sampling(
            temperature=temperature, top_p=top_p, seed=seed, thinking=thinking
        ),
        rollouts=rollouts,
        datasets=tuple(dict.fromkeys(_dataset_names(files))),
        policy_class=_policy_class(policy),
        sources=tuple(DatasetSource.of(path) for path in files),
    )
    job = _Job(
        folder=folder,
        config=config,
        files=files,
        policy=policy,
        cap=cap,
        max_in_flight=max_in_flight,
        as_json=as_json,
    )

    async def main() -> _Outcome:
        async with opened_target(
            base_url=base_url,
            ca_file=ca_file,
            simulate=simulate,
            scenario=scenario,
            seed=simulator_seed,
        ) as target:
            return await _perform(job, target)

    outcome = asyncio.run(main())
    if as_json:
        typer.echo(json.dumps(_as_data(outcome), indent=2))
    else:
        _print(job, outcome)
    code = _EXIT_CODES[outcome.report.stop_reason]
    if code is ExitCode.DONE and outcome.report.gave_up:
        code = ExitCode.INCOMPLETE
    raise typer.Exit(code)


async def _perform(job: _Job, target: Target) -> _Outcome:
    async with (
        BudgetLedger.open(job.folder.store, cap=job.cap) as ledger,
        Client(
            ledger=ledger,
            policy=job.policy,
            service=target.service,
            key=target.key,
            max_in_flight=job.max_in_flight,
        ) as client,
    ):
        bound = await client.verdicts(job.config.model, sampling=job.config.sampling)
        if not job.as_json:
            Console().print(verdict_table(bound, title=job.config.model))
        before_pusd = ledger.balance().posted_pusd
        # The embedded simulator starts with an account of its own each time.
        await client.note_baseline(renew=target.simulator is not None)
        run = Run(client, job.config, job.prompts())
        reporter = Reporter(client, total_rows=job.count_rows(), is_silent=job.as_json)
        with reporter, run.install_signal_handlers():
            report = await run.execute(reporter.on_progress)
        reconciled = await client.reconcile(patience_s=20.0)
        return _Outcome(
            report=report,
            bound=bound,
            statement=await ledger.statement(),
            balance=balance_line(ledger.balance()),
            spent_now_pusd=ledger.balance().posted_pusd - before_pusd,
            reconciled=reconciled,
            billed_pusd=None if target.simulator is None else target.simulator.bill.total_pusd,
        )


def _print(job: _Job, outcome: _Outcome) -> None:
    console = Console()
    report = outcome.report
    console.print(ledger_table(outcome.statement, title="ledger"))
    console.print(outcome.balance)
    if outcome.billed_pusd is not None:
        agree = "equal" if outcome.billed_pusd == outcome.spent_now_pusd else "NOT EQUAL"
        console.print(
            f"the simulator's own bill: {format_usd(outcome.billed_pusd, places=12)}; "
            f"posted by this start: {format_usd(outcome.spent_now_pusd, places=12)} ({agree})"
        )
    if outcome.reconciled.still_held:
        console.print(
            f"{outcome.reconciled.still_held} charges are not known yet and stay reserved; "
            f"`quantroute reconcile {job.folder.path}` settles them later",
            style="yellow",
        )
    classes = ", ".join(
        f"{count.rows:,} {(count.row_class.value if count.row_class else count.state.value)}"
        for count in report.counts
    )
    console.print(f"rows: {classes or 'none'}")
    console.print(_closing_line(job, report), style="bold")


def _closing_line(job: _Job, report: RunReport) -> str:
    if report.stop_reason is StopReason.DONE and not report.gave_up:
        return f"done; next: quantroute export {job.folder.path} rows.jsonl"
    if report.stop_reason is StopReason.DONE:
        return f"{report.gave_up:,} rows failed for now; the same command tries them again"
    return f"stopped: {report.error or report.stop_reason.value}"


def _as_data(outcome: _Outcome) -> dict[str, Any]:
    report = outcome.report
    return {
        "run": report.run,
        "stop_reason": report.stop_reason.value,
        "finished": report.finished,
        "resumed": report.resumed,
        "refused": report.refused,
        "gave_up": report.gave_up,
        "duplicates": report.duplicates,
        "elapsed_s": round(report.elapsed_s, 3),
        "spent_pusd": report.spent_pusd,
        "held_charges": outcome.reconciled.still_held,
        "eligible": [str(endpoint.key) for endpoint in outcome.bound.eligible],
        "by_endpoint": [
            {
                "account": line.account,
                "endpoint": line.endpoint,
                "attempts": line.entries,
                "output_tokens": line.output_tokens,
                "posted_pusd": line.posted_pusd,
            }
            for line in outcome.statement
        ],
        "rows": [
            {
                "dataset": count.dataset,
                "state": count.state.value,
                "class": count.row_class.value if count.row_class else None,
                "rows": count.rows,
            }
            for count in report.counts
        ],
    }


def _dataset_names(files: Iterable[Path]) -> list[str]:
    names = [dataset_name(path.stem) for path in files]
    return names or sorted({prompt.dataset for prompt in builtin_prompts()})


def _policy_class(policy: ExclusionPolicy) -> str:
    """Which formats rows may come from: rows made under different answers to that never meet."""
    described = policy.as_dict()
    unknown = described["accept_unknown"]
    parts = [described["native"] or "native", *described["accept"]]
    if unknown is True:
        parts.append("unknown")
    elif unknown:
        parts.extend(f"unknown:{name}" for name in sorted(unknown))
    return "+".join(parts)


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
