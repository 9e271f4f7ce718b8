"""The store: durable, first in first out, one failure at a time, and closed after a real one."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from quantroute.errors import JournalError
from quantroute.storage import MEMORY, Schema, SqliteStore, Work
from sqlite_support import database

SCHEMA = Schema(
    application_id=0x51525431,
    version=2,
    script="CREATE TABLE items (id INTEGER PRIMARY KEY, word TEXT NOT NULL UNIQUE)",
)


def insert(word: str) -> Work[int]:
    def work(connection: sqlite3.Connection) -> int:
        return int(
            connection.execute("INSERT INTO items (word) VALUES (?)", (word,)).lastrowid or 0
        )

    return work


def words(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT word FROM items ORDER BY id")]


class Counter:
    """Counts the transactions it takes part in."""

    def __init__(self) -> None:
        self.begun = self.committed = 0

    def on_begin(self, connection: sqlite3.Connection) -> None:
        self.begun += 1

    def before_commit(self, connection: sqlite3.Connection) -> None:
        pass

    def on_commit(self) -> None:
        self.committed += 1


@pytest.fixture(params=["file", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return MEMORY if request.param == "memory" else str(tmp_path / "sub" / "store.sqlite")


# -- work -----------------------------------------------------------------------------------------


async def test_work_returns_its_result_and_is_seen_by_readers(path: str) -> None:
    """A result is handed out only when others can read what led to it."""
    async with SqliteStore(path, SCHEMA) as store:
        assert await store.submit(insert("one")) == 1
        assert store.read(words) == ["one"]
        assert await store.aread(words) == ["one"]


async def test_work_runs_first_in_first_out(path: str) -> None:
    """Concurrent submissions keep the order in which they were made."""
    async with SqliteStore(path, SCHEMA) as store:
        ids = await asyncio.gather(*(store.submit(insert(f"w{n}")) for n in range(300)))
        assert ids == list(range(1, 301))


async def test_concurrent_work_shares_commits(tmp_path: Path) -> None:
    """Group commit: far fewer transactions than pieces of work."""
    counter = Counter()
    async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA, [counter]) as store:
        await asyncio.gather(*(store.submit(insert(f"w{n}")) for n in range(1_000)))
    assert counter.committed == counter.begun < 200


async def test_a_failing_piece_is_rolled_back_alone(path: str) -> None:
    """Its own changes go, its neighbours' in the same transaction stay."""

    def half(connection: sqlite3.Connection) -> None:
        insert("half")(connection)
        raise LookupError("half-way")

    async with SqliteStore(path, SCHEMA) as store:
        results = await asyncio.gather(
            store.submit(insert("a")),
            store.submit(half),
            store.submit(insert("a")),
            store.submit(insert("b")),
            return_exceptions=True,
        )
        assert isinstance(results[1], LookupError)
        assert isinstance(results[2], sqlite3.IntegrityError)
        assert store.read(words) == ["a", "b"]


@pytest.mark.parametrize(
    "statement", ["INSERT INTO nowhere VALUES (1)", "SELEKT 1", "INSERT INTO items VALUES (?)"]
)
async def test_a_mistake_in_one_statement_does_not_close_the_store(
    path: str, statement: str
) -> None:
    """Bad SQL is the fault of whoever wrote it, not of the disk."""
    async with SqliteStore(path, SCHEMA) as store:
        with pytest.raises(sqlite3.Error):
            await store.submit(lambda connection: connection.execute(statement).fetchall())
        await store.submit(insert("still open"))
        assert store.read(words) == ["still open"]


def test_one_store_serves_several_loops_in_turn(path: str) -> None:
    """Opened outside any loop, used from two `asyncio.run` calls, closed outside again."""
    store = SqliteStore(path, SCHEMA).open()
    for word in ("first", "second"):
        asyncio.run(store.submit(insert(word)))
    assert store.read(words) == ["first", "second"]
    store.close()
    store.close()  # idempotent


async def test_a_closed_store_refuses(path: str) -> None:
    """Use after close raises instead of waiting for ever."""
    store = SqliteStore(path, SCHEMA)
    async with store:
        pass
    with pytest.raises(JournalError, match="closed"):
        await store.submit(insert("late"))
    with pytest.raises(JournalError, match="closed"):
        store.read(words)


async def test_readers_cannot_write(tmp_path: Path) -> None:
    """The reading connection is for reading."""
    async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA) as store:
        with pytest.raises((sqlite3.Error, JournalError)):
            store.read(insert("smuggled"))
        assert store.read(words) == []


# -- failures of the file -------------------------------------------------------------------------


async def test_a_full_disk_fails_every_waiter_and_closes_the_store(tmp_path: Path) -> None:
    """Nothing is acknowledged that is not on disk; afterwards everything is refused."""
    path = str(tmp_path / "s.sqlite")
    async with SqliteStore(path, SCHEMA) as store:
        await store.submit(insert("kept"))
        pages = await store.submit(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        await store.submit(lambda c: c.execute(f"PRAGMA max_page_count={pages + 1}").fetchall())
        results = await asyncio.gather(
            *(store.submit(insert(f"{n}" * 3_000)) for n in range(20)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        assert failed
        assert all(isinstance(error, JournalError) for error in failed)
        assert "free space" in str(failed[0])
        with pytest.raises(JournalError, match="free space"):
            await store.submit(insert("after"))
    async with SqliteStore(path, SCHEMA) as again:
        acknowledged = [r for r in results if not isinstance(r, BaseException)]
        assert len(again.read(words)) == 1 + len(acknowledged)


async def test_a_broken_participant_fails_everybody_and_frees_the_file(tmp_path: Path) -> None:
    """Even a bug must not leave tasks waiting, or the file locked for other processes."""

    class Broken(Counter):
        def before_commit(self, connection: sqlite3.Connection) -> None:
            raise ZeroDivisionError("oops")

    path = str(tmp_path / "s.sqlite")
    async with SqliteStore(path, SCHEMA, [Broken()]) as broken:
        waiting = [broken.submit(insert(f"w{n}")) for n in range(5)]
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert all(isinstance(result, JournalError) for result in results)
        assert "ZeroDivisionError" in str(results[0])
        async with SqliteStore(path, SCHEMA) as healthy:
            assert await asyncio.wait_for(healthy.submit(insert("free")), 5) == 1


def test_a_foreign_database_is_refused_untouched(tmp_path: Path) -> None:
    """Another program's tables are not ours to extend."""
    path = tmp_path / "theirs.sqlite"
    with database(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(JournalError, match="another program"):
        SqliteStore(str(path), SCHEMA).open()
    with database(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    """An older program must not write a file it does not understand."""
    path = str(tmp_path / "s.sqlite")
    newer = Schema(application_id=SCHEMA.application_id, version=3, script=SCHEMA.script)
    SqliteStore(path, newer).open().close()
    with pytest.raises(JournalError, match="upgrade"):
        SqliteStore(path, SCHEMA).open()


def test_something_else_than_a_database_is_refused(tmp_path: Path) -> None:
    """A text file under that name stays as it is."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(JournalError, match="not a quantroute file"):
        SqliteStore(str(path), SCHEMA).open()
    assert path.read_text() == "not a database\n" * 100


def test_an_impossible_folder_is_explained(tmp_path: Path) -> None:
    """The error is ours and names the path."""
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "s.sqlite")
    with pytest.raises(JournalError) as caught:
        SqliteStore(path, SCHEMA).open()
    assert caught.value.path == path


async def test_a_damaged_file_is_reported_not_believed(tmp_path: Path) -> None:
    """Overwritten pages end in an error, never in wrong rows."""
    path = tmp_path / "s.sqlite"
    async with SqliteStore(str(path), SCHEMA) as store:
        await asyncio.gather(*(store.submit(insert(f"w{n}" * 50)) for n in range(500)))
    content = bytearray(path.read_bytes())
    content[4_096:] = b"\xa5" * (len(content) - 4_096)
    path.write_bytes(bytes(content))
    with pytest.raises(JournalError, match="damaged"):
        async with SqliteStore(str(path), SCHEMA) as store:
            store.read(words)


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    """`kill -9` in the middle of writing: every acknowledged row is there, in order."""
    path = tmp_path / "s.sqlite"
    program = f"""
import asyncio, sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}
from test_storage_sqlite import SCHEMA, insert
from quantroute.storage import SqliteStore
async def main():
    async with SqliteStore({str(path)!r}, SCHEMA) as store:
        for n in range(100_000):
            await store.submit(insert(f"w{{n}}"))
            print(n, flush=True)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(50):
        child.stdout.readline()
    child.kill()
    acknowledged = 50 + len(child.stdout.read().splitlines())
    child.wait()
    child.stdout.close()
    store = SqliteStore(str(path), SCHEMA).open()
    kept = store.read(words)
    store.close()
    assert len(kept) in (acknowledged, acknowledged + 1)
    assert kept == [f"w{n}" for n in range(len(kept))]
