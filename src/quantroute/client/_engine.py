"""What the rows of one open client share: the parts they use, and when all of them must stop."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from quantroute._log import get_logger
from quantroute.client._catalogue import Catalogue
from quantroute.client._dispatch import Dispatcher
from quantroute.client._local import LocalRoute
from quantroute.client._observe import AttemptObserver, SettledAttempt
from quantroute.client._outcome import RowRefused
from quantroute.client._retry import RetryPolicy
from quantroute.client._transport import Transport
from quantroute.clock import Clock
from quantroute.domain import EndpointKey
from quantroute.errors import QuantrouteError, RefusedAlike
from quantroute.ledger import Ledger
from quantroute.secrets import EnvKey

__all__ = ["Engine"]

log = get_logger("quantroute.client")

T = TypeVar("T")

#: So many rows refused in a row with the same words, without one answer between them, mean that the
#: account or the configuration is at fault, not the rows.
_SAME_REFUSALS: Final = 25


@dataclass(slots=True, kw_only=True)
class Engine:
    """What the rows of one open client share."""

    ledger: Ledger
    catalogue: Catalogue
    dispatcher: Dispatcher
    transport: Transport
    retry: RetryPolicy
    key: EnvKey
    clock: Clock
    rng: random.Random
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_by: QuantrouteError | None = None
    live_rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Attempts that failed, by kind."""
    paused: set[EndpointKey] = field(default_factory=set)
    """Endpoints whose breaker opened and that have not answered since."""
    has_baseline: bool = False
    locals: Mapping[EndpointKey, LocalRoute] = field(default_factory=dict)
    note_baseline: Callable[[], Awaitable[None]]
    observer: AttemptObserver | None = None
    _baseline_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_refusal: tuple[int, str] | None = None
    _refusals_in_a_row: int = 0

    async def before_first_request(self) -> None:
        """Note what the key has spent so far, once, for later reconciliation."""
        async with self._baseline_turn:
            if not self.has_baseline:
                await self.note_baseline()
                self.has_baseline = True

    def stop_admitting(self, reason: QuantrouteError) -> None:
        """Send nothing new: rows without a request in flight raise `reason` where they wait."""
        if self.stopped_by is None:
            self.stopped_by = reason
            self.stop.set()
            self.dispatcher.abort(reason)

    def admit_again(self) -> None:
        """Take back `stop_admitting`."""
        self.stopped_by = None
        self.stop.clear()

    def check_admission(self) -> None:
        """Raise what stopped the client, if anything did."""
        if self.stopped_by is not None:
            raise copy.copy(self.stopped_by)  # shared instances pile up tracebacks

    async def unless_stopped(
        self, waiting: Coroutine[Any, Any, T], *, undo: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """`await waiting`, cut short by `stop_admitting`.

        If the result comes in the same instant as the stop or a cancellation, `undo` gets it.
        """
        if self.stopped_by is not None:
            waiting.close()  # never begun, and not to be warned of
            self.check_admission()
        task = asyncio.ensure_future(waiting)
        stop = asyncio.ensure_future(self.stop.wait())
        is_delivered = False
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                is_delivered = True
                return task.result()
            self.check_admission()
            is_delivered = True
            return await task  # admitted again in the meantime
        finally:
            stop.cancel()
            if not is_delivered:
                if task.cancel():  # else it is done, and what it brought must not wait here
                    await asyncio.wait({task})
                if undo and not task.cancelled() and task.exception() is None:
                    await undo(task.result())

    def count_refusal(self, refused: RowRefused) -> None:
        """Notice when every row is refused alike.

        Raises:
            RefusedAlike: it happened often enough to stop the run.
        """
        refusal = (refused.status, refused.problem)
        self._refusals_in_a_row = (
            self._refusals_in_a_row + 1 if refusal == self._last_refusal else 1
        )
        self._last_refusal = refusal
        if self._refusals_in_a_row >= _SAME_REFUSALS:
            raise RefusedAlike(
                refusal=refused.problem, status=refused.status, rows=self._refusals_in_a_row
            )

    def observe(self, attempt: SettledAttempt) -> None:
        """Tell the observer. One that fails is not asked again: a run does not end for it."""
        if self.observer is None:
            return
        try:
            self.observer(attempt)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code, and only looks on
            self.observer = None
            log.error("observer failed", problem=repr(error))

    def note_success(self, endpoint: EndpointKey) -> None:
        """An endpoint answered while some were paused; it may be one of them."""
        if endpoint in self.paused:
            self.paused.discard(endpoint)
            log.info("endpoint answers again", endpoint=str(endpoint))

    def count_answer(self) -> None:
        """An answer came: refusals are the rows' own."""
        self._last_refusal, self._refusals_in_a_row = None, 0
