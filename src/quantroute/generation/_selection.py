"""Which rows of a run go into an export, what they add up to, and what is left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from quantroute._version import __version__
from quantroute.errors import ConfigurationError
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowCounts, RowState, StoredRow, StoredRun, TurnRecord
from quantroute.generation._report import truncation_rates
from quantroute.generation._shards import RowSource
from quantroute.ledger import StatementLine

__all__ = ["Choice", "Found", "Totals", "choose", "lines_of_run", "manifest_data"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which answers are wanted: of these classes, and not of the endpoints `without`.

    Raises:
        ConfigurationError: a class is quarantined.
    """

    classes: frozenset[RowClass]
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if RowClass.WRONG_PROVIDER in self.classes:
            raise ConfigurationError(
                "answers from a provider that was not asked are quarantined; "
                "they cannot be exported"
            )

    @classmethod
    def of(cls, classes: Set[RowClass], without: Set[str]) -> Choice:
        """The choice out of any sets."""
        return cls(frozenset(classes), frozenset(without))

    def takes(self, record: TurnRecord) -> bool:
        """Whether an answer may go out."""
        return record.row_class in self.classes and record.endpoint not in self.without


class Found(NamedTuple):
    """A stored row with those leading answers that are wanted; `is_whole` if these are all."""

    row: StoredRow
    leading: tuple[TurnRecord, ...]
    is_whole: bool


@dataclass(slots=True)
class Totals:
    """What the rows that went out add up to, and what kept the others."""

    rows: int = 0
    partial_rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    datasets: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    endpoints: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, row: StoredRow) -> None:
        """A row goes out."""
        self.rows += 1
        self.datasets[row.prompt.dataset] += 1
        for record in row.turns:
            self.classes[record.row_class.value] += 1
            endpoint = self.endpoints.setdefault(record.endpoint, Counter())
            endpoint["turns"] += 1
            endpoint["cost_pusd"] += record.cost_pusd or 0
            for name in ("input_tokens", "output_tokens", "reasoning_tokens"):
                endpoint[name] += getattr(record, name) or 0
                self.tokens[name] += getattr(record, name) or 0


async def choose(
    rows: RowSource, stored: StoredRun, choice: Choice, totals: Totals
) -> AsyncIterator[Found]:
    """Each row of the run, counted in `totals` as it goes by."""
    async for row in rows.rows(stored.run_id):
        leading = tuple(takewhile(choice.takes, row.turns))
        is_whole = len(leading) == len(row.prompt.turns)
        if is_whole:
            totals.count(row)
        else:
            totals.left_out[_why_left_out(row, leading, choice)] += 1
        yield Found(row, leading, is_whole)


def _why_left_out(row: StoredRow, leading: tuple[TurnRecord, ...], choice: Choice) -> str:
    if len(leading) < len(row.turns):
        first = row.turns[len(leading)]
        return first.row_class.value if first.row_class not in choice.classes else "endpoint_failed"
    if row.state is RowState.FINISHED and row.row_class is not None:
        return f"ended_by_{row.row_class.value}"
    return row.state.value


def manifest_data(
    stored: StoredRun,
    totals: Totals,
    choice: Choice,
    *,
    counts: Sequence[RowCounts],
    statement: Sequence[StatementLine],
) -> dict[str, Any]:
    """What a manifest says of an export, its files aside. `counts` are of the run's rows."""
    return {
        "quantroute_version": __version__,
        "rows": totals.rows,
        "chosen_classes": sorted(item.value for item in choice.classes),
        "without_endpoints": sorted(choice.without),
        "turns_per_class": dict(totals.classes),
        "rows_per_dataset": dict(totals.datasets),
        "tokens": dict(totals.tokens),
        "endpoints": {tag: dict(sums) for tag, sums in sorted(totals.endpoints.items())},
        "left_out": dict(totals.left_out),
        "run": stored.name,
        "run_config": stored.config,
        "run_config_sha256": stored.config_hash,
        "policy_class": stored.config["policy_class"],
        "sources": stored.config["sources"],
        "run_rows": [
            {
                "dataset": count.dataset,
                "state": count.state.value,
                "row_class": count.row_class.value if count.row_class else None,
                "rows": count.rows,
            }
            for count in counts
        ],
        "truncation_rates": truncation_rates(counts),
        "ledger": [_line_data(line) for line in lines_of_run(stored.name, statement)],
    }


def lines_of_run(run: str, lines: Sequence[StatementLine]) -> Iterator[StatementLine]:
    """The run's own lines: what it cost in all, answers that are not exported included."""
    for line in lines:
        if line.account == run or line.account.startswith(f"{run}/"):
            yield line


def _line_data(line: StatementLine) -> dict[str, Any]:
    return {
        name: getattr(line, name)
        for name in (
            "account",
            "endpoint",
            "entries",
            "voided",
            "input_tokens",
            "output_tokens",
            "reasoning_tokens",
            "cached_tokens",
            "cache_write_tokens",
            "posted_pusd",
            "estimated_pusd",
        )
    }
