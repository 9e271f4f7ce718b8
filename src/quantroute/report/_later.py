"""The page's sections on what came after generation: audit, training, acceptance. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quantroute._html import Html, joined, tag
from quantroute.report._charts import Bar, Line, bars, lines
from quantroute.report._extras import (
    Extras,
    Found,
    TrainingCurve,
    audit_line,
    read_acceptance,
    read_audit,
    read_training,
)
from quantroute.report._parts import card, legend, note, plain_tables, table_of
from quantroute.report._scale import short_number

__all__ = ["acceptance", "audit", "training"]

_SPLIT_STYLES: Final = ("c1", "c2", "c3", "c4")


def audit(extras: Extras) -> Html:
    """What the audit found about each endpoint."""
    data = _data(extras.audit)
    if data is None:
        return Html("")
    rest, found = read_audit(data)
    return card(
        "Audit",
        table_of([audit_line(item) for item in found], caption="Audit by endpoint")
        if found
        else "",
        tag("details", tag("summary", "More"), plain_tables(rest, caption="Audit")),
        wide=True,
    )


def training(extras: Extras) -> Html:
    """Loss and accuracy over the steps, a card for each figure."""
    data = _data(extras.training)
    if data is None:
        return Html("")
    curves = read_training(data)
    figures = list(dict.fromkeys(curve.figure for curve in curves))
    return joined(
        _curve_card(figure, [curve for curve in curves if curve.figure == figure])
        for figure in figures
    )


def _curve_card(figure: str, curves: Sequence[TrainingCurve]) -> Html:
    series = [
        Line(name=curve.split, points=curve.points, style=style)
        for curve, style in zip(curves, _SPLIT_STYLES, strict=False)
    ]
    last = "; ".join(
        f"{curve.split}: {short_number(curve.points[-1][1])} at step "
        f"{short_number(curve.points[-1][0])}"
        for curve in curves
    )
    title = f"Training: {figure}"
    return card(
        title,
        lines(series, title=f"{title} over steps", description=f"Last {last}."),
        legend((line.style, line.name) for line in series),
        note(f"Last {last}."),
    )


def acceptance(extras: Extras) -> Html:
    """Tokens per pass of the target."""
    data = _data(extras.acceptance)
    if data is None:
        return Html("")
    found = read_acceptance(data)
    said = "Tokens per pass of the target; without a drafter it is 1."
    if found.longest is not None:
        said += f" At most {found.longest:g} are possible."
    drawn = [
        Bar(
            label=name,
            value=length,
            text=f"{length:.2f}",
            style="c1" if name.startswith("trained") else "c6",
        )
        for name, length in found.lengths
    ]
    return card(
        "Acceptance length",
        bars(drawn, title="Acceptance length", description=said) if drawn else "",
        note(said),
        tag("details", tag("summary", "More"), plain_tables(found.rest, caption="Acceptance"))
        if found.rest
        else "",
    )


def _data(found: Found | None) -> Any:
    return None if found is None or found.problem else found.data
