"""Standing in line for money: first come, first served among those who wait for one account."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from quantroute.errors import BudgetExceeded
from quantroute.ledger._records import EntryId

__all__ = ["Refusal", "WaitingLines"]

#: How often a waiting reservation looks for room that another process may have made.
_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reservation that does not fit; final if nothing under way can make room for it."""

    shortage: BudgetExceeded
    is_final: bool


@dataclass(slots=True)
class _Line:
    """Those who wait for one account: only the first one tries."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    room_made: asyncio.Event = field(default_factory=asyncio.Event)

    async def room(self) -> None:
        """Wait until somebody here made room, or until it is time to look for others'."""
        try:
            async with asyncio.timeout(_POLL_S):
                await self.room_made.wait()
        except TimeoutError:
            return  # look again: another process may have made room


@dataclass(slots=True)
class WaitingLines:
    """One line per account whose cap refused; used from one event loop."""

    _lines: defaultdict[str, _Line] = field(default_factory=lambda: defaultdict(_Line))

    @property
    def are_used(self) -> bool:
        """Whether anybody has come to stand in line yet; may be asked from any thread."""
        return bool(self._lines)

    def make_room(self) -> None:
        """Something was resolved, or a cap changed: the first in each line tries again."""
        for line in self._lines.values():
            line.room_made.set()

    async def stand(
        self,
        refusal: Refusal,
        try_again: Callable[[], Awaitable[EntryId | Refusal]],
        *,
        wait: bool,
    ) -> EntryId:
        """What `try_again` reserves after waiting in line; see `BudgetLedger.reserve`.

        Raises:
            BudgetExceeded: it does not fit now (`wait=False`), or never will.
        """
        if refusal.is_final or not wait:
            raise refusal.shortage
        line = self._lines[refusal.shortage.account]
        async with line.turn:
            while True:
                line.room_made.clear()
                result = await try_again()
                if not isinstance(result, Refusal):
                    return result
                if result.is_final:
                    raise result.shortage
                await line.room()
