"""How commands print: tables through rich, everything else plain, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, RenderableType

from quantroute.cli._wording import as_options
from quantroute.client import KeyComparison, Reconciliation
from quantroute.generation import EndpointQuality, QualityAlarm, RowCounts, RowFailures
from quantroute.ledger import Balance, StatementLine
from quantroute.money import NO_CAP
from quantroute.report import quality_table

__all__ = [
    "balance_data",
    "comparison_data",
    "counts_data",
    "failure_lines",
    "failures_data",
    "print_json",
    "print_quality",
    "print_reconciliation",
    "quality_data",
    "rows_lines",
    "say",
    "show",
    "statement_data",
]


def show(table: RenderableType) -> None:
    """Print a table as wide as the terminal, 80 columns where there is none."""
    # Names come from the service: they must not be taken for rich's markup or emoji codes.
    Console(markup=False, emoji=False, highlight=False).print(table)


def say(text: str, *, bold: bool = False, err: bool = False) -> None:
    """Print a line as it is: what is to be copied must not be wrapped."""
    typer.secho(text, bold=bold, err=err)


def print_json(facts: dict[str, Any]) -> None:
    """Print an object for programs; money is in pico-dollars (`_pusd`) or exact text."""
    typer.echo(json.dumps(facts, indent=2))


def rows_lines(counts: Iterable[RowCounts]) -> list[str]:
    """One line per dataset: how many rows of each class, unfinished ones last."""
    lines: dict[str, list[str]] = {}
    for count in sorted(counts, key=lambda item: (item.dataset, item.row_class is None)):
        what = count.row_class.value if count.row_class else count.state.value
        lines.setdefault(count.dataset, []).append(f"{count.rows:,} {what.replace('_', ' ')}")
    return [f"rows of {dataset}: {', '.join(parts)}" for dataset, parts in lines.items()]


def failure_lines(failures: Iterable[RowFailures]) -> list[str]:
    """Why rows have no answer: a line for each kind, in the words of one row."""
    return [
        f"{item.rows:,} {item.state.value.replace('_', ' ')}"
        f"{f' (status {item.status})' if item.status else ''}"
        f"{', such as' if item.rows > 1 else ''}: {as_options(item.example)}"
        for item in failures
    ]


def failures_data(failures: Iterable[RowFailures]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "state": item.state.value,
            "status": item.status,
            "rows": item.rows,
            "example": item.example,
        }
        for item in failures
    ]


def counts_data(counts: Iterable[RowCounts]) -> list[dict[str, Any]]:
    """Row counts as JSON values."""
    return [
        {
            "dataset": count.dataset,
            "state": count.state.value,
            "class": count.row_class.value if count.row_class else None,
            "rows": count.rows,
        }
        for count in counts
    ]


def statement_data(statement: Iterable[StatementLine]) -> list[dict[str, Any]]:
    """The ledger by account and endpoint as JSON values."""
    return [
        {
            "account": line.account,
            "endpoint": line.endpoint,
            "attempts": line.entries,
            "input_tokens": line.input_tokens,
            "output_tokens": line.output_tokens,
            "reasoning_tokens": line.reasoning_tokens,
            "cached_tokens": line.cached_tokens,
            "posted_pusd": line.posted_pusd,
        }
        for line in statement
    ]


def balance_data(balance: Balance) -> dict[str, Any]:
    """A ledger's sums as JSON values."""
    return {
        "cap_pusd": None if balance.cap is NO_CAP else balance.cap,
        "posted_pusd": balance.posted_pusd,
        "pending_pusd": balance.pending_pusd,
        "held_entries": balance.held_entries,
        "held_pusd": balance.held_pusd,
        "input_tokens": balance.input_tokens,
        "output_tokens": balance.output_tokens,
        "reasoning_tokens": balance.reasoning_tokens,
    }


def comparison_data(found: KeyComparison | None) -> dict[str, Any] | None:
    """The key's usage beside the ledger, as JSON values; None if the service did not say."""
    if found is None:
        return None
    return {
        "usage_pusd": found.usage_pusd,
        "posted_pusd": found.posted_pusd,
        "held_pusd": found.held_pusd,
        "difference_pusd": found.difference_pusd,
        "is_explained": found.is_explained,
        "explanation": found.explanation,
    }


def print_reconciliation(done: Reconciliation) -> None:
    """How many charges were settled, and by what."""
    say(
        f"settled {done.settled_by_record} by record, {done.settled_by_key_usage} by the key's "
        f"usage, {done.settled_at_bound} at the bound; {done.still_held} still unknown"
    )
    if done.key is not None:
        say(done.key.explanation)
    if done.still_held:
        say(f"what is unknown stays reserved; reconcile again {_when_again(done)}")
        say("or charge it at its full reservation, for good: --charge-bound")


def _when_again(done: Reconciliation) -> str:
    if not done.quiet_in_s:
        return "later"
    minutes = math.ceil(done.quiet_in_s / 60.0)
    return (
        f"in {minutes} min, when requests without a record are surely over and the key's usage "
        "tells what they cost (--quiet-s shortens that)"
    )


def print_quality(qualities: Iterable[EndpointQuality], alarms: Iterable[QualityAlarm]) -> None:
    """What came from each endpoint, and which of them are worse than the others."""
    rows = tuple(qualities)
    if rows:
        show(quality_table(rows, title="answers by endpoint"))
    for alarm in alarms:
        say(f"quality alarm: {alarm}")


def quality_data(
    qualities: Iterable[EndpointQuality], alarms: Iterable[QualityAlarm]
) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "quality": [
            {
                "endpoint": item.endpoint,
                "answers": item.answers,
                "accepted": item.accepted,
                "classes": {name.value: count for name, count in item.classes.items()},
                "output_tokens": item.output_tokens,
                "accepted_tokens": item.accepted_tokens,
                "spent_pusd": item.cost_pusd,
            }
            for item in qualities
        ],
        "alarms": [
            {
                "endpoint": item.endpoint,
                "class": item.row_class.value,
                "answers": item.answers,
                "hits": item.hits,
                "other_answers": item.other_answers,
                "expected_hits": item.expected_hits,
            }
            for item in alarms
        ],
    }
