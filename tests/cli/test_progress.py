"""The reporter without a terminal: a line now and then, and one when something changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from quantroute.cli import _progress
from quantroute.cli._progress import Reporter
from quantroute.domain import EndpointKey
from quantroute.generation import Progress
from quantroute.ledger import ROOT
from quantroute.ledger._state import AccountState
from quantroute.ledger._statement import Balance, balance_of
from quantroute.routing import BreakerState, EndpointReport


@dataclass
class Watched:
    """What a reporter asks a client."""

    breaker: BreakerState = BreakerState.CLOSED
    asked: int = 0
    ledger: Any = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = self

    def balance(self) -> Balance:
        self.asked += 1
        return balance_of(ROOT, AccountState(posted_pusd=7))

    def error_counts(self) -> dict[str, int]:
        return {"transient": 3}

    def endpoint_reports(self) -> tuple[EndpointReport, ...]:
        return (
            EndpointReport(
                key=EndpointKey("m", "alpha/int4"),
                in_flight=1,
                limit=2,
                answered=3,
                faults=0,
                rate_limited=0,
                breaker=self.breaker,
                paused_for_s=0.0,
                last_problem="",
            ),
        )


def progress(finished: int, **changes: Any) -> Progress:
    facts: dict[str, Any] = dict.fromkeys(
        ("resumed", "duplicates", "refused", "gave_up", "live", "answers", "output_tokens"), 0
    )
    facts |= {"finished": finished, "classes": {}, "is_stopping": False}
    return Progress(**(facts | changes))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, moved by hand."""
    moment = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: moment[0])
    return moment


async def test_lines_come_every_ten_seconds_and_at_changes(now: list[float], capsys: Any) -> None:
    client = Watched()
    with Reporter(client, prices={}, is_silent=False, rows_total=50) as reporter:  # type: ignore[arg-type]
        told = []

        def tick(second: float) -> list[str]:
            now[0] = 100.0 + second
            reporter._tick()
            lines = capsys.readouterr().err.splitlines()
            told.extend(lines)
            return lines

        assert tick(0.5) == []  # nothing to tell yet
        reporter.on_progress(progress(1))
        assert tick(1) == []
        assert tick(9) == []
        (line,) = tick(10)
        assert line.startswith("1/50 rows, $0.0000 of ")
        assert tick(15) == []
        client.breaker = BreakerState.OPEN
        (line,) = tick(16)
        assert line.endswith("alpha/int4 down")
        client.breaker = BreakerState.CLOSED
        (line,) = tick(17)
        assert "alpha/int4" not in line
        reporter.on_progress(progress(2, is_stopping=True))
        (line,) = tick(18)
        assert "stopping" in line
        assert tick(27) == []
        assert len(tick(28)) == 1
    assert capsys.readouterr().err.startswith("2/50 rows, ")
    assert all("\x1b" not in line for line in told)


async def test_answers_cost_an_assignment_and_silence_is_kept(capsys: Any) -> None:
    client = Watched()
    with Reporter(client, prices={}, is_silent=True) as reporter:  # type: ignore[arg-type]
        for number in range(1_000):
            reporter.on_progress(progress(number))
        reporter.note_stopping()
        await asyncio.sleep(0)
    assert client.asked == 0
    assert capsys.readouterr().err == ""
