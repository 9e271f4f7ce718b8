"""Outcomes that are durable here and not yet known on the server.

An outcome is written in the same transaction as its row, and crossed out once the server has it.
Between the two a process may die and the server may be away for days: whoever opens the file next
sends what is left. Sending one twice does no harm, since an entry is resolved once.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantroute.errors import ConfigurationError
from quantroute.storage import SqliteStore

__all__ = ["Outbox", "Unsent"]


@dataclass(frozen=True, slots=True)
class Unsent:
    """An outcome that an earlier owner of the file left."""

    number: int
    owner: str
    said: Mapping[str, Any]


class Outbox:
    """The table of unsent outcomes in a local store.

    Args:
        ledger_id: which ledger they belong to; those of another must never reach this one.
    """

    def __init__(self, store: SqliteStore, *, ledger_id: str, owner: str) -> None:
        self._store = store
        self._ledger_id = ledger_id
        self._owner = owner

    async def open(self, is_alive: Callable[[str], bool]) -> tuple[Unsent, ...]:
        """Make the table if need be; what owners that are not alive have left.

        Raises:
            ConfigurationError: something is left for another ledger.
        """
        found = await self._store.submit(_prepare)
        if foreign := [row for row in found if row[1] != self._ledger_id]:
            raise ConfigurationError(
                f"{self._store.path} keeps {len(foreign)} outcomes for another ledger; open it "
                "with that one first, so that they are not lost"
            )
        return tuple(
            Unsent(number, owner, json.loads(said))
            for number, _, owner, said in found
            if owner == self._owner or not is_alive(owner)
        )

    def add(self, connection: sqlite3.Connection, said: Mapping[str, Any]) -> int:
        """Keep an outcome, within the transaction of its row; its number."""
        cursor = connection.execute(
            "INSERT INTO shared_outbox (ledger, owner, said) VALUES (?, ?, ?)",
            (self._ledger_id, self._owner, json.dumps(said)),
        )
        return int(cursor.lastrowid or 0)

    def cross_out(self, number: int) -> None:
        """The server has it. Not waited for: a crash before it is written sends it again."""
        self._store.submit_nowait(
            lambda c: c.execute("DELETE FROM shared_outbox WHERE number = ?", (number,)).close()
        )

    async def count(self) -> int:
        """Outcomes in the file."""
        return await self._store.aread(
            lambda c: int(c.execute("SELECT count(*) FROM shared_outbox").fetchone()[0])
        )


def _prepare(connection: sqlite3.Connection) -> list[tuple[int, str, str, str]]:
    connection.execute(
        "CREATE TABLE IF NOT EXISTS shared_outbox (number INTEGER PRIMARY KEY, "
        "ledger TEXT NOT NULL, owner TEXT NOT NULL, said TEXT NOT NULL) STRICT"
    )
    return connection.execute(
        "SELECT number, ledger, owner, said FROM shared_outbox ORDER BY number"
    ).fetchall()
