"""What `quantroute generate` says at the end: to people, and to programs."""

from __future__ import annotations

from typing import Any, Final

from quantroute.cli._exit import ExitCode
from quantroute.cli._job import Job, Outcome
from quantroute.cli._output import (
    comparison_data,
    counts_data,
    failure_lines,
    failures_data,
    print_quality,
    quality_data,
    rows_lines,
    say,
    show,
    statement_data,
)
from quantroute.cli._rundir import RunFolder
from quantroute.cli._wording import as_options, as_word, counted_rows
from quantroute.generation import RowClass, RunReport, StopReason
from quantroute.money import format_usd
from quantroute.report import balance_line, ledger_table

__all__ = ["exit_code", "outcome_data", "print_outcome", "print_run", "run_remarks"]

_EXIT_CODES: Final = {
    StopReason.DONE: ExitCode.DONE,
    StopReason.CAP_REACHED: ExitCode.CAP_REACHED,
    StopReason.OUT_OF_CREDITS: ExitCode.ACCOUNT,
    StopReason.KEY_REJECTED: ExitCode.ACCOUNT,
    StopReason.ACCOUNT: ExitCode.ACCOUNT,
    StopReason.NO_ENDPOINT: ExitCode.NO_ENDPOINT,
    StopReason.INTERRUPTED: ExitCode.INTERRUPTED,
}


def exit_code(report: RunReport) -> ExitCode:
    """The documented code for how a run ended."""
    code = _EXIT_CODES[report.stop_reason]
    return ExitCode.INCOMPLETE if code is ExitCode.DONE and report.gave_up else code


def print_outcome(job: Job, outcome: Outcome) -> None:
    """Ledger, books, rows, and what to do next."""
    report = outcome.report
    print_run(outcome, job.folder)
    for line in _remarks(job, report):
        say(line)
    say(_closing_line(job, report), bold=True)


def print_run(outcome: Outcome, folder: RunFolder) -> None:
    """What every run ends with: ledger, books, rows and why some have no answer, quality."""
    if outcome.statement:
        show(ledger_table(outcome.statement, title="ledger"))
    say(balance_line(outcome.balance))
    _print_books(outcome)
    if outcome.reconciled.still_held:
        say(
            f"{outcome.reconciled.still_held:,} charges are not known yet and stay reserved; "
            f"`quantroute reconcile {as_word(folder.path)}` settles them later"
        )
    for line in (*rows_lines(outcome.report.counts), *failure_lines(outcome.failures)):
        say(line)
    print_quality(outcome.report.endpoints, outcome.report.alarms)


def _print_books(outcome: Outcome) -> None:
    """Compare the ledger with the key's usage, and with the embedded simulator's own bill."""
    key = outcome.reconciled.key
    if key is not None and (outcome.billed_pusd is None or not key.agrees):
        say(key.explanation)
    settled = outcome.report.attendance.settled_entries
    if settled:
        say(f"{settled:,} charges of unknown outcome were found out during the run")
    if outcome.billed_pusd is None:
        return
    billed, posted = outcome.billed_pusd, outcome.spent_now_pusd
    if not billed and not posted:
        return
    if billed == posted:
        part = "" if posted == outcome.balance.posted_pusd else " of this start"
        amount = format_usd(billed, places=12)
        say(f"the simulator's own bill{part} agrees to the last digit: {amount}")
    else:
        say(
            f"the simulator's own bill is {format_usd(billed, places=12)}, "
            f"posted by this start: {format_usd(posted, places=12)}"
        )


def _remarks(job: Job, report: RunReport) -> list[str]:
    remarks = []
    if report.strays:
        remarks.append(
            f"{report.strays:,} rows of this run belong to no prompt of these files; "
            "they are kept and exported"
        )
    truncated = sum(count.rows for count in report.counts if count.row_class is RowClass.TRUNCATED)
    if truncated:
        remarks.append(
            f"{truncated:,} rows were cut at {job.config.max_output_tokens:,} tokens; have them "
            "again with --redo truncated and a higher --max-output-tokens"
        )
    return remarks + run_remarks(report)


def run_remarks(report: RunReport) -> list[str]:
    """What is worth knowing about a run that ended, and what to do about it."""
    remarks = []
    if report.resumed:
        remarks.append(f"{counted_rows(report.resumed)} done before and not asked again")
    if report.not_begun:
        remarks.append(
            f"{counted_rows(report.not_begun)} not asked yet, and a redo begins none: the same "
            "command without --redo does"
        )
    if report.duplicates:
        remarks.append(f"repeated prompts that were not asked again: {report.duplicates:,}")
    if report.refused:
        remarks.append(
            f"{counted_rows(report.refused)} refused and not tried again unless you say "
            "--retry-refused"
        )
    if report.is_late:
        remarks.append(
            f"it took {report.elapsed_s:,.0f} s, the deadline was {report.deadline_s:,.0f} s: more "
            "requests in flight or further endpoints would help"
        )
    if report.cut_off:
        remarks.append(f"{counted_rows(report.cut_off)} still in flight when time to wait was over")
    return remarks


def _closing_line(job: Job, report: RunReport) -> str:
    if report.stop_reason is StopReason.INTERRUPTED:
        return "interrupted; the same command goes on from here"
    if report.stop_reason is not StopReason.DONE:
        return f"stopped: {as_options(str(report.error or report.stop_reason.value))}"
    if report.gave_up:
        return f"{counted_rows(report.gave_up)} failed for now; the same command tries again"
    return f"done; next: quantroute export {as_word(job.folder.path)} rows.jsonl"


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """The same as JSON values."""
    report = outcome.report
    return {
        "run": report.run,
        "stop_reason": report.stop_reason.value,
        "exit_code": int(exit_code(report)),
        "error": None if report.error is None else str(report.error),
        "finished": report.finished,
        "resumed": report.resumed,
        "refused": report.refused,
        "gave_up": report.gave_up,
        "duplicates": report.duplicates,
        "elapsed_s": round(report.elapsed_s, 3),
        "deadline_s": report.deadline_s,
        "spent_pusd": report.spent_pusd,
        "held_charges": outcome.reconciled.still_held,
        "settled_during_run": report.attendance.settled_entries,
        "key_usage": {
            "at_start": comparison_data(report.attendance.at_start),
            "at_end": comparison_data(outcome.reconciled.key or report.attendance.at_end),
        },
        "simulator_bill_pusd": outcome.billed_pusd,
        "spent_by_this_start_pusd": outcome.spent_now_pusd,
        "eligible": [str(endpoint.key) for endpoint in outcome.bound.eligible],
        "by_endpoint": statement_data(outcome.statement),
        "rows": counts_data(report.counts),
        "failures": failures_data(outcome.failures),
        **quality_data(report.endpoints, report.alarms),
    }
