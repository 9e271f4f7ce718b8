"""What a ledger shows: balances and statements, as frozen values."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields

from quantroute.ledger._records import Account
from quantroute.ledger._state import AccountState
from quantroute.money import NO_CAP, Cap

__all__ = ["Balance", "StatementLine", "balance_of", "read_statement"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """Resolved attempts of one account (itself, not those below) at one endpoint.

    `estimated_pusd` is the part of `posted_pusd` that rests on listed prices or on the bound.
    """

    account: Account
    endpoint: str
    entries: int
    voided: int
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    posted_pusd: int
    estimated_pusd: int


def balance_of(account: Account, state: AccountState) -> Balance:
    """The frozen balance of a running state."""
    return Balance(
        account=account, **{item.name: getattr(state, item.name) for item in fields(state)}
    )


def read_statement(connection: sqlite3.Connection) -> tuple[StatementLine, ...]:
    """One line per account and endpoint, summed over the journal."""
    rows = connection.execute(
        """
        SELECT account, endpoint, count(*), sum(kind = 'voided'),
               total(input_tokens), total(output_tokens), total(reasoning_tokens),
               total(cached_tokens), total(cache_write_tokens),
               coalesce(sum(amount_pusd) FILTER (WHERE kind = 'posted'), 0),
               coalesce(sum(amount_pusd) FILTER (WHERE basis IN ('priced', 'bound')), 0)
        FROM journal WHERE kind IN ('posted', 'voided')
        GROUP BY account, endpoint ORDER BY account, endpoint
        """
    )
    return tuple(
        StatementLine(
            account=Account(account),
            endpoint=endpoint,
            entries=entries,
            voided=voided,
            input_tokens=int(input_tokens),
            output_tokens=int(output_tokens),
            reasoning_tokens=int(reasoning_tokens),
            cached_tokens=int(cached_tokens),
            cache_write_tokens=int(cache_write_tokens),
            posted_pusd=posted,
            estimated_pusd=estimated,
        )
        for (
            account,
            endpoint,
            entries,
            voided,
            input_tokens,
            output_tokens,
            reasoning_tokens,
            cached_tokens,
            cache_write_tokens,
            posted,
            estimated,
        ) in rows
    )
