"""What a ledger shows: balances and statements, as frozen values."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, Final

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
    "keep_sums",
    "posted_amounts_pusd",
    "prepare_sums",
    "read_statement",
    "replayed_statement",
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


_LINE_NAMES: Final = tuple(item.name for item in fields(StatementLine))
_JOURNAL_LINES: Final = f"""
    SELECT account, endpoint, count(*), {_SUMS} FROM journal
    WHERE kind IN ('posted', 'voided') AND seq > ? AND seq <= ? GROUP BY account, endpoint
"""  # noqa: S608 - our own names
_PLACES: Final = ", ".join("?" * len(_LINE_NAMES))
_LAST_SEQ: Final = "SELECT coalesce(max(seq), 0) FROM journal"


def read_statement(connection: sqlite3.Connection) -> Statement:
    """One line per account and endpoint: the kept sums, and what the journal has since."""
    kept, upto = _kept_lines(connection)
    (last,) = connection.execute(_LAST_SEQ).fetchone()
    return summed((*kept, *_journal_lines(connection, upto, last)))


def replayed_statement(connection: sqlite3.Connection) -> Statement:
    """The same from the journal alone."""
    (last,) = connection.execute(_LAST_SEQ).fetchone()
    return summed(_journal_lines(connection, 0, last))


def prepare_sums(connection: sqlite3.Connection) -> None:
    """Make the tables of `keep_sums`, also in files of before."""
    sums = ", ".join(f"{name} INTEGER NOT NULL" for name in _LINE_NAMES[2:])
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS statement_sums (account TEXT, endpoint TEXT, {sums}, "
        "PRIMARY KEY (account, endpoint)) STRICT, WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE IF NOT EXISTS statement_upto (seq INTEGER NOT NULL) STRICT")


def keep_sums(connection: sqlite3.Connection, *, most_records: int) -> bool:
    """Take some more of the journal into the kept sums; False once they have all of it.

    The journal only grows, so what was summed once stays so: a statement of a million attempts
    need not read a million records again at every start.
    """
    kept, upto = _kept_lines(connection)
    (last,) = connection.execute(_LAST_SEQ).fetchone()
    until: int = min(last, upto + most_records)
    if until == upto:
        return False
    lines = summed((*kept, *_journal_lines(connection, upto, until)))
    connection.executemany(
        f"INSERT OR REPLACE INTO statement_sums VALUES ({_PLACES})",  # noqa: S608
        [tuple(getattr(line, name) for name in _LINE_NAMES) for line in lines],
    )
    connection.execute("DELETE FROM statement_upto")
    connection.execute("INSERT INTO statement_upto VALUES (?)", (until,))
    return bool(until < last)


def _kept_lines(connection: sqlite3.Connection) -> tuple[list[StatementLine], int]:
    """The kept sums, and the last record that is in them; files of before have none."""
    try:
        found = connection.execute("SELECT seq FROM statement_upto").fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        return [], 0
    if found is None:
        return [], 0
    rows = connection.execute(f"SELECT {', '.join(_LINE_NAMES)} FROM statement_sums")  # noqa: S608
    return list(map(_line, rows)), found[0]


def _journal_lines(
    connection: sqlite3.Connection, after: int, until: int
) -> Iterator[StatementLine]:
    return map(_line, connection.execute(_JOURNAL_LINES, (after, until)))


def _line(row: Sequence[Any]) -> StatementLine:
    return StatementLine(**dict(zip(_LINE_NAMES, row, strict=True)))


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
