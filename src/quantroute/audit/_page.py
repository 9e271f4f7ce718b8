"""An audit as one HTML page without outside parts: verdicts, effects with intervals, histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from quantroute._html import text as escape
from quantroute.audit._blackbox import StringsEndpoint, StringsReport
from quantroute.audit._report import AuditReport, EndpointReport, Outcome
from quantroute.money import format_usd

__all__ = ["DETAILS", "STRINGS_DETAILS", "audit_html", "details", "strings_details", "strings_html"]

_WIDTH: Final = 420
_HEIGHT: Final = 64
_ROW: Final = 26
_CSS: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;"
    "color:#222;background:#fff}table{border-collapse:collapse}td,th{padding:.2em .8em;"
    "text-align:left;border-bottom:1px solid #ddd}td.n{text-align:right;"
    "font-variant-numeric:tabular-nums}.fails{color:#b00020;font-weight:600}.passes{color:#1b6e2d}"
    ".few{color:#8a5a00}figure{display:inline-block;margin:0 2em 1em 0}"
    "svg text{font:12px system-ui}"
)
_CLASSES: Final = {Outcome.PASSES: "passes", Outcome.FAILS: "fails", Outcome.TOO_FEW: "few"}
DETAILS: Final = ("95% interval", "temperature", "tokens needed", "would see")
STRINGS_DETAILS: Final = (
    "answers",
    "discrepancy",
    "1 in 20 above",
    "p",
    "greedy equal",
    "greedy itself",
    "common beginning",
)


def audit_html(report: AuditReport) -> str:
    """One self-contained page: verdicts, effects with intervals, rank histograms."""
    items = report.endpoints
    return _page(
        report.model,
        f"<p>{escape(report.date)} run {escape(report.run or '-')}, target "
        f"{escape(report.target)}, level {report.alpha:g}, adjusted for {len(items)} endpoints.</p>"
        f"{_html_table(items)}<h2>Effect with 95% interval</h2>"
        "<p>Surprise above entropy, nats per token; zero is the claim"
        f"{' and ' + escape(report.reference) if report.reference else ''}.</p>"
        f"{_forest(items)}<h2>Rank positions</h2>"
        "<p>Level where the tokens were drawn from the claim; likeliest tokens on the left.</p>"
        f"{''.join(_histogram(item) for item in items)}<h2>Notes</h2><ul>"
        f"{''.join(f'<li>{escape(line)}</li>' for line in report.notes)}</ul>",
    )


def strings_html(report: StringsReport) -> str:
    """One self-contained page about a comparison of strings."""
    items = report.endpoints
    return _page(
        report.model,
        f"<p>{escape(report.date)} run {escape(report.run or '-')}, answers compared with those of "
        f"{escape(report.reference)}, level {report.alpha:g}, adjusted for {len(items)} endpoints, "
        f"spent {format_usd(report.spent_pusd, places=6)}.</p>"
        f"{_strings_table(items)}<h2>Discrepancy</h2>"
        "<p>The dot is what was seen. The bar ends where one exchange of answers in twenty goes "
        "further: dots within it are what equal endpoints show.</p>"
        f"{_discrepancies(items)}<h2>Notes</h2><ul><li>A failure counts; to pass proves little: "
        "texts show less than tokens under the target's weights.</li>"
        f"{''.join(f'<li>{escape(line)}</li>' for line in _failures(report))}</ul>",
    )


def strings_details(item: StringsEndpoint) -> tuple[str, ...]:
    """Answers, discrepancy, its limit, p, and how greedy answers agree."""
    test, greedy = item.test, item.greedy
    return (
        f"{test.answers[0]:,}" if test else "0",
        f"{test.discrepancy:.4f}" if test else "-",
        f"{test.limit:.4f}" if test else "-",
        f"{item.p_adjusted:.2g}",
        f"{greedy.equal_share:.0%}" if greedy else "-",
        f"{item.greedy_own.equal_share:.0%}" if item.greedy_own else "-",
        f"{greedy.prefix_share:.0%}" if greedy else "-",
    )


def _page(model: str, content: str) -> str:
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<title>audit of {escape(model)}</title><style>{_CSS}</style>"
        f"<h1>Audit of {escape(model)}</h1>{content}</html>"
    )


def details(item: EndpointReport) -> tuple[str, ...]:
    """What a wide table shows besides: interval, temperature, tokens needed, what would show."""
    return (
        f"{item.effect.low:+.4f} {item.effect.high:+.4f}",
        f"x{item.temperature.factor:.3f}",
        f"{item.tokens_needed:,}" if item.tokens_needed else "-",
        f"{item.detectable_nats:.4f}",
    )


def _html_table(items: Iterable[EndpointReport]) -> str:
    heads = ("endpoint", "verdict", "cause", "rows", "tokens", "effect", "p", *DETAILS)
    return _table(
        heads,
        (
            _verdict(item.endpoint, item.outcome)
            + f"<td>{escape(item.cause_text)}</td>"
            + _numbers(
                f"{item.rows:,}",
                f"{item.tokens:,}",
                f"{item.effect.mean_nats:+.4f}",
                f"{item.p_adjusted:.2g}",
                *details(item),
            )
            for item in items
        ),
    )


def _strings_table(items: Iterable[StringsEndpoint]) -> str:
    heads = ("endpoint", "verdict", *STRINGS_DETAILS)
    return _table(
        heads,
        (
            _verdict(item.endpoint, item.outcome) + _numbers(*strings_details(item))
            for item in items
        ),
    )


def _table(heads: Iterable[str], lines: Iterable[str]) -> str:
    head = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _verdict(endpoint: str, outcome: Outcome) -> str:
    return f"<td>{escape(endpoint)}</td><td class={_CLASSES[outcome]}>{outcome.value}</td>"


def _numbers(*cells: str) -> str:
    return "".join(f"<td class=n>{escape(cell)}</td>" for cell in cells)


def _failures(report: StringsReport) -> list[str]:
    failures = {item.endpoint: item.failures for item in report.endpoints}
    failures[f"{report.reference} (the reference)"] = report.reference_failures
    return [
        f"{name}: {count} requests without an answer: {why}"
        for name, reasons in failures.items()
        for why, count in reasons.items()
    ]


def _discrepancies(items: Sequence[StringsEndpoint]) -> str:
    tests = [(item, item.test) for item in items if item.test is not None]
    top = max((max(test.discrepancy, test.limit) for _, test in tests), default=0.0) or 1.0
    parts = []
    for place, (item, test) in enumerate(tests):
        y = place * _ROW + _ROW / 2
        colour = "#b00020" if item.outcome is Outcome.FAILS else "#225ea8"
        parts.append(
            f"<text x='0' y='{y + 4}'>{escape(item.endpoint)}</text>"
            f"<rect x='200' y='{y - 6}' width='{test.limit / top * _WIDTH:.1f}' height='12' "
            "fill='#ddd'/>"
            f"<circle cx='{200 + test.discrepancy / top * _WIDTH:.1f}' cy='{y}' r='4' "
            f"fill='{colour}'/>"
        )
    height = _ROW * max(1, len(tests))
    return f"<svg width='{_WIDTH + 260}' height='{height}' role='img'>{''.join(parts)}</svg>"


def _forest(items: Sequence[EndpointReport]) -> str:
    ends = [0.0, *(value for item in items for value in (item.effect.low, item.effect.high))]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return 200 + (value - low) / span * _WIDTH

    height = _ROW * (len(items) + 1)
    parts = [
        f"<line x1='{x(0):.1f}' x2='{x(0):.1f}' y1='0' y2='{height - _ROW}' stroke='#999' "
        "stroke-dasharray='3'/>"
    ]
    for place, item in enumerate(items):
        y, effect = place * _ROW + _ROW / 2, item.effect
        colour = "#b00020" if item.outcome is Outcome.FAILS else "#225ea8"
        parts.append(
            f"<text x='0' y='{y + 4}'>{escape(item.endpoint)}</text>"
            f"<line x1='{x(effect.low):.1f}' x2='{x(effect.high):.1f}' y1='{y}' y2='{y}' "
            f"stroke='{colour}' stroke-width='2'/>"
            f"<circle cx='{x(effect.mean_nats):.1f}' cy='{y}' r='4' fill='{colour}'/>"
        )
    parts += [
        f"<text x='{x(value):.1f}' y='{height - 6}' text-anchor='middle'>{value:+.3f}</text>"
        for value in sorted({low, 0.0, high})
    ]
    return f"<svg width='{_WIDTH + 260}' height='{height}' role='img'>{''.join(parts)}</svg>"


def _histogram(item: EndpointReport) -> str:
    counts = item.ranks.histogram
    level = sum(counts) / len(counts)
    top = max(*counts, 1.6 * level, 1.0)
    step = _WIDTH / 1.5 / len(counts)
    bars = "".join(
        f"<rect x='{place * step:.1f}' y='{_HEIGHT * (1 - count / top):.1f}' "
        f"width='{step - 1:.1f}' height='{_HEIGHT * count / top:.1f}' fill='#8fb3d9'/>"
        for place, count in enumerate(counts)
    )
    y = _HEIGHT * (1 - level / top)
    line = f"<line x1='0' x2='{_WIDTH / 1.5:.0f}' y1='{y:.1f}' y2='{y:.1f}' stroke='#555'/>"
    return (
        f"<figure><svg width='{_WIDTH / 1.5:.0f}' height='{_HEIGHT}' role='img'>{bars}{line}</svg>"
        f"<figcaption>{escape(item.endpoint)}, p {item.ranks.p:.2g}</figcaption></figure>"
    )
