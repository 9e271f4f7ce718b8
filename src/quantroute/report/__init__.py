"""Tables and pictures of what happened."""

from quantroute.report._tables import (
    balance_line,
    ledger_table,
    statement_totals,
    verdict_table,
)

__all__ = ["balance_line", "ledger_table", "statement_totals", "verdict_table"]
