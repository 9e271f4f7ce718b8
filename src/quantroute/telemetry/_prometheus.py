"""A run's figures as Prometheus reads them: plain text, made when asked for.

Source of the format: Prometheus' text exposition format 0.0.4. Money is in dollars there, as its
conventions want base units; exact amounts are in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from quantroute._loopback import served
from quantroute.generation import DatasetsProgress, FeedProgress, Progress
from quantroute.ledger import Balance
from quantroute.money import NO_CAP, to_usd
from quantroute.routing import BreakerState, EndpointReport

__all__ = ["METRICS_PATH", "RunFigures", "exposition", "served_metrics"]

METRICS_PATH: Final = "/metrics"
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "quantroute"

Labels = Mapping[str, str]
Sample = tuple[Labels, float | int | str]
_NONE: Final[Labels] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What is told: a run's progress (None: nothing has come yet), money, endpoints, errors."""

    run: str
    progress: Progress | DatasetsProgress | None
    balance: Balance
    reports: Sequence[EndpointReport]
    errors: Mapping[str, int]


def exposition(figures: RunFigures) -> str:
    """The text of one scrape."""
    families = [
        _family("info", "gauge", "The run that is under way.", [({"run": figures.run}, 1)]),
        *_money(figures.balance),
        *_rows(figures.progress),
        _family(
            "attempt_errors_total",
            "counter",
            "Attempts that brought no answer, by kind.",
            [({"kind": kind}, count) for kind, count in figures.errors.items()],
        ),
        *_endpoints(figures.reports),
    ]
    return "".join(families)


@asynccontextmanager
async def served_metrics(figures: Callable[[], RunFigures], *, port: int) -> AsyncIterator[int]:
    """Serve `/metrics` on 127.0.0.1 within the block; yields the port.

    Args:
        figures: asked at each scrape, on this event loop.
        port: 0 picks a free one.

    Raises:
        ConfigurationError: the port is taken.
    """

    async def answer(_: web.Request) -> web.Response:
        # aiohttp sets the type by header alone: it would drop the format's version otherwise.
        return web.Response(
            body=exposition(figures()).encode(), headers={"Content-Type": _CONTENT_TYPE}
        )

    async with served({METRICS_PATH: answer}, port=port) as taken:
        yield taken


def _money(balance: Balance) -> list[str]:
    dollars = {
        "posted_usd": ("Charges that are known and final.", balance.posted_pusd),
        "pending_usd": ("Set aside for charges that are not known yet.", balance.pending_pusd),
        "held_usd": ("The part of it whose outcome is unknown.", balance.held_pusd),
    }
    found = [
        _family(name, "gauge", words, [(_NONE, f"{to_usd(amount):f}")])
        for name, (words, amount) in dollars.items()
    ]
    if balance.cap is not NO_CAP:
        cap: Sample = (_NONE, f"{to_usd(balance.cap):f}")
        found.append(_family("cap_usd", "gauge", "The hard cap.", [cap]))
    tokens: list[Sample] = [
        ({"type": "input"}, balance.input_tokens),
        ({"type": "output"}, balance.output_tokens),
        ({"type": "reasoning"}, balance.reasoning_tokens),
        ({"type": "cached"}, balance.cached_tokens),
    ]
    attempts: list[Sample] = [
        ({"state": "posted"}, balance.posted_entries),
        ({"state": "voided"}, balance.voided_entries),
    ]
    open_attempts: list[Sample] = [
        ({"state": "open"}, balance.open_entries),
        ({"state": "held"}, balance.held_entries),
    ]
    words = "Tokens of posted charges; reasoning is part of output, cached of input."
    return [
        *found,
        _family("tokens_total", "counter", words, tokens),
        _family("attempts_total", "counter", "Attempts with a known charge.", attempts),
        _family(
            "open_attempts", "gauge", "Attempts without one; held ones among them.", open_attempts
        ),
    ]


def _rows(progress: Progress | DatasetsProgress | None) -> list[str]:
    if progress is None:
        return []
    run, feeds = (
        (progress.run, progress.datasets)
        if isinstance(progress, DatasetsProgress)
        else (progress, ())
    )
    ends: list[Sample] = [
        ({"state": "finished"}, run.finished),
        ({"state": "refused"}, run.refused),
        ({"state": "gave_up"}, run.gave_up),
    ]
    answers: list[Sample] = [
        ({"class": row_class.value}, count) for row_class, count in run.classes.items()
    ]
    return [
        _family("rows_total", "counter", "Rows that ended in this start.", ends),
        _family("rows_in_flight", "gauge", "Rows under way.", [(_NONE, run.live)]),
        _family("answers_total", "counter", "Answers of this start, by quality class.", answers),
        _family(
            "stopping", "gauge", "1 while nothing new is sent.", [(_NONE, int(run.is_stopping))]
        ),
        _family("quality_alarms", "gauge", "Endpoints credibly worse.", [(_NONE, len(run.alarms))]),
        *_datasets(feeds),
    ]


def _datasets(feeds: Iterable[FeedProgress]) -> list[str]:
    known = tuple(feeds)
    tokens: list[Sample] = [
        ({"dataset": item.dataset or ""}, item.accepted_tokens) for item in known
    ]
    rows: list[Sample] = [({"dataset": item.dataset or ""}, item.accepted_rows) for item in known]
    return [
        _family("dataset_accepted_tokens", "gauge", "Output tokens of accepted rows.", tokens),
        _family("dataset_accepted_rows", "gauge", "Accepted rows.", rows),
    ]


def _endpoints(reports: Sequence[EndpointReport]) -> list[str]:
    def each(value: Callable[[EndpointReport], float]) -> list[Sample]:
        return [({"endpoint": str(item.key)}, value(item)) for item in reports]

    outcomes: list[Sample] = [
        ({"endpoint": str(item.key), "outcome": outcome}, count)
        for item in reports
        for outcome, count in (
            ("answered", item.answered),
            ("fault", item.faults),
            ("rate_limited", item.rate_limited),
        )
    ]
    states: list[Sample] = [
        ({"endpoint": str(item.key), "state": state.value}, int(item.breaker is state))
        for item in reports
        for state in BreakerState
    ]
    in_flight, limits = each(lambda item: item.in_flight), each(lambda item: item.limit)
    return [
        _family("endpoint_in_flight", "gauge", "Requests on the wire.", in_flight),
        _family("endpoint_limit", "gauge", "Requests it takes at once, as learnt.", limits),
        _family("endpoint_outcomes_total", "counter", "Attempts by outcome.", outcomes),
        _family("endpoint_breaker", "gauge", "1 for the breaker's state.", states),
    ]


def _family(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    full = f"{_PREFIX}_{name}"
    lines = [f"{full}{_labels(labels)} {_value(value)}\n" for labels, value in samples]
    if not lines:
        return ""
    return f"# HELP {full} {_escaped(words)}\n# TYPE {full} {kind}\n{''.join(lines)}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items()) + "}"


def _escaped(words: str) -> str:
    return words.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(value: str) -> str:
    return _escaped(value.encode("utf-8", "replace").decode()).replace('"', '\\"')


def _value(value: float | int | str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return str(value)
