"""Batches: many rows a statement, and one failure that does not touch its neighbours."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute.storage import MEMORY, Schema, SqliteStore, Work, insert_rows
from sqlite_support import database

SCHEMA = Schema(
    application_id=0x51525432,
    version=1,
    script="CREATE TABLE items (id INTEGER PRIMARY KEY, word TEXT NOT NULL, size INTEGER)",
)


def stored(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    return connection.execute("SELECT word, size FROM items ORDER BY id").fetchall()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 65, 200])
def test_rows_are_written_once_each_and_in_order(count: int) -> None:
    """Whatever sizes of statements they are cut into."""
    rows = [(f"w{number}", number) for number in range(count)]
    with database(MEMORY) as connection:
        connection.execute(SCHEMA.script)
        insert_rows(connection, "INSERT INTO items (word, size) VALUES", rows)
        assert stored(connection) == rows


@dataclass
class Gatherer:
    """Takes words from the work and writes them before the commit, as the ledger's books do."""

    gathered: list[tuple[str, int]] = field(default_factory=list)
    is_committed: bool = True

    def add(self, word: str, size: int) -> Work[str]:
        def work(connection: sqlite3.Connection) -> str:
            if word == "raise":
                self.gathered.append(("half done", 0))
                raise LookupError(word)
            self.gathered.append((word, size))
            return word

        return work

    def on_begin(self, connection: sqlite3.Connection) -> None:
        if not self.is_committed:
            self.gathered.clear()
        self.is_committed = False

    def before_commit(self, connection: sqlite3.Connection) -> None:
        insert_rows(connection, "INSERT INTO items (word, size) VALUES", self.gathered)
        self.gathered.clear()

    def on_commit(self) -> None:
        self.is_committed = True


#: Work that goes through, work that raises, and work whose words cannot be bound or stored.
pieces = st.one_of(
    st.tuples(st.sampled_from(["good", "fine"]), st.integers(0, 9)),
    st.sampled_from([("raise", 0), ("\ud800", 1), ("huge", 2**70)]),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(pieces, max_size=40))
def test_each_failure_stays_with_its_own_piece(work: list[tuple[str, int]]) -> None:
    """What can be written is written, once and in order; every other piece gets its own error."""
    gatherer = Gatherer()

    async def run() -> list[str | BaseException]:
        async with SqliteStore(MEMORY, SCHEMA, [gatherer]) as store:
            results = await asyncio.gather(
                *(store.submit(gatherer.add(*piece)) for piece in work), return_exceptions=True
            )
            assert store.read(stored) == [piece for piece in work if piece[0] in ("good", "fine")]
            return results

    errors = {"raise": LookupError, "\ud800": UnicodeEncodeError, "huge": OverflowError}
    for (word, _), result in zip(work, asyncio.run(run()), strict=True):
        if word in errors:
            assert isinstance(result, errors[word])
        else:
            assert result == word


async def test_a_participant_of_a_class_joins_once() -> None:
    """Also one that comes after others have written."""
    async with SqliteStore(MEMORY, SCHEMA) as store:
        await store.submit(lambda c: None)
        gatherer = store.participant(Gatherer)
        assert store.participant(Gatherer) is gatherer
        await store.submit(gatherer.add("good", 1))
        assert store.read(stored) == [("good", 1)]


async def test_a_task_that_writes_alone_does_not_wait(tmp_path: Path) -> None:
    """Commits are spaced only while several tasks write."""
    loop = asyncio.get_running_loop()
    async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA) as store:
        await store.submit(lambda c: None)
        best_s = float("inf")
        for _ in range(20):
            began_s = loop.time()
            await store.submit(lambda c: None)
            best_s = min(best_s, loop.time() - began_s)
        assert best_s < 0.008
