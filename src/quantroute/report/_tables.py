"""Tables for terminals: the same facts that `--json` gives, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantroute.domain import Endpoint
from quantroute.generation import EndpointQuality, RowClass
from quantroute.ledger import Balance, StatementLine
from quantroute.money import NO_CAP, format_usd, usd_per_million
from quantroute.policy import BoundPolicy, Verdict, implausible_prices
from quantroute.report._scale import with_unit

__all__ = [
    "balance_line",
    "ledger_table",
    "price_warnings",
    "quality_table",
    "statement_totals",
    "verdict_table",
]

_MOST_DECIMALS: Final = 5
_UNLIMITED_COLUMNS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The first of several renderings, wide to narrow, that fits; the last one if none does."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_UNLIMITED_COLUMNS)
        for table in self.tables[:-1]:
            if console.measure(table, options=unlimited).maximum <= options.max_width:
                yield table
                return
        yield self.tables[-1]


def verdict_table(
    bound: BoundPolicy, *, title: str, wording: Callable[[str], str] = str
) -> RenderableType:
    """Eligible endpoints first, by output price; then why each of the others is left out.

    Reasons stand below the table, not in a column of it: they are sentences, and a narrow terminal
    would break them into a word a line. Endpoints with the same reasons share a line. Below them
    are prices that can hardly be meant.

    Args:
        wording: applied to each reason, for readers who do not set things the way Python does.
    """
    verdicts = bound.ranked
    table: RenderableType = _Fitting(
        [_verdicts(verdicts, title=title, is_wide=is_wide) for is_wide in (True, False)]
    )
    left_out: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        if not verdict.eligible:
            reasons = tuple(wording(reason.text) for reason in verdict.excluding)
            left_out.setdefault(reasons, []).append(str(verdict.endpoint.key))
    warnings = price_warnings([verdict.endpoint for verdict in verdicts])
    if not left_out and not warnings:
        return table
    lines: list[RenderableType] = [_why(names, reasons) for reasons, names in left_out.items()]
    if lines:
        lines.insert(0, Text("left out:"))
    return Group(table, *lines, *warnings, Text())


def price_warnings(endpoints: Sequence[Endpoint]) -> list[RenderableType]:
    """Lines about listed prices that can hardly be meant; none is the rule."""
    found = implausible_prices(endpoints)
    if not found:
        return []
    lines = (_why([str(key)], [problem]) for key, problem in found.items())
    return [Text("look before spending:", style="yellow"), *lines]


def _verdicts(verdicts: Sequence[Verdict], *, title: str, is_wide: bool) -> Table:
    table = _table(title, is_wide=is_wide)
    table.add_column("use")
    table.add_column("endpoint", overflow="fold")
    table.add_column("precision", overflow="fold")
    table.add_column("$/M in", justify="right", no_wrap=True)
    table.add_column("$/M out", justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    pricings = [verdict.endpoint.pricing for verdict in verdicts]
    inputs = _price_column([pricing.input_usd_per_token for pricing in pricings])
    outputs = _price_column([pricing.output_usd_per_token for pricing in pricings])
    for verdict, input_price, output_price in zip(verdicts, inputs, outputs, strict=True):
        table.add_row(
            Text("yes", style="green") if verdict.eligible else Text("no", style="red"),
            Text(str(verdict.endpoint.key)),
            _precision(verdict),
            input_price,
            output_price,
            _status(verdict.endpoint, is_wide=is_wide),
            style="" if verdict.eligible else "dim",
        )
    return table


def _why(names: Iterable[str], reasons: Iterable[str]) -> Padding:
    line = Text.assemble((", ".join(names), "bold"), ": ", "; ".join(reasons))
    return Padding(line, (0, 0, 0, 2))


def ledger_table(lines: Iterable[StatementLine], *, title: str) -> RenderableType:
    """The statement: tokens and money per account and endpoint, with a total.

    Several accounts stand one below the other, each with its endpoints and its sum.
    """
    lines = tuple(lines)
    return _Fitting([_ledger(lines, title=title, is_wide=is_wide) for is_wide in (True, False)])


def _ledger(lines: Sequence[StatementLine], *, title: str, is_wide: bool) -> Table:
    accounts = sorted({line.account for line in lines})
    has_one_account = len(accounts) == 1
    table = _table(f"{title}: {accounts[0]}" if has_one_account else title, is_wide=is_wide)
    table.show_footer = bool(lines)
    total = _cells("total", lines, is_wide=is_wide)
    headings = ["endpoint", "tries", "input", "output", "reasoning", "spent", "$/M out"]
    if not is_wide:
        headings.remove("reasoning")
    for heading, footer in zip(headings, total, strict=True):
        if heading == "endpoint":
            table.add_column(heading, footer=footer, overflow="fold")
        else:
            table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for account in accounts:
        own = [line for line in lines if line.account == account]
        if not has_one_account:
            table.add_row(*_cells(account or "(no account)", own, is_wide=is_wide), style="bold")
        indent = "" if has_one_account else "  "
        for line in own:
            table.add_row(*_cells(indent + line.endpoint, [line], is_wide=is_wide))
    return table


def _cells(name: str, lines: Iterable[StatementLine], *, is_wide: bool) -> list[Text]:
    totals = statement_totals(lines)
    counts = ["tries", "input", "output"] + ["reasoning"] * is_wide
    return [
        Text(name),
        *(Text(_compact(totals[count])) for count in counts),
        Text(format_usd(totals["posted_pusd"])),
        Text(_per_million(totals["posted_pusd"], totals["output"])),
    ]


def statement_totals(lines: Iterable[StatementLine]) -> dict[str, int]:
    """Sums over a statement, by the names the ledger table uses."""
    totals = dict.fromkeys(("tries", "input", "output", "reasoning", "cached", "posted_pusd"), 0)
    for line in lines:
        totals["tries"] += line.entries
        totals["input"] += line.input_tokens
        totals["output"] += line.output_tokens
        totals["reasoning"] += line.reasoning_tokens
        totals["cached"] += line.cached_tokens
        totals["posted_pusd"] += line.posted_pusd
    return totals


def quality_table(qualities: Iterable[EndpointQuality], *, title: str) -> RenderableType:
    """What came from each endpoint: answers by class in per cent, and what a good one cost."""
    rows = tuple(qualities)
    return _Fitting([_qualities(rows, title=title, is_wide=is_wide) for is_wide in (True, False)])


def _qualities(rows: Sequence[EndpointQuality], *, title: str, is_wide: bool) -> Table:
    table = _table(title, is_wide=is_wide)
    seen = [item for item in RowClass if any(row.classes.get(item) for row in rows)]
    # A column per class that occurs; a narrow terminal shows the sum of the bad ones.
    bad = [item for item in seen if item is not RowClass.GOOD] if is_wide else []
    table.add_column("endpoint", overflow="fold")
    headings = ["answers", "accepted", *(item.value.replace("_", " ") for item in bad)]
    for heading in [*headings, "$/row", "$/M"]:
        table.add_column(heading, justify="right", no_wrap=heading not in headings[2:])
    for row in rows:
        table.add_row(
            Text(row.endpoint),
            _compact(row.answers),
            _percent(row, RowClass.GOOD),
            *(_percent(row, item) for item in bad),
            _per_row(row),
            _per_million(row.cost_pusd, row.accepted_tokens),
        )
    return table


def _percent(row: EndpointQuality, row_class: RowClass) -> str:
    return f"{row.rate(row_class):.1%}" if row.answers else "-"


def _per_row(row: EndpointQuality) -> str:
    # Display only: dollars per accepted answer, everything paid there included.
    return "-" if not row.accepted else f"{Decimal(row.cost_pusd) / row.accepted / 10**12:.6f}"


def balance_line(balance: Balance) -> str:
    """One line: spent, reserved, left."""
    spent = f"spent {format_usd(balance.posted_pusd, places=6)}"
    cap = "no cap" if balance.cap is NO_CAP else f"cap {format_usd(balance.cap, places=6)}"
    pending = (
        f", reserved {format_usd(balance.pending_pusd, places=6)}" if balance.pending_pusd else ""
    )
    return f"{spent}{pending}, {cap}"


def _table(title: str, *, is_wide: bool) -> Table:
    return Table(
        title=Text(title, style="italic"),
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD if is_wide else None,
        padding=(0, 1) if is_wide else (0, 1, 0, 0),
        pad_edge=is_wide,
    )


def _precision(verdict: Verdict) -> str:
    judged = verdict.precision
    source = {"evidence": " (evidence)", "user": " (your choice)"}.get(judged.source, "")
    return f"{judged.quantization.value}{source}"


def _price_column(prices: Sequence[Decimal | None]) -> list[str]:
    """USD per million with the same number of decimals in each, so that the points align.

    Display only: five decimals at most; exact prices are in the JSON.
    """
    scaled = [None if price is None else usd_per_million(price) for price in prices]
    decimals = max((_decimals(price) for price in scaled if price is not None), default=2)
    places = Decimal(1).scaleb(-min(max(decimals, 2), _MOST_DECIMALS))
    return ["unknown" if price is None else f"{price.quantize(places):f}" for price in scaled]


def _decimals(price: Decimal) -> int:
    exponent = price.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _status(endpoint: Endpoint, *, is_wide: bool) -> str:
    if endpoint.status == 0:
        return "up"
    if not is_wide:
        return str(endpoint.status)
    return f"{'degraded' if endpoint.is_degraded else 'down'} ({endpoint.status})"


def _compact(count: int) -> str:
    """A count for people: exact below ten thousand, then 35.9k, 6.8M, 2.1G."""
    found = with_unit(count)
    return f"{count:,}" if found is None else f"{found[0]:.1f}{found[1]}"


def _per_million(amount_pusd: int, tokens: int) -> str:
    # Display only: dollars per million output tokens, everything included.
    return "-" if not tokens else f"{Decimal(amount_pusd) / tokens / 1_000_000:.2f}"
