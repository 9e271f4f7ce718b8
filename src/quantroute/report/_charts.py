"""Charts as inline SVG: small pure functions from values to markup.

Each chart is 480 units wide, so that its letters stay readable from a telephone to a wide window;
colours are classes of the page's style sheet. Each says in `title` and `desc` what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from quantroute._html import Html, tag
from quantroute.report._scale import Spread, log_ticks, nice_ticks, short_number

__all__ = ["Bar", "Box", "Line", "Part", "bars", "boxes", "lines", "stacks"]

WIDTH: Final = 480
_LEFT: Final = 52
_RIGHT: Final = 12
_TOP: Final = 12
_PLOT_HEIGHT: Final = 190
_ROW: Final = 42
_BAR: Final = 14
_MOST_LABEL: Final = 44
_MOST_POINTS: Final = 400

Formatter = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series of points. `style` is a class of the style sheet; a filled one is an area."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    is_area: bool = False
    is_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a list; `goal` is a mark on it, `text` what stands at its end."""

    label: str
    value: float
    text: str
    goal: float | None = None
    style: str = "c1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a whole, 0 to 1."""

    name: str
    share: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The spread of one sample."""

    label: str
    spread: Spread


def lines(
    series: Sequence[Line],
    *,
    title: str,
    description: str,
    x_text: Formatter = short_number,
    y_text: Formatter = short_number,
    breaks: Iterable[float] = (),
    highest: float = 0.0,
) -> Html:
    """Lines and areas over one axis each, both from zero.

    Args:
        breaks: places on the x axis where time was left out.
        highest: the y axis reaches at least so far.
    """
    points = [point for line in series for point in line.points]
    x_end = max((x for x, _ in points), default=0.0) or 1.0
    y_ticks = nice_ticks(max([highest, *(y for _, y in points)]))
    x_ticks = [tick for tick in nice_ticks(x_end) if tick <= x_end * 1.02]
    y_end, bottom = y_ticks[-1], _TOP + _PLOT_HEIGHT

    def x_at(value: float) -> float:
        return _LEFT + value / x_end * (WIDTH - _LEFT - _RIGHT)

    def y_at(value: float) -> float:
        return bottom - value / y_end * _PLOT_HEIGHT

    grid = [
        tag(
            "g",
            _rule(_LEFT, y_at(tick), WIDTH - _RIGHT, y_at(tick), "grid"),
            _word(_LEFT - 6, y_at(tick) + 4, y_text(tick), anchor="end"),
        )
        for tick in y_ticks
    ]
    below = [
        _word(
            x_at(tick),
            bottom + 18,
            x_text(tick),
            anchor="end" if x_at(tick) > WIDTH - 30 else "middle",
        )
        for tick in x_ticks
    ]
    cuts = [_rule(x_at(place), _TOP, x_at(place), bottom, "cut") for place in breaks]
    drawn = [_drawn(line, x_at, y_at, bottom) for line in series if line.points]
    return _picture(bottom + 28, title, description, [*grid, *below, *drawn, *cuts])


def _drawn(
    line: Line, x_at: Callable[[float], float], y_at: Callable[[float], float], bottom: float
) -> Html:
    points = [(x_at(x), y_at(y)) for x, y in _thinned(line.points)]
    if line.is_step:
        corners = [points[0]]
        for (_, before), (x, y) in pairwise(points):
            corners += [(x, before), (x, y)]
        points = corners
    if len(points) == 1:
        ((x, y),) = points
        return tag("circle", cx=_n(x), cy=_n(y), r="3", class_=f"dot {line.style}")
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    if line.is_area:
        path += f"L{_n(points[-1][0])} {_n(bottom)}L{_n(points[0][0])} {_n(bottom)}Z"
        return tag("path", d=path, class_=f"area {line.style}")
    return tag("path", d=path, class_=f"line {line.style}")


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most so many of them; the last one stays."""
    if len(points) <= _MOST_POINTS:
        return points
    step = math.ceil(len(points) / _MOST_POINTS)
    return [*points[:-1:step], points[-1]]


def bars(rows: Sequence[Bar], *, title: str, description: str) -> Html:
    """One bar below the other, from zero, each under its label."""
    end = max([*(row.value for row in rows), *(row.goal or 0.0 for row in rows)], default=0.0)
    parts = []
    for index, row in enumerate(rows):
        top, width = index * _ROW, _share(row.value, end) * WIDTH
        parts += [
            *_heading(top, row.label, row.text),
            _block(0, top + 20, WIDTH, "rail"),
            _block(0, top + 20, max(width, 1.0 if row.value else 0.0), row.style),
        ]
        if row.goal:
            at = min(_share(row.goal, end) * WIDTH, WIDTH - 1.5)
            parts.append(_rule(at, top + 17, at, top + 23 + _BAR, "goal"))
    return _picture(_height(len(rows)), title, description, parts)


def stacks(
    rows: Sequence[tuple[str, str, Sequence[Part]]], *, title: str, description: str
) -> Html:
    """Wholes cut into their parts: label, text at the end, parts."""
    drawn = []
    for index, (label, words, parts) in enumerate(rows):
        top, left = index * _ROW, 0.0
        drawn += [*_heading(top, label, words), _block(0, top + 20, WIDTH, "rail")]
        for part in parts:
            width = part.share * WIDTH
            hint = tag("title", f"{part.name}: {part.share:.1%}")
            drawn.append(_block(left, top + 20, width, part.style, hint))
            left += width
    return _picture(_height(len(rows)), title, description, drawn)


def boxes(
    rows: Sequence[Box], *, title: str, description: str, value_text: Formatter = short_number
) -> Html:
    """Spreads on one logarithmic axis: 5 to 95% as a line, the middle half as a box."""
    values = [value for row in rows for value in (row.spread.low, row.spread.high) if value > 0]
    ticks = log_ticks(min(values), max(values)) if values else [1.0, 10.0]
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    bottom = len(rows) * _ROW

    def x_at(value: float) -> float:
        place = (math.log(max(value, ticks[0])) - low) / (high - low)
        return 14 + min(1.0, place) * (WIDTH - 28)

    parts = [
        tag(
            "g",
            _rule(x_at(tick), 0, x_at(tick), bottom, "grid"),
            _word(x_at(tick), bottom + 16, value_text(tick), anchor="middle"),
        )
        for tick in ticks
    ]
    for index, row in enumerate(rows):
        parts += _box(row, index * _ROW, x_at, value_text)
    return _picture(bottom + 26, title, description, parts)


def _box(row: Box, top: float, x_at: Callable[[float], float], value_text: Formatter) -> list[Html]:
    spread, middle = row.spread, top + 20 + _BAR / 2
    left, right = x_at(spread.first), x_at(spread.third)
    return [
        *_heading(top, row.label, f"median {value_text(spread.median)}"),
        _rule(x_at(spread.low), middle, x_at(spread.high), middle, "whisker"),
        _block(left, top + 20, max(right - left, 2.0), "c1 soft"),
        _rule(x_at(spread.median), top + 17, x_at(spread.median), top + 23 + _BAR, "goal"),
    ]


def _heading(top: float, label: str, words: str) -> list[Html]:
    shown = label if len(label) <= _MOST_LABEL else f"{label[: _MOST_LABEL - 1]}…"
    hint = tag("title", label) if shown != label else ""
    return [
        tag("text", shown, hint, x="0", y=_n(top + 14), class_="label"),
        _word(WIDTH, top + 14, words, anchor="end"),
    ]


def _height(rows: int) -> float:
    return rows * _ROW + 2


def _share(value: float, end: float) -> float:
    return min(1.0, max(0.0, value / end)) if end > 0 else 0.0


def _block(x: float, y: float, width: float, style: str, *content: object) -> Html:
    return tag("rect", *content, x=_n(x), y=_n(y), width=_n(width), height=str(_BAR), class_=style)


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Html:
    return tag("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), class_=style)


def _word(x: float, y: float, words: str, *, anchor: str = "start") -> Html:
    return tag("text", words, x=_n(x), y=_n(y), text_anchor=anchor)


def _picture(height: float, title: str, description: str, parts: Iterable[object]) -> Html:
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *parts,
        viewBox=f"0 0 {WIDTH} {_n(height)}",
        role="img",
        aria_label=f"{title}: {description}",
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
