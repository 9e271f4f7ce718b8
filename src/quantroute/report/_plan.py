"""A plan for terminals: what it costs, who serves, how the cap is shared, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantroute.generation import DatasetPlan, Plan, PlannedEndpoint, Way
from quantroute.money import format_usd
from quantroute.report._tables import (
    _compact,
    _Fitting,
    _price_column,
    _table,
    _why,
    price_warnings,
)

__all__ = ["plan_lines", "plan_tables", "ways_table"]


def plan_tables(plan: Plan, *, wording: Callable[[str], str] = str) -> RenderableType:
    """Endpoints with prices and reasons, then the datasets with their share of the cap.

    Args:
        wording: applied to each reason, for readers who do not set things the way Python does.
    """
    return Group(
        _Fitting([_endpoints(plan, is_wide=is_wide) for is_wide in (True, False)]),
        *_left_out(plan, wording),
        *price_warnings([item.endpoint for item in plan.endpoints]),
        Text(),
        _Fitting(
            [
                _datasets(plan, is_wide=True),
                _datasets(plan, is_wide=False),
                _datasets(plan, is_wide=False, is_short=True),
            ]
        ),
    )


def ways_table(ways: Sequence[Way]) -> RenderableType:
    """Own servers against the service: how long, how dear."""
    table = _table("own servers and hosted", is_wide=False)
    table.add_column("way", overflow="fold")
    for heading in ("own part", "time", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    has_deadline = any(way.in_time is not None for way in ways)
    if has_deadline:
        table.add_column("in time", no_wrap=True)
    for way in ways:
        cells = [way.name, f"{float(way.own_share):.0%}", _duration(way.time_s)]
        cells.append(format_usd(way.cost_pusd, places=2))
        if has_deadline:
            cells.append("yes" if way.in_time else "no")
        table.add_row(*map(Text, cells))
    if all(way.is_declared for way in ways):
        return table
    guess = "own speed is guessed from the seconds an answer takes: measure it, and give "
    return Group(table, Text(f"{guess}output_tokens_per_s"))


def plan_lines(plan: Plan) -> list[str]:
    """What to know before spending, in sentences."""
    about: dict[str, list[str]] = {}
    for item in plan.datasets:
        for text in (_expectation(item), *_remarks(item)):
            about.setdefault(text, []).append(item.name)
    return [
        _floor_line(plan),
        _cap_line(plan),
        _flow_line(plan),
        *(f"{', '.join(names)}: {text}" for text, names in about.items()),
    ]


def _floor_line(plan: Plan) -> str:
    prices = {item.lowest_output_usd_per_token for item in plan.datasets}
    at = f" at ${_price_column([*prices])[0]} per million" if len(prices) == 1 else ""
    whole = "with input and expected losses"
    if not plan.is_supplied:
        whole = "the prompts do not give as many; what they give costs"
    return (
        f"{plan.target_tokens:,} output tokens cost at least "
        f"{format_usd(plan.floor_pusd, places=2)} for output alone{at}; {whole} "
        f"{format_usd(plan.cost_low_pusd, places=2)} at the cheapest endpoints, "
        f"{format_usd(plan.cost_high_pusd, places=2)} at the dearest"
    )


def _cap_line(plan: Plan) -> str:
    cap = format_usd(plan.cap_pusd, places=2)
    spent = f" ({format_usd(plan.spent_pusd, places=2)} of it used)" if plan.spent_pusd else ""
    if plan.fits:
        return f"the cap of {cap}{spent} suffices{'' if plan.is_supplied else ' for that'}"
    shares = {item.affordable_tokens for item in plan.datasets}
    about = _compact(sum(shares) // len(shares))
    each = f", about {about} each" if len(plan.datasets) > 1 and _are_alike(shares) else ""
    return (
        f"the cap of {cap}{spent} affords {_compact(plan.affordable_tokens)} of "
        f"{_compact(plan.target_tokens)} tokens{each}; a cap of "
        f"{format_usd(_needed_pusd(plan), places=2)} would reach every target"
    )


def _needed_pusd(plan: Plan) -> int:
    """Rounded up to a whole cent, so that the figure as printed suffices."""
    cent = 10**10
    return -(-plan.least_cap_pusd // cent) * cent


def _are_alike(shares: set[int]) -> bool:
    return max(shares) <= 1.02 * min(shares)


def _flow_line(plan: Plan) -> str:
    holds = sorted(item.hold_pusd for item in plan.datasets)
    hold = " to ".join(dict.fromkeys(format_usd(amount) for amount in (holds[0], holds[-1])))
    admitted = sum(item.admitted for item in plan.datasets)
    line = (
        f"each request holds up to {hold} until its bill is known; the cap admits {admitted:,} at "
        f"once, {plan.max_in_flight:,} are asked"
    )
    if not all(item.can_begin for item in plan.datasets):
        line += ": without the first hold nothing is asked"
    if plan.time_s is None:
        return line
    speed = "measured" if all(item.expectation.is_measured for item in plan.datasets) else "assumed"
    return (
        f"{line}; about {_duration(plan.time_s)} with {plan.in_flight:,} in flight ({speed} speed)"
    )


def _expectation(item: DatasetPlan) -> str:
    expected = item.expectation
    sureness = expected.sureness
    if not expected.is_measured:
        sureness = f"assumed: {expected.output_tokens:,.0f} tokens an answer"
    return (
        f"{sureness}, {expected.reasoning_share:.0%} reasoning, "
        f"{expected.truncated_share:.1%} truncated, {expected.accepted_share:.1%} of tokens "
        f"accepted; input {_compact(item.input_tokens)} tokens "
        f"(at most {_compact(item.input_bound_tokens)})"
    )


def _remarks(item: DatasetPlan) -> list[str]:
    remarks, census = [], item.census
    if census.duplicates_within or census.duplicates_across:
        remarks.append(
            f"{census.duplicates_within:,} prompts repeat others of this dataset, "
            f"{census.duplicates_across:,} those of datasets before it; each is asked once"
        )
    if not item.is_supplied:
        remarks.append(
            f"its prompts give {item.planned_rows:,} more rows and the target needs about "
            f"{item.needed_rows:,}: add prompts, or set rollouts = {item.rollouts_needed}"
        )
    if item.ended_rows:
        remarks.append(
            f"{item.ended_rows:,} rows are done, with {item.accepted.output_tokens:,} accepted "
            f"tokens, for {format_usd(item.spent_pusd)}"
        )
    limit = item.spec.cap_pusd
    if limit is not None and limit < item.spent_pusd + item.cost_low_pusd:
        remarks.append(f"its own cap of {format_usd(limit, places=2)} stops it short")
    return remarks


def _endpoints(plan: Plan, *, is_wide: bool) -> Table:
    table = _table(plan.model, is_wide=is_wide)
    table.add_column("use")
    table.add_column("endpoint", overflow="fold")
    table.add_column("$/M in", justify="right", no_wrap=True)
    table.add_column("$/M out", justify="right", no_wrap=True)
    table.add_column("for", overflow="fold")
    listed = sorted(plan.endpoints, key=_by_use_and_price)
    pricings = [item.endpoint.pricing for item in listed]
    inputs = _price_column([pricing.input_usd_per_token for pricing in pricings])
    outputs = _price_column([pricing.output_usd_per_token for pricing in pricings])
    for item, input_price, output_price in zip(listed, inputs, outputs, strict=True):
        table.add_row(
            Text("yes", style="green") if item.serves else Text("no", style="red"),
            Text(str(item.endpoint.key)),
            input_price,
            output_price,
            Text(_serves(item, plan)),
            style="" if item.serves else "dim",
        )
    return table


def _serves(item: PlannedEndpoint, plan: Plan) -> str:
    return "all" if len(item.serves) == len(plan.datasets) else ", ".join(item.serves) or "-"


def _left_out(plan: Plan, wording: Callable[[str], str]) -> list[RenderableType]:
    """Endpoints with the same reasons share a line."""
    names: dict[tuple[str, ...], list[str]] = {}
    for item in sorted(plan.endpoints, key=_by_use_and_price):
        if item.reasons:
            reasons = tuple(map(wording, item.reasons))
            names.setdefault(reasons, []).append(str(item.endpoint.key))
    if not names:
        return []
    return [Text("left out:"), *(_why(keys, reasons) for reasons, keys in names.items())]


def _by_use_and_price(item: PlannedEndpoint) -> tuple[int, bool, float, str]:
    price = item.endpoint.pricing.output_usd_per_token
    return (-len(item.serves), price is None, float(price or 0), str(item.endpoint.key))


def _datasets(plan: Plan, *, is_wide: bool, is_short: bool = False) -> Table:
    """`is_short` leaves out what can be reckoned from the rest or stands in the run's file."""
    table = _table(f"{plan.allocation.value} shares", is_wide=is_wide)
    table.show_footer = len(plan.datasets) > 1
    columns: Sequence[tuple[str, str]] = (
        ("rows", f"{sum(item.planned_rows for item in plan.datasets):,}"),
        ("target", _compact(plan.target_tokens)),
        (
            "cost",
            _span(plan.cost_low_pusd - plan.spent_pusd, plan.cost_high_pusd - plan.spent_pusd),
        ),
        ("share", format_usd(sum(item.share_pusd for item in plan.datasets), places=2)),
        ("affords", _compact(plan.affordable_tokens)),
        ("cap", format_usd(sum(item.cap_pusd for item in plan.datasets), places=2)),
        ("reached", ""),
    )
    shown = [not is_short or name not in ("target", "affords", "cap") for name, _ in columns]
    table.add_column("dataset", footer="total", overflow="fold")
    for heading, footer in compress(columns, shown):
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for item in plan.datasets:
        cells = (
            f"{item.planned_rows:,}",
            _compact(item.target_tokens),
            _span(item.cost_low_pusd, item.cost_high_pusd),
            format_usd(item.share_pusd, places=2),
            _compact(item.affordable_tokens),
            format_usd(item.cap_pusd, places=2),
            f"{item.reached:.0%}",
        )
        table.add_row(item.name, *compress(cells, shown))
    return table


def _span(low_pusd: int, high_pusd: int) -> str:
    low, high = format_usd(low_pusd, places=2), format_usd(high_pusd, places=2)
    return low if low == high else f"{low}-{high.removeprefix('$')}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7_200 else f"{seconds / 3_600:,.1f} h"
