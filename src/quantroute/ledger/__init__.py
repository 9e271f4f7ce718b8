"""A hard cap on spending: reserve, then post, void or hold; exact, durable, shared."""

from quantroute.ledger._ledger import BudgetLedger
from quantroute.ledger._protocol import Ledger
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
from quantroute.ledger._shared import SharedLedger
from quantroute.ledger._state import OpenEntry
from quantroute.ledger._statement import (
    Balance,
    Statement,
    StatementLine,
    combined,
    posted_amounts_pusd,
    read_statement,
    summed,
)
from quantroute.ledger._timeline import Moment, Timeline, journal_reader, openable_journal

__all__ = [
    "ROOT",
    "Account",
    "Balance",
    "Basis",
    "BudgetLedger",
    "Charge",
    "EntryId",
    "EntryStatus",
    "Ledger",
    "Moment",
    "OpenEntry",
    "SharedLedger",
    "Statement",
    "StatementLine",
    "Timeline",
    "check_account",
    "combined",
    "journal_reader",
    "openable_journal",
    "lineage",
    "posted_amounts_pusd",
    "read_statement",
    "summed",
]
