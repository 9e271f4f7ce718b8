"""Pictures from numbers: whole, inside their frame, with round ticks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantroute.report._charts import WIDTH, Bar, Box, Line, Part, bars, boxes, lines, stacks
from quantroute.report._scale import (
    Spread,
    log_ticks,
    nice_ticks,
    seconds_text,
    short_number,
    span_text,
)
from quantroute.report._tables import _compact

#: A busy machine is no failure.
patient = settings(deadline=None)
sizes = st.floats(1e-9, 1e12)


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def places(svg: str) -> Iterator[tuple[float, float]]:
    """Left and right end of every rectangle and rule."""
    for element in drawn(svg).iter():
        if element.tag == "rect":
            x = float(element.attrib["x"])
            yield x, x + float(element.attrib["width"])
        elif element.tag == "line":
            yield float(element.attrib["x1"]), float(element.attrib["x2"])


@patient
@given(sizes)
def test_ticks_are_round_and_reach_far_enough(highest: float) -> None:
    ticks = nice_ticks(highest)
    steps = [b - a for a, b in pairwise(ticks)]
    assert ticks[0] == 0
    assert ticks[-1] >= highest * (1 - 1e-9)
    assert ticks[-1] <= highest * 2.5
    assert 2 <= len(ticks) <= 6
    assert max(steps) == pytest.approx(min(steps))
    leading = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(leading - round_) for round_ in (1, 2, 2.5, 5, 10)) < 1e-6


@pytest.mark.parametrize("odd", [0.0, -1.0, 5e-324, math.nan, math.inf])
def test_nothing_has_ticks_too(odd: float) -> None:
    assert nice_ticks(odd) == [0.0, 1.0]


@patient
@given(sizes, sizes)
def test_logarithmic_ticks_span_both(one: float, other: float) -> None:
    lowest, highest = sorted((one, other))
    ticks = log_ticks(lowest, highest)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= lowest * (1 + 1e-9)
    assert ticks[-1] >= highest * (1 - 1e-9)


@patient
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_quartiles_are_the_usual_ones(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    expected = statistics.quantiles(values, n=4, method="inclusive")
    assert [spread.first, spread.median, spread.third] == pytest.approx(expected, abs=1e-6)
    assert min(values) <= spread.low <= spread.high <= max(values)
    assert spread.count == len(values)


def test_a_spread_of_nothing_is_none() -> None:
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.0123, "0.0123"), (1.5, "1.5"), (240.4, "240"), (4_096, "4,096"),
     (12_500, "12.5k"), (260_000, "260k"), (6_800_000, "6.8M"), (2e9, "2G")],
)  # fmt: skip
def test_short_numbers(value: float, shown: str) -> None:
    assert short_number(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (9_999, "9,999"),
        (10_000, "10.0k"),
        (999_960, "1.0M"),
        (1_234_567, "1.2M"),
        (999_960_000, "1.0G"),
        (2_000_000_000, "2.0G"),
    ],
)
def test_counts_have_the_unit_of_their_size(count: int, shown: str) -> None:
    assert _compact(count) == shown
    assert short_number(count) == shown.replace(".0", "")


def test_times() -> None:
    assert [seconds_text(x) for x in (0.0453, 1.234, 150.0)] == ["45.3 ms", "1.23 s", "2 min"]
    assert [seconds_text(x) for x in (0.9994, 0.9996)] == ["999 ms", "1 s"]
    assert [span_text(x) for x in (2.5, 45, 1_980, 9_000, 200_000)] == [
        "2.5 s",
        "45 s",
        "33 min",
        "2.5 h",
        "2.3 days",
    ]


@patient
@given(st.lists(st.tuples(st.floats(0, 1e9), st.none() | st.floats(0, 1e9)), max_size=6))
def test_bars_stay_inside(values: list[tuple[float, float | None]]) -> None:
    rows = [Bar(label="x", value=value, text="y", goal=goal) for value, goal in values]
    assert all(0 <= a <= b <= WIDTH for a, b in places(bars(rows, title="t", description="d")))


@patient
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_boxes_stay_inside(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    svg = boxes([Box(label="x", spread=spread)], title="t", description="d")
    assert all(-1 <= a <= b + 0.05 <= WIDTH + 1 for a, b in places(svg))


def test_stacks_fill_the_rail() -> None:
    parts = [Part(name="good", share=0.75, style="good"), Part(name="bad", share=0.25, style="bad")]
    svg = stacks([("x", "y", parts)], title="t", description="d")
    assert [*places(svg)] == [(0, WIDTH), (0, 0.75 * WIDTH), (0.75 * WIDTH, WIDTH)]


@patient
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=900),
    st.booleans(),
    st.booleans(),
)
def test_lines_of_any_points(
    points: list[tuple[float, float]], is_area: bool, is_step: bool
) -> None:
    line = Line(name="x", points=sorted(points), style="c1", is_area=is_area, is_step=is_step)
    svg = lines([line], title="<t>", description="d", breaks=[0.0])
    assert drawn(svg)[0].text == "<t>"
    assert len(svg) < 40_000
    assert "nan" not in svg


def test_long_labels_are_cut_and_told_whole() -> None:
    svg = bars([Bar(label="x" * 90, value=1, text="1")], title="t", description="d")
    label = next(item for item in drawn(svg) if item.attrib.get("class") == "label")
    assert label.text is not None
    assert len(label.text) == 44
    assert label[0].text == "x" * 90
