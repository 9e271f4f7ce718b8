"""Group commit, locks and whole-or-absent files."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quantroute.errors import JournalError
from quantroute.storage import FileLock, Schema, SqliteStore, is_locked

SCHEMA = Schema(application_id=7, version=1, script="CREATE TABLE t (x INTEGER PRIMARY KEY)")


def insert(number: int) -> object:
    return lambda connection: connection.execute("INSERT INTO t VALUES (?)", (number,)).lastrowid


async def test_results_come_back_in_order_and_failures_stay_alone(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA) as store:
        work = [insert(number) for number in (1, 2, 2, 3)]
        results = await asyncio.gather(
            *(store.submit(item) for item in work),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert results[:2] == [1, 2]
        assert isinstance(results[2], Exception)
        assert results[3] == 3
        assert store.read(lambda c: c.execute("SELECT sum(x) FROM t").fetchone()) == (6,)


async def test_work_of_a_cancelled_task_is_done_all_the_same(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA) as store:
        task = asyncio.ensure_future(store.submit(insert(1)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await store.submit(insert(2))  # type: ignore[arg-type]
        assert store.read(lambda c: c.execute("SELECT count(*) FROM t").fetchone()) == (2,)


async def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA).open()
    futures = [store.submit_nowait(insert(number)) for number in range(50)]  # type: ignore[arg-type]
    await store.aclose()
    await asyncio.gather(*futures)
    with pytest.raises(JournalError, match="closed"):
        store.submit_nowait(insert(99))  # type: ignore[arg-type]
    async with SqliteStore(store.path, SCHEMA) as again:
        assert again.read(lambda c: c.execute("SELECT count(*) FROM t").fetchone()) == (50,)


def test_one_store_object_works_on_successive_loops(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA)

    async def once(number: int) -> None:
        async with store:
            await store.submit(insert(number))  # type: ignore[arg-type]

    asyncio.run(once(1))
    asyncio.run(once(2))


def test_a_lock_names_its_owner_and_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    code = (
        "import sys, time; from pathlib import Path; from quantroute.storage import FileLock;"
        "FileLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_locked(path)
    with pytest.raises(JournalError, match=f"process {holder.pid} on "):
        FileLock(path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert not is_locked(path)
    with FileLock(path):
        assert is_locked(path)
        with pytest.raises(JournalError, match=f"process {os.getpid()} on "):
            FileLock(path).acquire()


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    async def once() -> None:
        async with SqliteStore(str(tmp_path / "s.sqlite"), SCHEMA) as store:
            await store.submit(lambda c: None)

    asyncio.run(once())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        asyncio.run(once())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
