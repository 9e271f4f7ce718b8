"""A clock that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Time that passes only when told to, or by itself when everybody sleeps (`autojump`).

    With `autojump`, time leaps to the earliest deadline once the loop has gone round a few times
    without anything else becoming ready. Real I/O in flight does not hold the leap back.
    """

    def __init__(self, *, time_s: float = 1_790_000_000.0, autojump: bool = False) -> None:
        self._now_s = 0.0
        self._epoch_s = time_s
        self._autojump = autojump
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return self._now_s

    def time_s(self) -> float:
        return self._epoch_s + self._now_s

    def set_time(self, time_s: float) -> None:
        """Set the time of day, as a person or NTP would; what is monotonic goes on as before."""
        self._epoch_s = time_s - self._now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        if self._autojump:
            loop.call_soon(self._idle, 3)
        await woken

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper whose deadline has come, earliest first."""
        self._move_to(self._now_s + seconds)

    def _idle(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self._idle, rounds - 1)
        elif self._sleepers:
            self._move_to(self._sleepers[0][0])

    def _move_to(self, target_s: float) -> None:
        self._now_s = max(self._now_s, target_s)
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
