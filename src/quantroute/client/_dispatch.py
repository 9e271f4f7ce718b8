"""Who goes next: first come, first served among those whose endpoints have room.

The router decides; this adds the waiting. All state lives on one event loop and no method awaits
between reading and changing it, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quantroute.clock import Clock
from quantroute.domain import EndpointKey
from quantroute.routing import Candidate, Feedback, Lease, Router

__all__ = ["Dispatcher"]

# A waiter that cannot be placed does not block others with other endpoints, but the search for one
# that can is bounded: with one model all want the same endpoints, so the first look decides.
_LOOK_AHEAD: Final = 4


class Dispatcher:
    """Hands out leases; used from one event loop."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self.router = router
        self._clock = clock
        self._waiting: deque[tuple[asyncio.Future[Lease], Sequence[Candidate]]] = deque()
        self._feeders: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that want a lease and have none."""
        return len(self._waiting)

    async def acquire(self, candidates: Sequence[Candidate]) -> Lease:
        """A lease at one of `candidates`, which are in order of preference. Waits in line."""
        if not self._waiting:
            lease = self.router.acquire(candidates, self._clock.now_s())
            if lease is not None:
                return lease
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, candidates))
        self._serve()  # arms the timer; with look-ahead it may even be our turn
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Served and cancelled in the same instant.
                self.release(turn.result(), Feedback.NEUTRAL)
            raise

    def acquire_now(self, candidates: Sequence[Candidate]) -> Lease | None:
        """A lease for whoever cannot wait for one, past those who do; None without room."""
        return self.router.acquire(candidates, self._clock.now_s())

    def cheapest_with_room(self, candidates: Sequence[Candidate]) -> Candidate:
        """The smallest reservation among candidates that have room now, or among all."""
        ready = self.router.with_room(candidates, self._clock.now_s())
        return min(ready or candidates, key=lambda item: item.worst_pusd)

    def release(
        self,
        lease: Lease,
        feedback: Feedback,
        *,
        retry_after_s: float | None = None,
        problem: str = "",
    ) -> bool:
        """Give a lease back; True if the endpoint's breaker opened."""
        opened = self.router.release(
            lease,
            feedback,
            now_s=self._clock.now_s(),
            retry_after_s=retry_after_s,
            problem=problem,
        )
        self._serve()
        return opened

    async def slot(self) -> None:
        """Wait until nobody is waiting for a lease and fewer than the maximum are in flight."""
        while not self._has_slot:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._feeders.append(turn)
            await turn

    @property
    def _has_slot(self) -> bool:
        return not self._waiting and self.router.in_flight < self.router.max_in_flight

    def abort(self, reason: Exception) -> None:
        """Raise `reason` in everybody who waits, for a lease or for a slot."""
        waiting: list[asyncio.Future[Any]] = [turn for turn, _ in self._waiting]
        waiting += self._feeders
        self._waiting.clear()
        self._feeders.clear()
        self.close()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(copy.copy(reason))

    def set_quotas(self, quotas: Mapping[EndpointKey, int] | None) -> None:
        """Another mix of endpoints, from now on; those who wait hear of it."""
        self.router.quotas = quotas
        self._serve()

    def close(self) -> None:
        """Stop the timer; waiters are their tasks' business."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _serve(self) -> None:
        if not self._waiting:  # nearly always
            self.close()
            self._wake_feeders()
            return
        now_s = self._clock.now_s()
        skipped: list[tuple[asyncio.Future[Lease], Sequence[Candidate]]] = []
        while self._waiting and len(skipped) < _LOOK_AHEAD:
            turn, candidates = self._waiting.popleft()
            if turn.done():  # cancelled while waiting
                continue
            lease = self.router.acquire(candidates, now_s)
            if lease is None:
                skipped.append((turn, candidates))
            else:
                turn.set_result(lease)
        self._waiting.extendleft(reversed(skipped))
        self._wake_feeders()
        self._arm(now_s)

    def _wake_feeders(self) -> None:
        # All of them: whoever is woken may have been cancelled, or may have nothing to send, and
        # must not take the others' turn along. There are few, and each looks again.
        while self._has_slot and self._feeders:
            turn = self._feeders.popleft()
            if not turn.done():
                turn.set_result(None)

    def _arm(self, now_s: float) -> None:
        """One timer, for the earliest moment at which time alone makes room."""
        self.close()
        looked_at = [self._waiting[index] for index in range(min(len(self._waiting), _LOOK_AHEAD))]
        moments = [
            moment
            for _, candidates in looked_at
            if (moment := self.router.retry_at_s(candidates, now_s)) is not None
        ]
        if moments:
            delay_s = max(0.001, min(moments) - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._serve)
