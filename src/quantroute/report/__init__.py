"""Tables and pictures of what happened."""

from quantroute.report._extras import Extras, find_extras
from quantroute.report._facts import (
    JudgedEndpoint,
    RunFacts,
    WantedDataset,
    read_facts,
    write_facts,
)
from quantroute.report._live import LiveDataset, LiveEndpoint, LiveMeter, LiveView
from quantroute.report._page import run_page
from quantroute.report._picture import FACTS_FILE, Picture, RunWatcher
from quantroute.report._plan import plan_lines, plan_tables, ways_table
from quantroute.report._server import DEFAULT_REPORT_PORT, ReportServer
from quantroute.report._tables import (
    balance_line,
    ledger_table,
    quality_table,
    statement_totals,
    verdict_table,
)

__all__ = [
    "DEFAULT_REPORT_PORT",
    "FACTS_FILE",
    "Extras",
    "JudgedEndpoint",
    "LiveDataset",
    "LiveEndpoint",
    "LiveMeter",
    "LiveView",
    "Picture",
    "ReportServer",
    "RunFacts",
    "RunWatcher",
    "WantedDataset",
    "balance_line",
    "find_extras",
    "ledger_table",
    "plan_lines",
    "plan_tables",
    "ways_table",
    "quality_table",
    "read_facts",
    "run_page",
    "statement_totals",
    "verdict_table",
    "write_facts",
]
