"""An audit for terminals. A module of its own, since it needs the extra `quantroute[audit]`."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantroute.audit import AuditReport, Outcome, StringsReport
from quantroute.audit._page import DETAILS, STRINGS_DETAILS, details, strings_details
from quantroute.report._tables import _Fitting, _table

__all__ = ["audit_table", "strings_table"]

_STYLES: Final = {Outcome.PASSES: "green", Outcome.FAILS: "bold red", Outcome.TOO_FEW: "yellow"}


def audit_table(report: AuditReport) -> RenderableType:
    """One line per endpoint, the clearest failure first."""
    return Group(
        _Fitting([_endpoints(report, is_wide=is_wide) for is_wide in (True, False)]),
        *(Text(line) for line in report.notes),
    )


def _endpoints(report: AuditReport, *, is_wide: bool) -> Table:
    table = _table(f"audit of {report.model}", is_wide=is_wide)
    for name in ("endpoint", "verdict", "cause"):
        table.add_column(name)
    for name in ("tokens", "effect nats", "p"):
        table.add_column(name, justify="right")
    if is_wide:
        for name in DETAILS:
            table.add_column(name, justify="right")
    for item in report.endpoints:
        cells: list[str | Text] = [
            Text(item.endpoint),  # a name or a cause may look like markup
            Text(item.outcome.value, style=_STYLES[item.outcome]),
            Text(item.cause_text),
            f"{item.tokens:,}",
            f"{item.effect.mean_nats:+.4f}",
            f"{item.p_adjusted:.2g}",
        ]
        table.add_row(*cells, *(details(item) if is_wide else ()))
    return table


def strings_table(report: StringsReport) -> RenderableType:
    """One line per endpoint of a comparison of strings."""
    table = _table(f"{report.model}: answers against {report.reference}", is_wide=True)
    for name in ("endpoint", "verdict"):
        table.add_column(name)
    for name in STRINGS_DETAILS:
        table.add_column(name, justify="right")
    for item in report.endpoints:
        verdict = Text(item.outcome.value, style=_STYLES[item.outcome])
        table.add_row(Text(item.endpoint), verdict, *strings_details(item))
    return table
