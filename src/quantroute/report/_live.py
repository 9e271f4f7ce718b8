"""A run in one moment, for a terminal or a notebook cell: money, targets, endpoints, errors.

`LiveMeter` turns counts into rates and keeps the last minute of them; `LiveView` is one frozen
picture and draws itself, wide or narrow. Nothing here asks a client or knows a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quantroute.generation import FeedProgress, Progress
from quantroute.ledger import Balance
from quantroute.money import NO_CAP, format_usd, usd_per_million
from quantroute.report._plan import _duration
from quantroute.report._tables import _compact
from quantroute.routing import BreakerState, EndpointReport

__all__ = ["LiveDataset", "LiveEndpoint", "LiveMeter", "LiveView"]

#: Rates are of so much time: long enough to be steady, short enough to show a change.
_WINDOW_S: Final = 60.0
#: At most one sample per this, so that a fast caller does not shorten the window.
_SAMPLE_EVERY_S: Final = 0.2
_MOST_ENDPOINTS: Final = 8
_MOST_DATASETS: Final = 8
_MOST_ALARMS: Final = 3
#: Below this the endpoints' table leaves out what matters least.
_ROOMY_COLUMNS: Final = 78
_MOST_COLUMNS: Final = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDataset:
    """How far a dataset has come; `goal` is in `unit`, None if nobody knows how much there is."""

    name: str
    done: int
    goal: int | None
    unit: str = "rows"
    live: int = 0
    is_over: bool = False

    @property
    def share(self) -> float:
        """Part of the goal that is reached, 0 to 1."""
        return min(1.0, self.done / self.goal) if self.goal else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEndpoint:
    """One endpoint. `accepted_share` of its answers were good, None if none has been judged."""

    name: str
    in_flight: int
    limit: int
    answered: int = 0
    faults: int = 0
    rate_limited: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    paused_for_s: float = 0.0
    accepted_share: float | None = None
    output_usd_per_token: Decimal | None = None

    @property
    def state(self) -> str:
        """In a word or two; "ok" is the rule."""
        if self.breaker is BreakerState.OPEN:
            return "down"
        if self.breaker is BreakerState.PROBING:
            return "probing"
        return f"paused {_duration(self.paused_for_s)}" if self.paused_for_s >= 1.0 else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView(JupyterMixin):
    """One picture of a run. Units: pico-dollars, seconds, tokens; rates are of the last minute.

    `rows_total` and `cap_pusd` are None where there is none. `held_pusd` is part of what charges of
    unknown outcome reserve, `in_flight_pusd` what requests on the wire do. `eta_money_s` and
    `eta_targets_s` are when the cap and the targets end the run at this pace; None if nobody can
    tell. `errors` are attempts that failed, by kind; `alarms` sentences about endpoints,
    `pace` one about the deadline.
    """

    elapsed_s: float
    rows: int
    rows_total: int | None
    live: int
    tokens: int
    rows_per_s: float
    tokens_per_s: float
    cap_pusd: int | None
    posted_pusd: int
    held_pusd: int
    in_flight_pusd: int
    failed: int = 0
    is_stopping: bool = False
    eta_money_s: float | None = None
    eta_targets_s: float | None = None
    datasets: tuple[LiveDataset, ...] = ()
    endpoints: tuple[LiveEndpoint, ...] = ()
    errors: tuple[tuple[str, int], ...] = ()
    alarms: tuple[str, ...] = ()
    pace: str = ""
    mean_rows_per_s: float = 0.0
    """Of this start as a whole; `rows_per_s` is of its last seconds."""

    @property
    def eta(self) -> str:
        """When it ends and by what, whichever comes first; empty if nobody can tell."""
        ends = [
            (at_s, what)
            for at_s, what in (
                (self.eta_targets_s, "all is done"),
                (self.eta_money_s, "the cap is reached"),
            )
            if at_s is not None
        ]
        if not ends:
            return ""
        at_s, what = min(ends)
        return f"{what} in about {_duration(at_s)}"

    @property
    def marks(self) -> tuple[object, ...]:
        """What a plain log tells at once: it changes when an endpoint or a dataset changes state.

        A pause of seconds is not a state; a breaker is.
        """
        down = sorted(item.name for item in self.endpoints if item.state in ("down", "probing"))
        over = sorted(item.name for item in self.datasets if item.is_over)
        return (self.is_stopping, tuple(down), tuple(over), self.alarms)

    def line(self, *, is_over: bool = False) -> str:
        """One line for a log."""
        parts = [
            _counted(self.rows, self.rows_total, "rows"),
            f"{format_usd(self.posted_pusd)} of {self._cap()}",
            f"{self.tokens:,} tokens",
            f"{self.mean_rows_per_s if is_over else self.rows_per_s:,.1f} rows/s",
        ]
        if self.held_pusd:
            parts.append(f"{format_usd(self.held_pusd)} held")
        parts += [_dataset_line(item) for item in self.datasets]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if is_over:
            return ", ".join((*parts, f"{self.elapsed_s:,.1f} s"))
        parts.append(f"{'stopping, ' if self.is_stopping else ''}{self.live:,} live")
        states = [f"{item.name} {item.state}" for item in self.endpoints if item.state != "ok"]
        if not self.is_stopping and self.eta:
            parts.append(self.eta)
        if self.pace:
            parts.append(self.pace)
        return ", ".join((*parts, *states, *self.alarms))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_COLUMNS)
        draw = _Drawing(width=width, is_ascii=options.ascii_only)
        for line in (
            draw.head(self),
            draw.money(self),
            *(draw.dataset(item) for item in self.datasets[:_MOST_DATASETS]),
            *draw.more(len(self.datasets) - _MOST_DATASETS, "datasets"),
        ):
            yield from _one_line(line, console, options, width)
        if self.endpoints:
            yield draw.endpoints(self.endpoints)
        for line in (
            *draw.more(len(self.endpoints) - _MOST_ENDPOINTS, "endpoints"),
            *draw.errors(self.errors),
            *([Text(self.pace)] if self.pace else []),
            *(Text(f"! {text}", style="yellow") for text in self.alarms[:_MOST_ALARMS]),
            *draw.more(len(self.alarms) - _MOST_ALARMS, "alarms"),
        ):
            yield from _one_line(line, console, options, width)

    def _cap(self) -> str:
        return "no cap" if self.cap_pusd is None else format_usd(self.cap_pusd, places=2)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The lines of a view, for a width."""

    width: int
    is_ascii: bool

    def head(self, view: LiveView) -> Text:
        """Rows, rates, and when it ends."""
        parts = [
            _counted(view.rows, view.rows_total, "rows"),
            f"{view.rows_per_s:,.1f} rows/s",
            f"{_compact(round(view.tokens_per_s))} tokens/s",
            f"{view.live:,} live",
        ]
        text = Text(", ".join(parts))
        tail = [f"{view.failed:,} failed"] if view.failed else []
        end = "; ".join([*tail, "stopping" if view.is_stopping else view.eta]).removesuffix("; ")
        if end and len(text) + len(end) + 2 <= self.width:
            text.append(f"; {end}", style="bold")
        elif end:
            text.append(f"\n{end}", style="bold")
        return text

    def money(self, view: LiveView) -> Text:
        """Posted, held, on its way, and the cap."""
        words = f" {format_usd(view.posted_pusd)} of {view._cap()}"
        open_parts = [
            f"{format_usd(amount_pusd)} {what}"
            for amount_pusd, what in (
                (view.held_pusd, "held"),
                (view.in_flight_pusd, "in flight"),
            )
            if amount_pusd
        ]
        text = Text("money ", style="bold")
        if view.cap_pusd:
            text.append_text(self._bar(_shares(view, view.cap_pusd)))
        text.append(words)
        more = f" + {', '.join(open_parts)}" if open_parts else ""
        if more and len(text) + len(more) > self.width:
            more = f"\n     {more}"
        return text.append(more, style="dim")

    def dataset(self, item: LiveDataset) -> Text:
        """A bar to the goal."""
        text = Text(f"{_cut(item.name, 14):<14} ")
        if item.goal:
            text.append_text(self._bar(((item.share, "green"),)))
            text.append(f" {_compact(item.done)}/{_compact(item.goal)} {item.unit}")
        else:
            text.append(f"{_compact(item.done)} {item.unit}")
        return text.append(", over" if item.is_over else f", {item.live:,} live", style="dim")

    def endpoints(self, endpoints: Sequence[LiveEndpoint]) -> Table:
        """The busiest ones: what they do, how well, and for how much."""
        is_roomy = self.width >= _ROOMY_COLUMNS
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("endpoint", no_wrap=True, overflow="ellipsis", max_width=28)
        for heading in ("in flight", *(("answers", "limited", "faults") if is_roomy else ())):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("good", "$/M out"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for item in endpoints[:_MOST_ENDPOINTS]:
            counts = (item.answered, item.rate_limited, item.faults) if is_roomy else ()
            table.add_row(
                Text(item.name),
                f"{item.in_flight:,}/{item.limit:,}",
                *(_compact(count) for count in counts),
                "-" if item.accepted_share is None else f"{item.accepted_share:.0%}",
                _price(item.output_usd_per_token),
                Text(item.state, style="" if item.state == "ok" else "yellow"),
            )
        return table

    def errors(self, errors: Sequence[tuple[str, int]]) -> list[Text]:
        """Kinds of failed attempts, most frequent first."""
        if not errors:
            return []
        listed = ", ".join(f"{kind} {count:,}" for kind, count in errors)
        return [Text.assemble(("failed attempts: ", "dim"), listed)]

    def more(self, count: int, what: str) -> list[Text]:
        """A line about what there was no room for."""
        return [Text(f"... and {count} more {what}", style="dim")] if count > 0 else []

    def _bar(self, shares: Iterable[tuple[float, str]]) -> Text:
        cells = max(8, min(30, self.width // 4))
        marks = ("#", "+", ".") if self.is_ascii else ("━", "╍", "─")
        bar, used, reached = Text(), 0, 0.0
        for (share, style), mark in zip(shares, marks, strict=False):
            reached += share
            upto = min(cells, round(reached * cells))
            bar.append(mark * (upto - used), style=style)
            used = max(used, upto)
        return bar.append(marks[-1] * (cells - used), style="dim")


def _shares(view: LiveView, cap_pusd: int) -> tuple[tuple[float, str], ...]:
    """What is gone and what may be, as parts of the cap. Display only."""
    pending_pusd = view.held_pusd + view.in_flight_pusd
    return ((view.posted_pusd / cap_pusd, "green"), (pending_pusd / cap_pusd, "yellow"))


def _one_line(line: Text, console: Console, options: ConsoleOptions, width: int) -> RenderResult:
    """Cut, not wrapped: a picture that changes its height flickers."""
    for part in line.split("\n"):
        part.truncate(width, overflow="ellipsis")
        yield from part.render(console)
        yield Segment.line()


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    rows: int
    tokens: int
    posted_pusd: int
    done: Mapping[str, int]


@dataclass(slots=True)
class LiveMeter:
    """Turns counts into pictures with rates. Times are seconds of any one clock.

    Args:
        began_s: when the run began.
        rows_total: how many rows there are, if that is known.
    """

    began_s: float
    rows_total: int | None = None
    prices: Mapping[str, Decimal | None] = field(default_factory=dict)
    _samples: deque[_Sample] = field(default_factory=deque, init=False)

    def view(
        self,
        progress: Progress,
        *,
        now_s: float,
        balance: Balance,
        feeds: Sequence[FeedProgress] = (),
        reports: Iterable[EndpointReport] = (),
        errors: Mapping[str, int] | None = None,
    ) -> LiveView:
        """The picture at `now_s`; call it a few times a second at most."""
        datasets = tuple(_dataset(item) for item in feeds)
        rows = progress.finished + progress.resumed + progress.refused + progress.duplicates
        done = {item.name: item.done for item in datasets}
        now = _Sample(now_s, progress.finished, progress.output_tokens, balance.posted_pusd, done)
        rate = self._rates(now)
        cap_pusd = None if balance.cap is NO_CAP else balance.cap
        elapsed_s = now_s - self.began_s
        return LiveView(
            elapsed_s=elapsed_s,
            rows=rows,
            rows_total=self.rows_total,
            live=progress.live,
            tokens=progress.output_tokens,
            rows_per_s=rate.of(lambda sample: sample.rows),
            tokens_per_s=rate.of(lambda sample: sample.tokens),
            cap_pusd=cap_pusd,
            posted_pusd=balance.posted_pusd,
            held_pusd=balance.held_pusd,
            in_flight_pusd=balance.pending_pusd - balance.held_pusd,
            failed=progress.gave_up + progress.refused,
            is_stopping=progress.is_stopping,
            eta_money_s=None
            if cap_pusd is None
            else rate.time_for(cap_pusd - now.posted_pusd, lambda sample: sample.posted_pusd),
            eta_targets_s=self._eta_targets_s(rows, datasets, rate),
            datasets=datasets,
            endpoints=_endpoints(reports, progress, self.prices),
            errors=tuple(sorted((errors or {}).items(), key=lambda item: (-item[1], item[0]))),
            alarms=tuple(map(str, progress.alarms)),
            pace="" if progress.pace is None else str(progress.pace),
            mean_rows_per_s=progress.finished / elapsed_s if elapsed_s > 0 else 0.0,
        )

    def _rates(self, now: _Sample) -> _Rates:
        samples = self._samples
        if not samples or now.at_s - samples[-1].at_s >= _SAMPLE_EVERY_S:
            samples.append(now)
        while len(samples) > 2 and samples[1].at_s <= now.at_s - _WINDOW_S:
            samples.popleft()
        return _Rates(samples[0], now)

    def _eta_targets_s(
        self, rows: int, datasets: Sequence[LiveDataset], rate: _Rates
    ) -> float | None:
        """All targets: the one that takes longest. None if one of them has no end in sight."""
        if not datasets:
            if self.rows_total is None:
                return None
            return rate.time_for(self.rows_total - rows, lambda sample: sample.rows)
        longest_s = 0.0
        for item in datasets:
            if item.is_over:
                continue
            if item.goal is None:
                return None
            name = item.name
            needed_s = rate.time_for(item.goal - item.done, lambda s, name=name: s.done[name])  # type: ignore[misc]
            if needed_s is None:
                return None
            longest_s = max(longest_s, needed_s)
        return longest_s


@dataclass(frozen=True, slots=True)
class _Rates:
    """What happened between two samples."""

    first: _Sample
    last: _Sample

    def of(self, count: Callable[[_Sample], int]) -> float:
        """Per second."""
        elapsed_s = self.last.at_s - self.first.at_s
        return (count(self.last) - count(self.first)) / elapsed_s if elapsed_s > 0 else 0.0

    def time_for(self, missing: int, count: Callable[[_Sample], int]) -> float | None:
        """Seconds until `missing` more at this pace; None if nothing moves."""
        if missing <= 0:
            return 0.0
        pace = self.of(count)
        return missing / pace if pace > 0 else None


def _dataset(feed: FeedProgress) -> LiveDataset:
    target = feed.target
    done, goal, unit = feed.ended, None, "rows"
    if target is not None and target.output_tokens is not None:
        done, goal, unit = feed.accepted_tokens, target.output_tokens, "tokens"
    elif target is not None:
        done, goal = feed.accepted_rows, target.rows
    return LiveDataset(
        name=feed.dataset or "rows",
        done=done,
        goal=goal,
        unit=unit,
        live=feed.live,
        is_over=feed.is_over and not feed.live,
    )


def _endpoints(
    reports: Iterable[EndpointReport], progress: Progress, prices: Mapping[str, Decimal | None]
) -> tuple[LiveEndpoint, ...]:
    """The busiest first."""
    found = []
    for report in reports:
        name = str(report.key)
        answers, good = progress.answers_by_endpoint.get(name, (0, 0))
        found.append(
            LiveEndpoint(
                name=name,
                in_flight=report.in_flight,
                limit=report.limit,
                answered=report.answered,
                faults=report.faults,
                rate_limited=report.rate_limited,
                breaker=report.breaker,
                paused_for_s=report.paused_for_s,
                accepted_share=good / answers if answers else None,
                output_usd_per_token=prices.get(name),
            )
        )
    return tuple(sorted(found, key=lambda item: (-item.in_flight, -item.answered, item.name)))


def _counted(done: int, total: int | None, what: str) -> str:
    return f"{done:,} {what}" if total is None else f"{done:,}/{total:,} {what}"


def _dataset_line(item: LiveDataset) -> str:
    goal = f"/{item.goal:,}" if item.goal else ""
    return f"{item.name} {item.done:,}{goal} {item.unit}{' (done)' if item.is_over else ''}"


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."


def _price(usd_per_token: Decimal | None) -> str:
    return "-" if usd_per_token is None else f"{usd_per_million(usd_per_token):.2f}"
