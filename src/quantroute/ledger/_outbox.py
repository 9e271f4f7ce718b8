"""What a worker's file remembers of the server: outcomes not heard there, batches confirmed there.

An outcome is written in the same transaction as its row, and crossed out once the server has it.
Between the two a process may die and the server may be away for days: whoever opens the file next
sends what is left. Sending one twice does no harm, since an entry is resolved once.

Beside them stands how many batches of this opening the server had confirmed by then. A server that
is set back to an older state, or emptied, can so be told from the one that was left: it knows
fewer, or has another id.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantroute._log import get_logger
from quantroute.errors import ConfigurationError, JournalError
from quantroute.ledger._server_client import LOST_LEDGER_ADVICE
from quantroute.storage import SqliteStore

__all__ = ["Outbox", "Unsent"]

log = get_logger("quantroute.ledger")


@dataclass(frozen=True, slots=True)
class Unsent:
    """An outcome that an earlier owner of the file left."""

    number: int
    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Left:
    """What was found in the file: outcomes by ledger, and the ledgers it was used with."""

    outcomes: list[tuple[int, str, str, str]]
    ledgers: dict[str, str]
    confirmed: dict[str, int]


class Outbox:
    """The tables of unsent outcomes and confirmed batches in a local store.

    Args:
        ledger_id: which ledger they belong to; those of another must never reach this one.
        name: what that ledger is called on its server.
        confirmed: how many batches of this owner the server has confirmed.
    """

    def __init__(
        self,
        store: SqliteStore,
        *,
        ledger_id: str,
        name: str,
        owner: str,
        confirmed: Callable[[], int],
    ) -> None:
        self._store = store
        self._ledger_id = ledger_id
        self._name = name
        self._owner = owner
        self._confirmed = confirmed
        self._left = _Left([], {}, {})

    async def open(self) -> Mapping[str, int]:
        """Make the tables if need be; the batches of earlier owners that were confirmed.

        Raises:
            JournalError: the file was last used with a ledger of this name that is gone.
            ConfigurationError: something is left for a ledger of unknown name.
        """
        self._left = await self._store.submit(lambda c: _prepare(c, self._ledger_id))
        if self._name in self._left.ledgers.values():
            raise JournalError(
                path=self._store.path,
                problem=f"it was paid from another ledger called {self._name!r} than the one on "
                f"this server, which has lost its data or is another; {LOST_LEDGER_ADVICE}",
            )
        self._tell_others()
        return self._left.confirmed

    def _tell_others(self) -> None:
        """Outcomes for another ledger stay in the file, if it is another on purpose."""
        waiting = Counter(row[1] for row in self._left.outcomes if row[1] != self._ledger_id)
        unknown = waiting.keys() - self._left.ledgers.keys()
        if unknown:
            raise ConfigurationError(
                f"{self._store.path} keeps {sum(waiting[item] for item in unknown)} outcomes for "
                "another ledger; open it with that one first, so that they are not lost"
            )
        for ledger_id, name in self._left.ledgers.items():
            log.warning(
                "rows in this file were paid from another ledger, which this one's cap leaves out",
                path=self._store.path,
                ledger=name,
                unsent_outcomes=waiting[ledger_id],
            )

    def unsent(self, is_alive: Callable[[str], bool]) -> tuple[Unsent, ...]:
        """What owners that are not alive have left for this ledger."""
        return tuple(
            Unsent(number, json.loads(said))
            for number, ledger, owner, said in self._left.outcomes
            if ledger == self._ledger_id and (owner == self._owner or not is_alive(owner))
        )

    async def begin(self, is_alive: Callable[[str], bool]) -> None:
        """The server has confirmed something to this owner: earlier ones need not be asked of."""
        gone = [owner for owner in self._left.confirmed if not is_alive(owner)]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "DELETE FROM shared_ledgers WHERE owner = ?", [(owner,) for owner in gone]
            )
            connection.execute(
                "INSERT INTO shared_ledgers (owner, ledger, name, confirmed) VALUES (?, ?, ?, ?)",
                (self._owner, self._ledger_id, self._name, self._confirmed()),
            )

        await self._store.submit(work)

    def add(self, connection: sqlite3.Connection, said: Mapping[str, Any]) -> int:
        """Keep an outcome, within the transaction of its row; its number."""
        cursor = connection.execute(
            "INSERT INTO shared_outbox (ledger, owner, said) VALUES (?, ?, ?)",
            (self._ledger_id, self._owner, json.dumps(said)),
        )
        self._note_confirmed(connection)
        return int(cursor.lastrowid or 0)

    def cross_out(self, number: int) -> None:
        """The server has it. Not waited for: a crash before it is written sends it again."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM shared_outbox WHERE number = ?", (number,))
            self._note_confirmed(connection)

        self._store.submit_nowait(work)

    def _note_confirmed(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "UPDATE shared_ledgers SET confirmed = ? WHERE owner = ?",
            (self._confirmed(), self._owner),
        )

    async def count(self) -> int:
        """Outcomes in the file that this ledger has not heard."""
        return await self._store.aread(
            lambda c: int(
                c.execute(
                    "SELECT count(*) FROM shared_outbox WHERE ledger = ?", (self._ledger_id,)
                ).fetchone()[0]
            )
        )


def _prepare(connection: sqlite3.Connection, ledger_id: str) -> _Left:
    connection.execute(
        "CREATE TABLE IF NOT EXISTS shared_outbox (number INTEGER PRIMARY KEY, "
        "ledger TEXT NOT NULL, owner TEXT NOT NULL, said TEXT NOT NULL) STRICT"
    )
    connection.execute(
        "CREATE TABLE IF NOT EXISTS shared_ledgers (owner TEXT PRIMARY KEY, "
        "ledger TEXT NOT NULL, name TEXT NOT NULL, confirmed INTEGER NOT NULL) STRICT"
    )
    outcomes = connection.execute(
        "SELECT number, ledger, owner, said FROM shared_outbox ORDER BY number"
    ).fetchall()
    used = connection.execute(
        "SELECT owner, ledger, name, confirmed FROM shared_ledgers"
    ).fetchall()
    return _Left(
        outcomes,
        ledgers={ledger: name for _, ledger, name, _ in used if ledger != ledger_id},
        confirmed={owner: confirmed for owner, ledger, _, confirmed in used if ledger == ledger_id},
    )
