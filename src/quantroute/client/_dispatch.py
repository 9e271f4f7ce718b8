"""Who goes next: first come, first served among those whose endpoints have room.

The router decides; this adds the waiting. All state lives on one event loop and no method awaits
between reading and changing it, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quantroute.clock import Clock
from quantroute.domain import EndpointKey
from quantroute.routing import Candidate, Feedback, Lease, Router

__all__ = ["Dispatcher"]


class _Waiter(NamedTuple):
    number: int
    turn: asyncio.Future[Lease]
    candidates: Sequence[Candidate]


class Dispatcher:
    """Hands out leases; used from one event loop.

    Those who want the same endpoints stand in one line: if its first cannot be placed, nobody of it
    can. Lines do not block each other, and there are few; the longest waiting goes first.
    """

    def __init__(self, router: Router, clock: Clock) -> None:
        self.router = router
        self._clock = clock
        self._lines: dict[frozenset[EndpointKey], deque[_Waiter]] = {}  # none of them empty
        self._numbers = itertools.count()
        self._feeders: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that want a lease and have none."""
        return sum(map(len, self._lines.values()))

    async def acquire(self, candidates: Sequence[Candidate]) -> Lease:
        """A lease at one of `candidates`, which are in order of preference. Waits in line."""
        if not self._lines:
            lease = self.router.acquire(candidates, self._clock.now_s())
            if lease is not None:
                return lease
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        endpoints = frozenset([item.endpoint.key for item in candidates])
        line = self._lines.setdefault(endpoints, deque())
        line.append(_Waiter(next(self._numbers), turn, candidates))
        self._serve()  # arms the timer; it may even be our turn, if others want other endpoints
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
        return not self._lines and self.router.in_flight < self.router.max_in_flight

    def abort(self, reason: Exception) -> None:
        """Raise `reason` in everybody who waits, for a lease or for a slot."""
        waiting: list[asyncio.Future[Any]] = [
            waiter.turn for line in self._lines.values() for waiter in line
        ]
        waiting += self._feeders
        self._lines.clear()
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
        if not self._lines:  # nearly always
            self.close()
            self._wake_feeders()
            return
        now_s = self._clock.now_s()
        heads = [(line[0].number, endpoints) for endpoints, line in self._lines.items()]
        heapq.heapify(heads)  # by number, of which there are no two alike
        while heads:
            _, endpoints = heads[0]
            line = self._lines[endpoints]
            if not self._serve_first(line, now_s):
                heapq.heappop(heads)
            elif line:
                heapq.heapreplace(heads, (line[0].number, endpoints))
            else:
                heapq.heappop(heads)
                del self._lines[endpoints]
        self._wake_feeders()
        self._arm(now_s)

    def _serve_first(self, line: deque[_Waiter], now_s: float) -> bool:
        """Whether the first of a line has gone: with a lease, or long ago."""
        first = line[0]
        if not first.turn.done():  # else cancelled while waiting
            lease = self.router.acquire(first.candidates, now_s)
            if lease is None:
                return False
            first.turn.set_result(lease)
        line.popleft()
        return True

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
        moments = [
            moment
            for line in self._lines.values()
            if (moment := self.router.retry_at_s(line[0].candidates, now_s)) is not None
        ]
        if moments:
            delay_s = max(0.001, min(moments) - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._serve)
