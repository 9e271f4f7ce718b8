"""The live picture: what it says at each width, its rates, and what ends first."""

from __future__ import annotations

import io
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from quantroute.domain import EndpointKey
from quantroute.generation import FeedProgress, Progress, Target
from quantroute.ledger import ROOT
from quantroute.ledger._state import AccountState
from quantroute.ledger._statement import balance_of
from quantroute.money import NO_CAP, PUSD_PER_USD, PicoUSD
from quantroute.report import LiveDataset, LiveEndpoint, LiveMeter, LiveView
from quantroute.routing import BreakerState, EndpointReport

USD = PUSD_PER_USD
VIEW = LiveView(
    elapsed_s=65.0,
    rows=1_234,
    rows_total=4_000,
    live=812,
    tokens=1_234_567,
    rows_per_s=20.34,
    tokens_per_s=12_345.6,
    cap_pusd=100 * USD,
    posted_pusd=31 * USD,
    held_pusd=USD // 10,
    in_flight_pusd=9 * USD,
    failed=3,
    eta_money_s=500.0,
    eta_targets_s=900.0,
    datasets=(
        LiveDataset(name="b3", done=3_000_000, goal=10_000_000, unit="tokens", live=130),
        LiveDataset(name="a-very-long-dataset-name", done=40, goal=None, live=3),
        LiveDataset(name="over", done=10, goal=10, is_over=True),
    ),
    endpoints=(
        LiveEndpoint(
            name="inceptron/int4",
            in_flight=300,
            limit=320,
            answered=12_345,
            faults=3,
            rate_limited=200,
            accepted_share=0.97,
            output_usd_per_token=Decimal("0.0000022"),
        ),
        LiveEndpoint(name="[red]odd[/red]", in_flight=0, limit=20, breaker=BreakerState.OPEN),
        LiveEndpoint(name="novita", in_flight=3, limit=20, paused_for_s=12.3),
    ),
    errors=(("rate limited", 200), ("transient", 12)),
    alarms=("novita: 12.0% of 200 answers are truncated, elsewhere 1.0% of 1,000",),
)


def drawn(view: LiveView, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), markup=False)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_wide_terminal_shows_everything() -> None:
    lines = drawn(VIEW, 100)
    assert lines[0] == (
        "1,234/4,000 rows, 20.3 rows/s, 12.3k tokens/s, 812 live; 3 failed; "
        "the cap is reached in about 8 min"
    )
    assert lines[1].startswith("money ━━━━━━━━╍╍")
    assert lines[1].endswith("$31.0000 of $100.00 + $0.1000 held, $9.0000 in flight")
    assert lines[2].startswith("b3             ━━━━━━━━─")
    assert lines[2].endswith(" 3.0M/10.0M tokens, 130 live")
    assert lines[3] == "a-very-long... 40 rows, 3 live"
    assert lines[4].endswith(" 10/10 rows, over")
    headings = "endpoint in flight answers limited faults good $/M out state"
    assert lines[5].split() == headings.split()
    assert lines[6].split() == [
        "inceptron/int4",
        "300/320",
        "12.3k",
        "200",
        "3",
        "97%",
        "2.20",
        "ok",
    ]
    assert lines[7].split() == ["[red]odd[/red]", "0/20", "0", "0", "0", "-", "-", "down"]
    assert lines[8].split()[-3:] == ["paused", "12", "s"]
    assert lines[9] == "failed attempts: rate limited 200, transient 12"
    assert lines[10].startswith("! novita: 12.0% of 200")
    assert len(lines) == 11


def test_sixty_columns_stay_readable() -> None:
    lines = drawn(VIEW, 60)
    assert lines[0] == "1,234/4,000 rows, 20.3 rows/s, 12.3k tokens/s, 812 live"
    assert lines[1] == "3 failed; the cap is reached in about 8 min"
    assert lines[2].startswith("money ━━━━━╍")
    assert lines[2].endswith(" $31.0000 of $100.00")
    assert lines[3].strip() == "+ $0.1000 held, $9.0000 in flight"
    assert lines[4].endswith(" 3.0M/10.0M tokens, 130 live")
    assert lines[8].split() == ["inceptron/int4", "300/320", "97%", "2.20", "ok"]
    assert lines[-1].endswith("…")


@given(width=st.integers(30, 200), rows=st.integers(0, 10**9), money=st.integers(0, 10**17))
def test_no_line_is_wider_than_the_terminal(width: int, rows: int, money: int) -> None:
    view = replace(VIEW, rows=rows, rows_total=None, posted_pusd=money)
    assert all(cell_len(line) <= width for line in drawn(view, width))
    assert len(drawn(view, width)) <= 16


def test_many_datasets_and_endpoints_do_not_fill_the_screen() -> None:
    view = replace(VIEW, datasets=VIEW.datasets * 7, endpoints=VIEW.endpoints * 7)
    lines = drawn(view, 80)
    assert "... and 13 more datasets" in lines
    assert "... and 13 more endpoints" in lines
    assert len(lines) <= 26


def test_a_console_without_unicode_gets_plain_bars() -> None:
    raw = io.BytesIO()
    console = Console(width=80, file=io.TextIOWrapper(raw, encoding="ascii"))
    console.print(replace(VIEW, alarms=()))
    console.file.flush()
    assert b"money ######++...." in raw.getvalue()


def test_a_notebook_shows_it_as_a_cells_value() -> None:
    shown = VIEW._repr_mimebundle_((), ())
    assert "inceptron/int4" in shown["text/html"]
    assert "$31.0000 of $100.00" in shown["text/plain"]


def test_a_line_for_a_log() -> None:
    assert VIEW.line() == (
        "1,234/4,000 rows, $31.0000 of $100.00, 1,234,567 tokens, 20.3 rows/s, $0.1000 held, "
        "b3 3,000,000/10,000,000 tokens, a-very-long-dataset-name 40 rows, over 10/10 rows (done), "
        "3 failed, 812 live, the cap is reached in about 8 min, [red]odd[/red] down, "
        "novita paused 12 s, novita: 12.0% of 200 answers are truncated, elsewhere 1.0% of 1,000"
    )
    assert VIEW.line(is_over=True).endswith("3 failed, 65.0 s")
    assert "stopping, 812 live" in replace(VIEW, is_stopping=True).line()
    assert "of no cap" in replace(VIEW, cap_pusd=None).line()


def test_marks_change_with_states_and_not_with_counts() -> None:
    assert (
        replace(VIEW, rows=9, tokens=9, posted_pusd=9, endpoints=VIEW.endpoints).marks == VIEW.marks
    )
    paused_longer = replace(VIEW.endpoints[2], paused_for_s=20.0)
    assert replace(VIEW, endpoints=(*VIEW.endpoints[:2], paused_longer)).marks == VIEW.marks
    back = replace(VIEW.endpoints[1], breaker=BreakerState.CLOSED)
    assert replace(VIEW, endpoints=(VIEW.endpoints[0], back)).marks != VIEW.marks
    assert replace(VIEW, is_stopping=True).marks != VIEW.marks
    assert replace(VIEW, datasets=VIEW.datasets[:2]).marks != VIEW.marks


# -- rates and ends -------------------------------------------------------------------------------


def progress(finished: int = 0, tokens: int = 0, **changes: Any) -> Progress:
    facts: dict[str, Any] = {
        "finished": finished,
        "resumed": 0,
        "duplicates": 0,
        "refused": 0,
        "gave_up": 0,
        "live": 4,
        "answers": finished,
        "output_tokens": tokens,
        "classes": {},
        "is_stopping": False,
    }
    return Progress(**(facts | changes))


CAP = PicoUSD(100 * USD)


def balance(posted_usd: int = 0, *, cap: Any = CAP, **changes: int) -> Any:
    return balance_of(ROOT, AccountState(cap=cap, posted_pusd=posted_usd * USD, **changes))


def feed(name: str, tokens: int, goal: int | None, **changes: Any) -> FeedProgress:
    facts: dict[str, Any] = {
        "dataset": name,
        "target": None if goal is None else Target(output_tokens=goal),
        "accepted_rows": 0,
        "accepted_tokens": tokens,
        "answers": 0,
        "output_tokens": tokens,
        "ended": 0,
        "live": 1,
        "is_over": False,
        "is_reached": False,
    }
    return FeedProgress(**(facts | changes))


def test_rates_are_of_the_last_minute() -> None:
    meter = LiveMeter(began_s=0.0, rows_total=1_000)
    for second in range(101):
        meter.view(progress(second, 10 * second), now_s=second, balance=balance(0))
    for second in range(101, 201):
        view = meter.view(progress(100, 1_000), now_s=second, balance=balance(0))
    assert view.rows_per_s == view.tokens_per_s == 0.0
    assert "0.0 rows/s" in view.line()
    assert "0.5 rows/s" in view.line(is_over=True)  # a hundred rows in two hundred seconds
    assert view.eta_targets_s is None
    view = meter.view(progress(160, 1_600), now_s=201, balance=balance(0))
    assert view.rows_per_s == pytest.approx(1.0, rel=0.05)
    assert view.eta_targets_s == pytest.approx(840, rel=0.05)
    assert len(meter._samples) < 70


def test_a_run_that_is_over_before_anybody_looked_has_a_rate() -> None:
    view = LiveMeter(began_s=10.0).view(progress(80), now_s=10.25, balance=balance(0))
    assert "320.0 rows/s, 0.2 s" in view.line(is_over=True)


@pytest.mark.parametrize(
    ("spent_usd", "rows", "words"),
    [(50, 10, "the cap is reached in about 10 s"), (1, 80, "all is done in about 2 s")],
)
def test_what_ends_first_is_said(spent_usd: int, rows: int, words: str) -> None:
    meter = LiveMeter(began_s=0.0, rows_total=100)
    meter.view(progress(), now_s=0.0, balance=balance())
    view = meter.view(progress(rows), now_s=10.0, balance=balance(spent_usd))
    assert view.eta == words


def test_the_slowest_dataset_decides_and_one_without_an_end_leaves_it_open() -> None:
    meter = LiveMeter(began_s=0.0)
    start = [feed("a", 0, 100), feed("b", 0, 100), feed("c", 0, None, is_over=True, live=0)]
    later = [feed("a", 50, 100), feed("b", 10, 100), feed("c", 0, None, is_over=True, live=0)]
    meter.view(progress(), now_s=0.0, balance=balance(cap=NO_CAP), feeds=start)
    view = meter.view(progress(), now_s=10.0, balance=balance(cap=NO_CAP), feeds=later)
    assert view.cap_pusd is None
    assert (view.eta_money_s, view.eta_targets_s) == (None, 90.0)
    assert [item.is_over for item in view.datasets] == [False, False, True]
    later[2] = feed("c", 0, None)
    view = meter.view(progress(), now_s=11.0, balance=balance(), feeds=later)
    assert view.eta_targets_s is None


def test_money_is_told_apart_and_endpoints_are_the_busiest_first() -> None:
    def report(tag: str, in_flight: int) -> EndpointReport:
        return EndpointReport(
            key=EndpointKey("m", tag),
            in_flight=in_flight,
            limit=9,
            answered=4,
            faults=0,
            rate_limited=1,
            breaker=BreakerState.CLOSED,
            paused_for_s=0.0,
            last_problem="",
        )

    meter = LiveMeter(began_s=0.0, prices={"b": Decimal("0.000002")})
    view = meter.view(
        progress(answers_by_endpoint={"b": (4, 3)}),
        now_s=1.0,
        balance=balance(5, pending_pusd=7, held_pusd=3),
        reports=[report("a", 1), report("b", 5)],
        errors={"transient": 1, "rate limited": 5},
    )
    assert (view.posted_pusd, view.held_pusd, view.in_flight_pusd) == (5 * USD, 3, 4)
    assert [item.name for item in view.endpoints] == ["b", "a"]
    assert view.endpoints[0].accepted_share == 0.75
    assert view.endpoints[0].output_usd_per_token == Decimal("0.000002")
    assert view.endpoints[1].accepted_share is None
    assert view.errors == (("rate limited", 5), ("transient", 1))
