"""The ledger on a real file: caps under concurrency, restarts, faults, several processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute.errors import (
    BudgetExceeded,
    ConfigurationError,
    EntryStateError,
    JournalError,
)
from quantroute.ledger import ROOT, Account, Basis, BudgetLedger, Charge
from quantroute.ledger._statement import StatementLine, read_statement, replayed_statement
from quantroute.money import NO_CAP
from quantroute.pricing import TokenUsage
from sqlite_support import database

DOLLAR = 10**12


def charge(amount: int, **more: object) -> Charge:
    return Charge(amount_pusd=amount, basis=Basis.REPORTED, **more)  # type: ignore[arg-type]


async def test_two_thousand_tasks_at_the_edge_of_the_cap_never_pass_it() -> None:
    """Cap $1.00, $0.99 spent, 2,000 tasks at once, each up to $0.004: two fit."""
    async with BudgetLedger.in_memory(cap="1.00") as ledger:
        first = await ledger.reserve(DOLLAR * 99 // 100)
        await ledger.post(first, charge(DOLLAR * 99 // 100))
        results = await asyncio.gather(
            *(ledger.reserve(DOLLAR * 4 // 1000, wait=False) for _ in range(2000)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, str) for result in results) == 2
        assert all(isinstance(result, str | BudgetExceeded) for result in results)
        assert ledger.balance().posted_pusd + ledger.balance().pending_pusd <= DOLLAR
        await ledger.verify()


async def test_waiting_reservations_use_the_whole_cap_and_end_when_nothing_fits() -> None:
    """Holds are twice the cost; at the end less than one hold is left over, and nobody hangs."""
    hold, cost = DOLLAR // 50, DOLLAR // 100
    async with BudgetLedger.in_memory(cap="1.00") as ledger:
        refused = 0

        async def row() -> None:
            nonlocal refused
            try:
                entry = await ledger.reserve(hold)
            except BudgetExceeded:
                refused += 1
                return
            await asyncio.sleep(0)
            await ledger.post(entry, charge(cost))

        await asyncio.gather(*(row() for _ in range(300)))
        balance = ledger.balance()
        assert balance.posted_pusd == 99 * cost
        assert balance.pending_pusd == 0
        assert refused == 300 - 99
        await ledger.verify()


async def test_caps_of_sub_accounts_hold_too_and_do_not_block_each_other() -> None:
    async with BudgetLedger.in_memory(cap="10") as ledger:
        await ledger.set_cap(Account("run/a"), "1")
        entry = await ledger.reserve(DOLLAR, account=Account("run/a"))
        waiting = asyncio.ensure_future(ledger.reserve(DOLLAR // 2, account=Account("run/a")))
        await asyncio.sleep(0.01)
        await ledger.reserve(DOLLAR, account=Account("run/b"))  # not behind run/a's line
        assert not waiting.done()
        await ledger.post(entry, charge(DOLLAR // 2))
        await waiting
        assert ledger.balance(Account("run")).pending_pusd == DOLLAR + DOLLAR // 2


async def test_resolving_twice_is_an_error_and_changes_nothing() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        entry = await ledger.reserve(5)
        await ledger.post(entry, charge(3))
        before = ledger.balance()
        with pytest.raises(EntryStateError):
            await ledger.void(entry, reason="late")
        with pytest.raises(EntryStateError):
            await ledger.post(entry, charge(3))
        assert ledger.balance() == before
        await ledger.verify()


async def test_work_that_comes_along_commits_with_the_charge_or_not_at_all(tmp_path: Path) -> None:
    async with BudgetLedger.open(tmp_path / "l.sqlite", cap="1") as ledger:
        await ledger.store.submit(lambda c: c.execute("CREATE TABLE rows (text TEXT)") and None)

        def store(text: str, *, fail: bool = False) -> object:
            def work(connection: sqlite3.Connection) -> None:
                connection.execute("INSERT INTO rows VALUES (?)", (text,))
                if fail:
                    raise RuntimeError("no")

            return work

        good, bad = await ledger.reserve(5), await ledger.reserve(5)
        await ledger.post(good, charge(3), also=store("kept"))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await ledger.post(bad, charge(3), also=store("lost", fail=True))  # type: ignore[arg-type]
        with pytest.raises(EntryStateError):
            await ledger.post(good, charge(3), also=store("twice"))  # type: ignore[arg-type]
        rows = ledger.store.read(lambda c: c.execute("SELECT text FROM rows").fetchall())
        assert rows == [("kept",)]
        assert ledger.balance().posted_pusd == 3
        assert ledger.balance().pending_pusd == 5
        await ledger.verify()


async def test_reopening_gives_the_same_balance_and_holds_what_was_under_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "l.sqlite"
    usage = TokenUsage(input_tokens=10, output_tokens=20, reasoning_tokens=5)
    async with BudgetLedger.open(path, cap="1") as ledger:
        done, held, open_one = [await ledger.reserve(10, account=Account("run")) for _ in range(3)]
        await ledger.post(done, charge(7, usage=usage, generation_id="gen-1"))
        await ledger.hold(held, reason="no usage", generation_id="gen-2")
        ledger.identify(open_one, "gen-3")
        await ledger.note("k", "v")
    async with BudgetLedger.open(path) as ledger:
        balance = ledger.balance(Account("run"))
        assert (balance.posted_pusd, balance.pending_pusd, balance.held_pusd) == (7, 20, 20)
        assert balance.reasoning_tokens == 5
        entries = {entry.entry_id: entry for entry in await ledger.unresolved()}
        assert entries[held].generation_id == "gen-2"
        assert entries[open_one].generation_id == "gen-3"
        assert entries[open_one].reason == "closed while in flight"
        assert ledger.notes == {"k": "v"}
        await ledger.verify()
        (line,) = await ledger.statement()
        assert (line.account, line.posted_pusd, line.output_tokens) == ("run", 7, 20)


@pytest.mark.parametrize("bad", [-1, "nan", "x", True])
def test_impossible_caps_are_refused_at_construction(bad: object) -> None:
    with pytest.raises(ConfigurationError):
        BudgetLedger.in_memory(cap=bad)


async def test_a_new_ledger_needs_a_cap_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with pytest.raises(ConfigurationError, match="NO_CAP"):
        async with BudgetLedger.open(path):
            pass
    async with BudgetLedger.open(path, cap="2"):
        pass
    async with BudgetLedger.open(path) as ledger:
        assert ledger.balance().cap == 2 * DOLLAR
    async with BudgetLedger.open(path, cap="3") as ledger:
        assert ledger.balance().cap == 3 * DOLLAR
    async with BudgetLedger.open(path, cap=NO_CAP) as ledger:
        assert ledger.balance().available_pusd is None
        await ledger.verify()


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**32))
def test_cancelling_at_any_moment_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)

    async def scenario() -> None:
        async with BudgetLedger.in_memory(cap="0.000000000100") as ledger:

            async def row() -> None:
                entry = await ledger.reserve(rng.randint(1, 40))
                try:
                    await asyncio.sleep(0.001 * rng.random())
                finally:
                    await ledger.post(entry, charge(rng.randint(0, 1)))

            tasks = [asyncio.ensure_future(row()) for _ in range(30)]
            for task in rng.sample(tasks, 15):
                await asyncio.sleep(0.0005 * rng.random())
                task.cancel()
            await asyncio.wait(tasks)
            await ledger.note("barrier", "passed")  # behind every queued void
            assert ledger.balance().posted_pusd <= 100
            assert ledger.balance().pending_pusd == ledger.balance().held_pusd == 0 or all(
                not task.cancelled() for task in tasks
            )
            await ledger.verify()

    asyncio.run(scenario())


class TestFiles:
    async def test_another_programs_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "other.sqlite"
        with database(path) as connection:
            connection.execute("CREATE TABLE t (x)")
        with pytest.raises(JournalError, match="another program"):
            async with BudgetLedger.open(path, cap="1"):
                pass

    async def test_a_text_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("not a database, and long enough to have a header " * 10)
        with pytest.raises(JournalError, match="choose another"):
            async with BudgetLedger.open(path, cap="1"):
                pass

    async def test_a_newer_layout_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "l.sqlite"
        async with BudgetLedger.open(path, cap="1"):
            pass
        with database(path) as connection:
            connection.execute("PRAGMA user_version=99")
        with pytest.raises(JournalError, match="upgrade"):
            async with BudgetLedger.open(path, cap="1"):
                pass

    async def test_tampering_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / "l.sqlite"
        async with BudgetLedger.open(path, cap="1") as ledger:
            await ledger.post(await ledger.reserve(10), charge(7))
        with database(path) as connection:
            connection.execute("UPDATE accounts SET posted_pusd = 1")
        async with BudgetLedger.open(path) as ledger:
            with pytest.raises(JournalError, match="differ"):
                await ledger.verify()

    async def test_a_full_disk_stops_everything_and_loses_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "l.sqlite"
        async with BudgetLedger.open(path, cap="1") as ledger:
            entry = await ledger.reserve(10)
            await ledger.store.submit(lambda c: c.execute("PRAGMA max_page_count=1") and None)
            with pytest.raises(JournalError):
                await ledger.store.submit(
                    lambda c: c.execute("CREATE TABLE big AS SELECT zeroblob(100000)") and None
                )
            with pytest.raises(JournalError):
                await ledger.post(entry, charge(1))
            with pytest.raises(JournalError):
                await ledger.reserve(1)
        async with BudgetLedger.open(path) as ledger:
            assert ledger.balance().pending_pusd == 10
            await ledger.verify()


WORKER = textwrap.dedent(
    """
    import asyncio, random, sys
    from quantroute.errors import BudgetExceeded
    from quantroute.ledger import Basis, BudgetLedger, Charge

    async def main(path, seed):
        rng = random.Random(seed)
        spent = 0
        async with BudgetLedger.open(path) as ledger:
            print("open", flush=True)
            sys.stdin.readline()  # both start together
            async def row():
                nonlocal spent
                while True:
                    try:
                        entry = await ledger.reserve(1000)
                    except BudgetExceeded:
                        return
                    await asyncio.sleep(0.001)  # the other process gets its turn
                    cost = rng.randint(300, 1000)
                    await ledger.post(entry, Charge(amount_pusd=cost, basis=Basis.REPORTED))
                    spent += cost
            await asyncio.gather(*(row() for _ in range(16)))
        print(spent, flush=True)

    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    """
)


def start_worker(path: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_two_processes_share_one_cap(tmp_path: Path) -> None:
    path, cap = tmp_path / "l.sqlite", 4_000_000
    async with BudgetLedger.open(path, cap="0.000004"):
        pass
    workers = [start_worker(path, seed) for seed in (1, 2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "open\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    spent = [int(worker.communicate(timeout=50)[0]) for worker in workers]
    async with BudgetLedger.open(path) as ledger:
        balance = ledger.balance()
        assert balance.posted_pusd == sum(spent)
        assert cap - 1000 < balance.posted_pusd <= cap
        assert balance.pending_pusd == 0
        assert min(spent) > 0
        await ledger.verify()


async def test_kill_9_at_random_moments_keeps_every_reservation_counted(tmp_path: Path) -> None:
    path, rng = tmp_path / "l.sqlite", random.Random(5)
    async with BudgetLedger.open(path, cap="100"):
        pass
    for seed in range(4):
        worker = start_worker(path, seed)
        assert worker.stdout is not None
        assert worker.stdin is not None
        worker.stdout.readline()
        worker.stdin.close()
        await asyncio.sleep(0.05 + 0.2 * rng.random())
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        async with BudgetLedger.open(path) as ledger:
            await ledger.verify()
            balance = ledger.balance()
            assert balance.pending_pusd == balance.held_pusd
            assert all(entry.reason == "process died" for entry in await ledger.unresolved())
    assert balance.posted_entries > 0


async def test_lock_files_of_killed_processes_are_swept_when_old(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    left_behind, young = (tmp_path / f"l.sqlite.owner-{name}.lock" for name in ("old", "young"))
    left_behind.touch()
    young.touch()
    os.utime(left_behind, (0, 0))
    async with BudgetLedger.open(path, cap="1"):
        assert not left_behind.exists()
        assert young.exists()


async def test_a_living_process_keeps_its_reservations(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1") as first:
        entry = await first.reserve(10)
        async with BudgetLedger.open(path) as second:
            assert await second.unresolved() == ()
            assert second.balance().pending_pusd == 10
            await second.reserve(5)
        await first.post(entry, charge(3))
        assert first.balance(ROOT).posted_pusd == 3
        await first.verify()


async def test_a_held_entry_may_be_settled_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1") as first:
        entry = await first.reserve(10)
        await first.hold(entry, reason="timeout")
        async with BudgetLedger.open(path) as second:
            await second.post(entry, charge(4))
        with pytest.raises(EntryStateError):
            await first.post(entry, charge(4))
        await first.reserve(1)
        assert first.balance().posted_pusd == 4


async def test_kept_sums_change_no_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantroute.ledger._ledger._RECORDS_AT_ONCE", 3)
    path = tmp_path / "run.sqlite"
    before: tuple[StatementLine, ...] = ()
    for start in range(3):
        async with BudgetLedger.open(path, cap="1") as ledger:
            assert await ledger.statement() == before  # now from the kept sums
            for number in range(4):
                entry = await ledger.reserve(100, account=Account(f"a{number % 2}"), endpoint="x/y")
                if number == start:
                    await ledger.void(entry, reason="none")
                else:
                    await ledger.post(entry, charge(number))
            await ledger.verify()
            before = await ledger.statement()
        with database(path) as file:
            upto = file.execute("SELECT seq = (SELECT max(seq) FROM journal) FROM statement_upto")
            assert upto.fetchall() == [(1,)]
            assert read_statement(file) == before == replayed_statement(file)
    assert sum(line.entries for line in before) == 12


async def test_kept_sums_that_differ_from_the_journal_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with BudgetLedger.open(path, cap="1") as ledger:
        entry = await ledger.reserve(100, endpoint="x/y")
        await ledger.post(entry, charge(7))
    with database(path) as file:
        file.execute("UPDATE statement_sums SET posted_pusd = 8")
    async with BudgetLedger.open(path) as ledger:
        with pytest.raises(JournalError, match="the statement kept beside the journal"):
            await ledger.verify()
