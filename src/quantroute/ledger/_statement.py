"""What a ledger shows: balances and statements, as frozen values."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Final

from quantroute._html import notebook_table
from quantroute.ledger._records import Account, Basis, EntryId
from quantroute.ledger._state import OVERRUN, AccountState
from quantroute.money import NO_CAP, Cap, format_usd
from quantroute.pricing import TokenUsage

__all__ = [
    "Balance",
    "Statement",
    "StatementLine",
    "balance_of",
    "combined",
    "posted_amounts_pusd",
    "read_statement",
    "summed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """An account and everything below it. Units: pico-dollars, tokens.

    `pending_pusd` includes `held_pusd`, whose outcome is unknown. `overrun_pusd` is what charges
    exceeded their reservations by.
    """

    account: Account
    cap: Cap
    posted_pusd: int
    pending_pusd: int
    held_pusd: int
    overrun_pusd: int
    open_entries: int
    held_entries: int
    posted_entries: int
    voided_entries: int
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cache_write_tokens: int

    @property
    def available_pusd(self) -> int | None:
        """What may still be reserved; None without a cap, negative if the cap was lowered."""
        return None if self.cap is NO_CAP else self.cap - self.posted_pusd - self.pending_pusd

    def _repr_html_(self) -> str:
        """A table for notebooks: money, then attempts, then tokens."""
        cap = "no cap" if self.cap is NO_CAP else format_usd(self.cap, places=6)
        left = "-" if self.available_pusd is None else format_usd(self.available_pusd, places=6)
        return notebook_table(
            ("", ""),
            (
                ("spent", format_usd(self.posted_pusd, places=6)),
                ("reserved", format_usd(self.pending_pusd, places=6)),
                ("of it unknown", format_usd(self.held_pusd, places=6)),
                ("cap", cap),
                ("left", left),
                ("attempts paid, free, open", self._attempts()),
                ("input tokens", f"{self.input_tokens:,}"),
                ("output tokens", f"{self.output_tokens:,}"),
                ("of them reasoning", f"{self.reasoning_tokens:,}"),
            ),
            caption=f"account {self.account}" if self.account else "the whole ledger",
            numeric={1},
        )

    def _attempts(self) -> str:
        return f"{self.posted_entries:,}, {self.voided_entries:,}, {self.open_entries:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """Resolved attempts of one account (itself, not those below) at one endpoint.

    `entries` are the attempts, `voided` of which cost nothing; `overruns` were charged above their
    reservation. `posted_pusd` is the sum of the five amounts by basis (see `Basis`).
    Units: pico-dollars, tokens.
    """

    account: Account
    endpoint: str
    entries: int
    voided: int
    overruns: int
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    posted_pusd: int
    reported_pusd: int
    record_pusd: int
    key_usage_pusd: int
    priced_pusd: int
    bound_pusd: int

    @property
    def estimated_pusd(self) -> int:
        """The part that rests on listed prices or on the bound, not on the service's word."""
        return self.priced_pusd + self.bound_pusd


def combined(balances: Iterable[Balance], *, account: Account, cap: Cap) -> Balance:
    """The balance of an account whose entries lie in several files."""
    sums: Counter[str] = Counter()
    for balance in balances:
        for item in fields(balance):
            if item.name not in ("account", "cap"):
                sums[item.name] += getattr(balance, item.name)
    names = [item.name for item in fields(Balance) if item.name not in ("account", "cap")]
    return Balance(account=account, cap=cap, **{name: sums[name] for name in names})


def balance_of(account: Account, state: AccountState) -> Balance:
    """The frozen balance of a running state."""
    return Balance(
        account=account, **{item.name: getattr(state, item.name) for item in fields(state)}
    )


class Statement(tuple[StatementLine, ...]):
    """The lines of a statement; in a notebook they show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The table, with a row of sums; every text escaped."""
        return notebook_table(
            ("account", "endpoint", "tries", "input", "output", "reasoning", "spent", "$/M out"),
            map(_line_cells, self),
            numeric=range(2, 8),
            footer=("total", "", *_figures(self)),
        )


def _line_cells(line: StatementLine) -> tuple[str, ...]:
    return (line.account, line.endpoint, *_figures((line,)))


def _figures(lines: Sequence[StatementLine]) -> tuple[str, ...]:
    posted_pusd = sum(line.posted_pusd for line in lines)
    output_tokens = sum(line.output_tokens for line in lines)
    return (
        f"{sum(line.entries for line in lines):,}",
        f"{sum(line.input_tokens for line in lines):,}",
        f"{output_tokens:,}",
        f"{sum(line.reasoning_tokens for line in lines):,}",
        format_usd(posted_pusd, places=6),
        f"{Decimal(posted_pusd) / output_tokens / 1_000_000:.2f}" if output_tokens else "-",
    )


def summed(lines: Iterable[StatementLine]) -> Statement:
    """One line per account and endpoint out of the lines of several ledgers."""
    found: dict[tuple[Account, str], StatementLine] = {}
    for line in lines:
        before = found.get((line.account, line.endpoint))
        if before is not None:
            sums = {
                item.name: getattr(before, item.name) + getattr(line, item.name)
                for item in fields(line)
                if item.name not in ("account", "endpoint")
            }
            line = replace(line, **sums)
        found[line.account, line.endpoint] = line
    return Statement(found[key] for key in sorted(found))


_SUMS: Final = ", ".join(
    (
        "sum(kind = 'voided')",
        f"coalesce(sum(instr(' ' || flags || ' ', ' {OVERRUN} ') > 0), 0)",
        *(
            f"coalesce(sum({item.name}) FILTER (WHERE kind = 'posted'), 0)"
            for item in fields(TokenUsage)
        ),
        "coalesce(sum(amount_pusd) FILTER (WHERE kind = 'posted'), 0)",
        *(
            f"coalesce(sum(amount_pusd) FILTER (WHERE basis = '{basis.value}'), 0)"
            for basis in (
                Basis.REPORTED,
                Basis.RECORD,
                Basis.KEY_USAGE,
                Basis.PRICED,
                Basis.BOUND,
            )
        ),
    )
)
"""The sums of a line in the order of its fields, from `voided` on; every name here is our own."""


def read_statement(connection: sqlite3.Connection) -> Statement:
    """One line per account and endpoint, summed over the journal."""
    rows = connection.execute(
        f"SELECT account, endpoint, count(*), {_SUMS} FROM journal "  # noqa: S608 - our own names
        "WHERE kind IN ('posted', 'voided') "
        "GROUP BY account, endpoint ORDER BY account, endpoint"
    )
    names = [item.name for item in fields(StatementLine)]
    return Statement(StatementLine(**dict(zip(names, row, strict=True))) for row in rows)


def posted_amounts_pusd(
    connection: sqlite3.Connection, entry_ids: Iterable[EntryId]
) -> dict[EntryId, int]:
    """What was posted for these entries, pico-dollars; entries not posted are absent.

    For whoever keeps rows in the ledger's file and stored them before their charge was known.
    """
    found = {}
    for entry_id in entry_ids:
        row = connection.execute(
            "SELECT amount_pusd FROM journal WHERE entry_id = ? AND kind = 'posted'", (entry_id,)
        ).fetchone()
        if row is not None:
            found[entry_id] = row[0]
    return found
