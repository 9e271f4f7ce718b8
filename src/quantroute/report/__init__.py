"""Tables and pictures of what happened."""

from quantroute.report._live import LiveDataset, LiveEndpoint, LiveMeter, LiveView
from quantroute.report._plan import plan_lines, plan_tables
from quantroute.report._tables import (
    balance_line,
    ledger_table,
    quality_table,
    statement_totals,
    verdict_table,
)

__all__ = [
    "LiveDataset",
    "LiveEndpoint",
    "LiveMeter",
    "LiveView",
    "balance_line",
    "ledger_table",
    "plan_lines",
    "plan_tables",
    "quality_table",
    "statement_totals",
    "verdict_table",
]
