"""Progress for people: a live line on terminals, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quantroute.client import Client
from quantroute.generation import Progress
from quantroute.money import NO_CAP, format_usd

__all__ = ["Reporter"]

_REDRAW_S: Final = 0.1
_PLAIN_LINE_S: Final = 5.0
_ROOMY_COLUMNS: Final = 100


class Reporter:
    """Shows rows, rate, spending against the cap, and time to go; on stderr."""

    def __init__(self, client: Client, *, total_rows: int, is_silent: bool) -> None:
        self._client = client
        self._total_rows = total_rows
        self._is_silent = is_silent
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._is_live = self._console.is_terminal and not is_silent
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._last: Progress | None = None
        self._bar = Bar(
            TextColumn("{task.fields[rows]}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=5,
            transient=True,  # the last state is printed as a line of its own
        )
        self._task = self._bar.add_task("rows", total=total_rows, rows="starting", facts="")

    def __enter__(self) -> Self:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._bar.stop()
        if self._last is not None and not self._is_silent:
            self._print_line(self._last, is_over=True)

    def on_progress(self, progress: Progress) -> None:
        """Called after every answer; draws at most ten times a second."""
        self._last = progress
        now_s = time.monotonic()
        if self._is_silent or now_s - self._shown_s < (
            _REDRAW_S if self._is_live else _PLAIN_LINE_S
        ):
            return
        self._shown_s = now_s
        if not self._is_live:
            self._print_line(progress)
            return
        facts = self._facts(progress, is_roomy=self._console.width >= _ROOMY_COLUMNS)
        self._bar.update(
            self._task,
            completed=_done(progress),
            rows=f"{_done(progress):,}/{self._total_rows:,} rows",
            facts=", ".join(facts),
        )

    def note_stopping(self) -> None:
        """Say at once that the first Ctrl+C was heard, and what a second one does."""
        if not self._is_silent:
            self._console.print(
                "stopping: waiting for the requests in flight; Ctrl+C again leaves at once",
                soft_wrap=True,
            )

    def _print_line(self, progress: Progress, *, is_over: bool = False) -> None:
        facts = self._facts(progress, is_roomy=True, is_over=is_over)
        counted = f"{_done(progress):,}/{self._total_rows:,} rows"
        self._console.print(", ".join((counted, *facts)), soft_wrap=True)

    def _facts(self, progress: Progress, *, is_roomy: bool, is_over: bool = False) -> list[str]:
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        balance = self._client.ledger.balance()
        cap = "no cap" if balance.cap is NO_CAP else format_usd(balance.cap, places=2)
        facts = [f"{format_usd(balance.posted_pusd)} of {cap}"]
        if is_roomy:
            facts.append(f"{progress.output_tokens:,} tokens")
            facts.append(f"{progress.finished / elapsed_s:,.1f} rows/s")
        if progress.pace is not None and is_roomy and not is_over:
            facts.append(str(progress.pace))
        if progress.alarms and is_roomy:
            facts.append(f"{len(progress.alarms)} quality alarms")
        if progress.gave_up or progress.refused:
            facts.append(f"{progress.gave_up + progress.refused:,} failed")
        if is_over:
            facts.append(f"{elapsed_s:,.1f} s")
        elif progress.is_stopping:
            facts.append(f"stopping, {progress.live:,} live")
        elif is_roomy:
            facts.append(f"{progress.live:,} live")
        return facts


def _done(progress: Progress) -> int:
    """Rows that will not be asked again by this start."""
    return progress.finished + progress.resumed + progress.refused + progress.duplicates
