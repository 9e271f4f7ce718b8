"""Progress for people: a live picture on terminals, plain lines elsewhere; on stderr."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live

from quantroute._loopback import LOOPBACK
from quantroute.client import Client
from quantroute.domain import Endpoint
from quantroute.generation import DatasetsProgress, Progress
from quantroute.report import LiveMeter, LiveView
from quantroute.telemetry import METRICS_PATH, RunFigures, served_metrics

__all__ = ["Reporter", "prices_of"]

#: Twice a second is as good as live, and costs a hundredth of a core.
_REDRAW_S: Final = 0.5
#: A line now and then for logs; and one at once when something changes its state.
_PLAIN_LINE_S: Final = 10.0


def prices_of(endpoints: Iterable[Endpoint]) -> dict[str, Decimal | None]:
    """Output prices, USD per token, by the endpoints' names."""
    return {str(item.key): item.pricing.output_usd_per_token for item in endpoints}


class Reporter:
    """Shows a run while it goes on; used from one event loop, and drawn by its timer.

    A timer and not the answers: with none coming in, one wants to see all the more what is going
    on; with a thousand a second, each costs an assignment.
    """

    def __init__(
        self,
        client: Client,
        *,
        prices: Mapping[str, Decimal | None],
        is_silent: bool,
        rows_total: int | None = None,
        run: str = "",
    ) -> None:
        self._client = client
        self._is_silent = is_silent
        self._run = run
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._meter = LiveMeter(began_s=time.monotonic(), rows_total=rows_total, prices=prices)
        self._last: Progress | DatasetsProgress | None = None
        self._marks: tuple[object, ...] = ()
        self._said_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._live: Live | None = None
        if self._console.is_terminal and not is_silent:
            # Transient: the last state is printed as a line of its own.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        if not self._is_silent:
            self._arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._live.stop()
        if self._last is not None and not self._is_silent:
            self._say(self._view(self._last).line(is_over=True))

    def on_progress(self, progress: Progress | DatasetsProgress) -> None:
        """Called after every answer."""
        self._last = progress

    @asynccontextmanager
    async def telling(self, port: int | None) -> AsyncIterator[None]:
        """Within the block, serve the figures for Prometheus, if a port is given."""
        if port is None:
            yield
            return
        async with served_metrics(self._figures, port=port) as taken:
            if not self._is_silent:
                self._say(f"metrics at http://{LOOPBACK}:{taken}{METRICS_PATH}")
            yield

    def _figures(self) -> RunFigures:
        return RunFigures(
            run=self._run,
            progress=self._last,
            balance=self._client.ledger.balance(),
            reports=self._client.endpoint_reports(),
            errors=self._client.error_counts(),
        )

    def note_stopping(self) -> None:
        """Say at once that the first Ctrl+C was heard, and what a second one does."""
        if not self._is_silent:
            self._say("stopping: waiting for the requests in flight; Ctrl+C again leaves at once")

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_REDRAW_S, self._tick)

    def _tick(self) -> None:
        self._arm()
        if self._last is None:
            return
        view = self._view(self._last)
        if self._live is not None:
            self._live.update(view, refresh=True)
            return
        now_s = time.monotonic()
        if view.marks != self._marks or now_s - self._said_s >= _PLAIN_LINE_S:
            # The first picture is no change.
            if self._marks or now_s - self._said_s >= _PLAIN_LINE_S:
                self._say(view.line())
                self._said_s = now_s
            self._marks = view.marks

    def _view(self, progress: Progress | DatasetsProgress) -> LiveView:
        run, feeds = (
            (progress.run, progress.datasets)
            if isinstance(progress, DatasetsProgress)
            else (progress, ())
        )
        return self._meter.view(
            run,
            feeds=feeds,
            now_s=time.monotonic(),
            balance=self._client.ledger.balance(),
            reports=self._client.endpoint_reports(),
            errors=self._client.error_counts(),
        )

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
