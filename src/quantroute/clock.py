"""Time as a seam: everything that waits or stamps takes a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where time comes from. `quantroute.testing.FakeClock` is the other implementation."""

    def now_s(self) -> float:
        """Monotonic seconds, for durations and deadlines."""
        ...

    def time_s(self) -> float:
        """Seconds since the Unix epoch (UTC), for records that outlive the process."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for at least `seconds`."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def time_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
