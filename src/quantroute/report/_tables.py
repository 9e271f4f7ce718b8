"""Tables for terminals: the same facts that `--json` gives, for people."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from rich.table import Table
from rich.text import Text

from quantroute.domain import Endpoint
from quantroute.ledger import Balance, StatementLine
from quantroute.money import NO_CAP, format_usd, usd_per_million
from quantroute.policy import BoundPolicy, Verdict

__all__ = ["balance_line", "ledger_table", "statement_totals", "verdict_table"]


def verdict_table(bound: BoundPolicy, *, title: str) -> Table:
    """One row per endpoint: eligible ones first, each group by output price."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("provider", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("$/M in", justify="right")
    table.add_column("$/M out", justify="right")
    table.add_column("status", justify="right")
    table.add_column("reasons", overflow="fold", ratio=1)
    for verdict in sorted(bound.verdicts, key=_by_eligibility_and_price):
        endpoint = verdict.endpoint
        style = "" if verdict.eligible else "dim"
        table.add_row(
            Text("yes", style="green") if verdict.eligible else Text("no", style="red"),
            str(endpoint.key),
            endpoint.provider_name,
            _precision(verdict),
            _price(endpoint.pricing.input_usd_per_token),
            _price(endpoint.pricing.output_usd_per_token),
            _status(endpoint),
            "; ".join(reason.text for reason in verdict.reasons) or "-",
            style=style,
        )
    return table


def ledger_table(lines: Iterable[StatementLine], *, title: str) -> Table:
    """The statement: tokens and money per account and endpoint, with a total."""
    lines = tuple(lines)
    table = Table(
        title=title, title_justify="left", header_style="bold", show_footer=bool(lines)
    )
    totals = statement_totals(lines)
    table.add_column("account", footer="total")
    table.add_column("endpoint", no_wrap=True)
    for name in ("attempts", "input", "output", "reasoning", "cached"):
        table.add_column(name, justify="right", footer=f"{totals[name]:,}")
    table.add_column("spent", justify="right", footer=format_usd(totals["posted_pusd"], places=6))
    table.add_column("$/M out", justify="right")
    for line in lines:
        table.add_row(
            line.account or "(root)",
            line.endpoint,
            f"{line.entries:,}",
            f"{line.input_tokens:,}",
            f"{line.output_tokens:,}",
            f"{line.reasoning_tokens:,}",
            f"{line.cached_tokens:,}",
            format_usd(line.posted_pusd, places=6),
            _per_million(line.posted_pusd, line.output_tokens),
        )
    return table


def statement_totals(lines: Iterable[StatementLine]) -> dict[str, int]:
    """Sums over a statement, by the names the ledger table uses."""
    totals = dict.fromkeys(
        ("attempts", "input", "output", "reasoning", "cached", "posted_pusd"), 0
    )
    for line in lines:
        totals["attempts"] += line.entries
        totals["input"] += line.input_tokens
        totals["output"] += line.output_tokens
        totals["reasoning"] += line.reasoning_tokens
        totals["cached"] += line.cached_tokens
        totals["posted_pusd"] += line.posted_pusd
    return totals


def balance_line(balance: Balance) -> str:
    """One line: spent, reserved, left."""
    spent = f"spent {format_usd(balance.posted_pusd, places=6)}"
    if balance.cap is NO_CAP:
        cap = "no cap"
    else:
        cap = f"cap {format_usd(balance.cap, places=6)}"
    pending = (
        f", reserved {format_usd(balance.pending_pusd, places=6)}" if balance.pending_pusd else ""
    )
    return f"{spent}{pending}, {cap}"


def _by_eligibility_and_price(verdict: Verdict) -> tuple[bool, Decimal, str]:
    price = verdict.endpoint.pricing.output_usd_per_token
    return (not verdict.eligible, Decimal("Infinity") if price is None else price, str(verdict.endpoint.key))


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


def _per_million(amount_pusd: int, tokens: int) -> str:
    # Display only: dollars per million output tokens, everything included.
    return "-" if not tokens else f"{Decimal(amount_pusd) / tokens / 1_000_000:.2f}"
