"""Fresh for a while, kept for longer, read once however many ask.

Four tables over one clock: `fresh` answers at once; `recent` answers those who would rather have
the last value at once than wait for a new one; `kept` is what to fall back on when a read fails;
`resting` holds the fallback for a short time after a failure, so that two thousand callers do not
each wait for a service that is down. All are plain mappings: `cachetools.cached` on a coroutine
function fails at the second await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from cachetools import TTLCache

from quantroute.clock import Clock
from quantroute.errors import RegistryError
from quantroute.registry._source import ModelNotListed

__all__ = ["FlightCache"]

T = TypeVar("T")

_MOST_ENTRIES: Final = 4096
_REST_S: Final = 30.0
#: A read of a service that does not answer takes so long at most: three attempts of half a minute.
_READING_S: Final = 120.0


class FlightCache(Generic[T]):
    """Values by key with one read in flight per key; owned and closed by the registry.

    Args:
        staled: makes the value to hand out, from the kept one, when a read failed.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        ttl_s: float,
        max_stale_s: float,
        staled: Callable[[T, RegistryError], T],
    ) -> None:
        def table(ttl: float) -> TTLCache[Hashable, T]:
            return TTLCache(maxsize=_MOST_ENTRIES, ttl=ttl, timer=clock.now_s)

        self._fresh = table(ttl_s)
        self._kept = table(longest_s := max(ttl_s, max_stale_s))
        self._recent = table(min(ttl_s + _READING_S, longest_s))
        self._resting = table(min(ttl_s, _REST_S))
        self._staled = staled
        self._flights: dict[Hashable, asyncio.Task[T | RegistryError]] = {}

    def kept(self, key: Hashable) -> T | None:
        """The last value read, however old within the limit; never waits."""
        return self._kept.get(key)

    async def get(
        self,
        key: Hashable,
        read: Callable[[], Awaitable[T]],
        *,
        refresh: bool = False,
        wait: bool = True,
    ) -> T:
        """The value of `key`, read now if it is not fresh or `refresh` is set.

        Args:
            wait: False for the last value meanwhile, if there is a recent one.
        Raises:
            RegistryError: the read failed and nothing usable is kept.
        """
        if not refresh:
            held = self._fresh.get(key)
            if held is None:
                held = self._resting.get(key)
            if held is not None:
                return held
        flight = self._flight(key, read)
        if not (wait or refresh) and (recent := self._recent.get(key)) is not None:
            return recent
        outcome = await self._join(flight)
        if isinstance(outcome, RegistryError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Cancel reads in flight; whoever waits for one gets a `RegistryError`."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._flights.clear()

    def _flight(
        self, key: Hashable, read: Callable[[], Awaitable[T]]
    ) -> asyncio.Task[T | RegistryError]:
        loop = asyncio.get_running_loop()
        flight = self._flights.get(key)
        if flight is None or flight.get_loop() is not loop:
            # A task of its own, held here: a caller that is cancelled must not take the read away
            # from the others.
            flight = loop.create_task(self._fly(key, read), name=f"registry read {key}")
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def _landed(self, key: Hashable, flight: asyncio.Task[T | RegistryError]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _join(self, flight: asyncio.Task[T | RegistryError]) -> T | RegistryError:
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if flight.cancelled() and caller is not None and not caller.cancelling():
                raise RegistryError("the registry was closed during this read") from None
            raise

    async def _fly(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T | RegistryError:
        """Read and file the value. Failures are returned: nobody may be left to collect them."""
        try:
            value = await read()
        except ModelNotListed as error:
            for table in (self._fresh, self._recent, self._kept, self._resting):
                table.pop(key, None)
            return error
        except RegistryError as error:
            kept = self._kept.get(key)
            if kept is None:
                return error
            # `kept` keeps the original: the next comparison is with what was really read.
            self._resting[key] = self._recent[key] = stale = self._staled(kept, error)
            return stale
        self._fresh[key] = self._recent[key] = self._kept[key] = value
        self._resting.pop(key, None)
        return value
