"""Tables for terminals: the same facts that `--json` gives, for people."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantroute.domain import Endpoint
from quantroute.ledger import Balance, StatementLine
from quantroute.money import NO_CAP, format_usd, usd_per_million
from quantroute.policy import BoundPolicy, Verdict

__all__ = ["balance_line", "ledger_table", "statement_totals", "verdict_table"]


def verdict_table(bound: BoundPolicy, *, title: str) -> RenderableType:
    """Eligible endpoints first, by output price; then why each of the others is left out.

    Reasons stand below the table, not in a column of it: they are sentences, and a narrow terminal
    would break them into a word a line.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("use")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("$/M in", justify="right", no_wrap=True)
    table.add_column("$/M out", justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    left_out = []
    for verdict in sorted(bound.verdicts, key=_by_eligibility_and_price):
        endpoint = verdict.endpoint
        table.add_row(
            Text("yes", style="green") if verdict.eligible else Text("no", style="red"),
            str(endpoint.key),
            _precision(verdict),
            _price(endpoint.pricing.input_usd_per_token),
            _price(endpoint.pricing.output_usd_per_token),
            _status(endpoint),
            style="" if verdict.eligible else "dim",
        )
        if not verdict.eligible:
            left_out.append(_why(verdict))
    if not left_out:
        return table
    return Group(table, Text("left out:"), *left_out, Text())


def _why(verdict: Verdict) -> Padding:
    reasons = "; ".join(reason.text for reason in verdict.excluding)
    line = Text.assemble((str(verdict.endpoint.key), "bold"), ": ", reasons)
    return Padding(line, (0, 0, 0, 2))


def ledger_table(lines: Iterable[StatementLine], *, title: str) -> Table:
    """The statement: tokens and money per account and endpoint, with a total."""
    lines = tuple(lines)
    totals = statement_totals(lines)
    accounts = {line.account for line in lines}
    has_one_account = len(accounts) == 1
    table = Table(
        title=f"{title}: {min(accounts)}" if has_one_account else title,
        title_justify="left",
        header_style="bold",
        show_footer=bool(lines),
        box=box.SIMPLE_HEAD,
    )
    if not has_one_account:  # otherwise a column of one repeated word
        table.add_column("account", overflow="fold", min_width=12)
    table.add_column("endpoint", footer="total", no_wrap=True)
    for name in ("tries", "input", "output", "reasoning"):
        table.add_column(name, justify="right", footer=_compact(totals[name]), no_wrap=True)
    spent = format_usd(totals["posted_pusd"])
    table.add_column("spent", justify="right", footer=spent, no_wrap=True)
    table.add_column("$/M out", justify="right", no_wrap=True)
    for line in lines:
        first = () if has_one_account else (line.account or "(root)",)
        table.add_row(
            *first,
            line.endpoint,
            _compact(line.entries),
            _compact(line.input_tokens),
            _compact(line.output_tokens),
            _compact(line.reasoning_tokens),
            format_usd(line.posted_pusd),
            _per_million(line.posted_pusd, line.output_tokens),
        )
    return table


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


def balance_line(balance: Balance) -> str:
    """One line: spent, reserved, left."""
    spent = f"spent {format_usd(balance.posted_pusd, places=6)}"
    cap = "no cap" if balance.cap is NO_CAP else f"cap {format_usd(balance.cap, places=6)}"
    pending = (
        f", reserved {format_usd(balance.pending_pusd, places=6)}" if balance.pending_pusd else ""
    )
    return f"{spent}{pending}, {cap}"


def _by_eligibility_and_price(verdict: Verdict) -> tuple[bool, Decimal, str]:
    price = verdict.endpoint.pricing.output_usd_per_token
    return (
        not verdict.eligible,
        Decimal("Infinity") if price is None else price,
        str(verdict.endpoint.key),
    )


def _precision(verdict: Verdict) -> str:
    judged = verdict.precision
    source = {"evidence": " (evidence)", "user": " (your choice)"}.get(judged.source, "")
    return f"{judged.quantization.value}{source}"


def _price(usd_per_token: Decimal | None) -> str:
    return "unknown" if usd_per_token is None else f"{usd_per_million(usd_per_token):f}"


def _status(endpoint: Endpoint) -> str:
    if endpoint.status == 0:
        return "up"
    return f"{'degraded' if endpoint.is_degraded else 'down'} ({endpoint.status})"


def _compact(count: int) -> str:
    """A count for people: exact below ten thousand, then three digits and a unit."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size:
            return f"{count / size:.1f}{unit}"
    return f"{count:,}"


def _per_million(amount_pusd: int, tokens: int) -> str:
    # Display only: dollars per million output tokens, everything included.
    return "-" if not tokens else f"{Decimal(amount_pusd) / tokens / 1_000_000:.2f}"
