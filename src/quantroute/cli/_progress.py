"""Progress for people: a live line on terminals, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quantroute.client import Client
from quantroute.generation import Progress
from quantroute.money import NO_CAP, format_usd

__all__ = ["Reporter"]

_REDRAW_S: Final = 0.1
_PLAIN_LINE_S: Final = 5.0


class Reporter:
    """Shows rows, rate, spending against the cap, and time to go; on stderr."""

    def __init__(self, client: Client, *, total_rows: int, is_silent: bool) -> None:
        self._client = client
        self._total_rows = total_rows
        self._is_silent = is_silent
        self._console = Console(stderr=True)
        self._is_live = sys.stderr.isatty() and not is_silent
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("rows", total=total_rows, facts="")

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

    def on_progress(self, progress: Progress) -> None:
        """Called after every answer; draws at most ten times a second."""
        now_s = time.monotonic()
        pause_s = _REDRAW_S if self._is_live else _PLAIN_LINE_S
        if self._is_silent or (now_s - self._shown_s < pause_s and not self._is_last(progress)):
            return
        self._shown_s = now_s
        done = progress.finished + progress.resumed + progress.refused
        facts = self._facts(progress, now_s - self._began_s)
        if self._is_live:
            self._bar.update(self._task, completed=done, facts=facts)
        else:
            self._console.print(f"rows {done:,}/{self._total_rows:,} {facts}", highlight=False)

    def _is_last(self, progress: Progress) -> bool:
        return progress.finished + progress.resumed >= self._total_rows

    def _facts(self, progress: Progress, elapsed_s: float) -> str:
        balance = self._client.ledger.balance()
        cap = "no cap" if balance.cap is NO_CAP else format_usd(balance.cap, places=2)
        parts = [
            f"{progress.finished / max(elapsed_s, 1e-9):,.1f} rows/s",
            f"{progress.output_tokens:,} tokens",
            f"{format_usd(balance.posted_pusd)} of {cap}",
            f"{progress.live} live",
        ]
        if progress.gave_up or progress.refused:
            parts.append(f"{progress.gave_up + progress.refused} failed")
        if progress.is_stopping:
            parts.append("stopping")
        return ", ".join(parts)
