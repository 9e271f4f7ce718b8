"""A hard cap on spending: reserve, then post, void or hold; exact, durable, shared."""

from quantroute.ledger._ledger import BudgetLedger
from quantroute.ledger._records import (
    ROOT,
    Account,
    Basis,
    Charge,
    EntryId,
    EntryStatus,
    check_account,
    lineage,
)
from quantroute.ledger._state import OpenEntry
from quantroute.ledger._statement import (
    Balance,
    Statement,
    StatementLine,
    posted_amounts_pusd,
    read_statement,
)
from quantroute.ledger._timeline import Moment, Timeline, journal_reader

__all__ = [
    "ROOT",
    "Account",
    "Balance",
    "Basis",
    "BudgetLedger",
    "Charge",
    "EntryId",
    "EntryStatus",
    "Moment",
    "OpenEntry",
    "Statement",
    "StatementLine",
    "Timeline",
    "check_account",
    "journal_reader",
    "lineage",
    "posted_amounts_pusd",
    "read_statement",
]
