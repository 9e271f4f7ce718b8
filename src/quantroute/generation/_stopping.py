"""Why a run ends early: the first reason that comes, the caps that were reached, and the drain."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from quantroute._log import get_logger
from quantroute.errors import BudgetExceeded, DatasetError, QuantrouteError
from quantroute.generation._conversation import ChatClient
from quantroute.ledger import Account

__all__ = ["Stopping", "all_done"]

log = get_logger("quantroute.generation")


class Stopping:
    """Whether a run has been stopped, and by what.

    Args:
        run: its name, for the log.
        live: the rows under way; kept by whoever starts them.
    """

    def __init__(self, client: ChatClient, *, run: str, live: Set[asyncio.Task[None]]) -> None:
        self._client = client
        self._run = run
        self._live = live
        self._stop = asyncio.Event()
        self.reason: QuantrouteError | None = None
        """What stopped the whole run; many rows may bring the same reason, the first counts."""
        self.capped: dict[Account, BudgetExceeded] = {}
        """Datasets that ended since their own cap was reached, by their account."""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is admitted."""
        return self._stop.is_set()

    @property
    def error(self) -> QuantrouteError | None:
        """What kept the run from being done: what stopped it, else a cap of one dataset."""
        return self.reason or next(iter(self.capped.values()), None)

    async def wait(self) -> None:
        """Until the run is stopped; for ever if it is not."""
        await self._stop.wait()

    def stop_for(self, error: QuantrouteError) -> None:
        """Stop admitting, unless that was done already."""
        if self._stop.is_set():
            return
        self.reason = error
        self._stop.set()
        log.info("run stops", run=self._run, reason=str(error), live=len(self._live))
        if not isinstance(error, BudgetExceeded | DatasetError):
            # Rows that wait (for a slot, a pause, money) end here; those in flight go on. When the
            # cap is reached, waiting rows may still fit into what those in flight give back; an
            # unreadable prompt is no reason for the rows before it to end.
            self._client.stop_admitting(error)

    def admit_again(self) -> None:
        """Leave the client as it was found."""
        if self._stop.is_set():
            self._client.admit_again()

    async def drain(self, rows: asyncio.Task[None], *, within_s: float) -> int:
        """Give rows in flight time to end, then cut them off; how many those are."""
        await asyncio.wait({rows}, timeout=within_s)
        cut_off = len(self._live)
        for task in tuple(self._live):
            task.cancel()
        return cut_off


async def all_done(tasks: Set[asyncio.Task[None]]) -> None:
    """Wait for tasks, none or many; what they raise is not looked at."""
    if tasks:
        await asyncio.wait(tasks)
