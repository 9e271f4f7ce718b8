"""Who shares a ledger, who of them is alive, and what becomes of the entries of the dead."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.clock import Clock
from quantroute.errors import JournalError
from quantroute.ledger._ledger import BudgetLedger
from quantroute.ledger._records import EntryStatus, Held
from quantroute.ledger._server_books import read_books, read_entries
from quantroute.ledger._server_link import ServerLink
from quantroute.ledger._shared_records import operation
from quantroute.ledger._state import OpenEntry
from quantroute.storage import MEMORY

__all__ = ["Owners", "about_owner"]

_HELD_AT_ONCE: Final = 1_000


def about_owner(path: str, label: str) -> dict[str, object]:
    """What this process tells others of itself; `path` is of its own file."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "store": path if path == MEMORY else str(Path(path).resolve()),
        "label": label,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The owners of one shared ledger, as one of them sees the others.

    Args:
        about: see `about_owner`.
        dead_after_s: an owner not heard of for so long is dead.
    """

    link: ServerLink
    local: BudgetLedger
    owner: str
    about: Mapping[str, object]
    dead_after_s: float
    clock: Clock

    async def bury_the_dead(self, *, is_opening: bool = False) -> None:
        """Hold the entries of owners that are known to be dead; they stay counted.

        Raises:
            JournalError: another worker that lives has the label with which this one opens.
        """
        owners, alive = await self._look()
        if not is_opening and len(alive) == len(owners):
            return
        # Entries before owners: whoever has reserved one of them by then is seen to live.
        entries = await read_entries(self.link)
        owners, alive = await self._look()
        if is_opening:
            self._refuse_double(alive)
        orphans = [
            entry
            for entry in entries.values()
            if entry.status is EntryStatus.RESERVED and entry.owner not in alive
        ]
        for start in range(0, len(orphans), _HELD_AT_ONCE):
            await asyncio.gather(*map(self.hold, orphans[start : start + _HELD_AT_ONCE]))
        for owner in owners.keys() - alive.keys():
            await self.link.call({"op": "forget", "owner": owner})

    async def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all owners say of themselves, and what those say who live."""
        found = await read_books(self.link, "owners")
        now_s, _ = await self.link.reading(self.link.client.time())
        owners = {
            name.removesuffix("\tabout"): json.loads(text)
            for name, text in found.items()
            if name.endswith("\tabout")
        }
        alive = {
            owner: about
            for owner, about in owners.items()
            if owner == self.owner
            or self._lives(owner, about, now_s - int(found[f"{owner}\tbeat"]))
        }
        return owners, alive

    def _lives(self, owner: str, about: Mapping[str, Any], silent_s: float) -> bool:
        mine = self.about
        if about["store"] == mine["store"] != MEMORY and about["host"] == mine["host"]:
            return self.local.is_alive(owner)
        return silent_s <= self.dead_after_s

    async def refuse_double(self) -> None:
        """After a silence in which others took this owner for dead.

        Raises:
            JournalError: another worker now does what this one does.
        """
        _, alive = await self._look()
        self._refuse_double(alive)

    def _refuse_double(self, alive: Mapping[str, Mapping[str, Any]]) -> None:
        label = self.about["label"]
        for owner, about in alive.items():
            if label and owner != self.owner and about["label"] == label:
                raise JournalError(
                    path=self.link.place,
                    problem=f"{label} is being done by process {about['pid']} on "
                    f"{about['host']}; stop it, or if it died wait {self.dead_after_s:g} s",
                )

    async def hold(self, entry: OpenEntry) -> None:
        """Count an entry of another owner as held, since nobody will tell what became of it."""
        record = Held(
            entry_id=entry.entry_id,
            reason="process died",
            generation_id=None,
            at_s=self.clock.time_s(),
        )
        await self.link.call(operation(record))
