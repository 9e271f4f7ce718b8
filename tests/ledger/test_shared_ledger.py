"""The shared ledger on a real server: exact sums, lost servers, dead workers, several processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute.errors import (
    BudgetExceeded,
    ConfigurationError,
    EntryStateError,
    JournalError,
    LedgerUnreachable,
)
from quantroute.ledger import Account, Basis, BudgetLedger, Charge, Ledger, SharedLedger
from quantroute.ledger._server_books import read_entries
from quantroute.money import MAX_AMOUNT_PUSD, NO_CAP
from quantroute.pricing import TokenUsage
from redis_support import RedisServer, redis_server

pytestmark = pytest.mark.redis

DOLLAR = 10**12
USAGE = TokenUsage(input_tokens=3, output_tokens=5, reasoning_tokens=2)


def charge(amount: int, **more: Any) -> Charge:
    return Charge(amount_pusd=amount, basis=Basis.REPORTED, **more)


async def killed(ledger: SharedLedger) -> None:
    """End a ledger as `kill -9` would: its files and what the server has are all that is left."""
    assert ledger._heart is not None
    ledger._heart.cancel()
    await ledger._link.aclose()
    await ledger._local.aclose()
    ledger._owner = ""


async def redis_hash(ledger: SharedLedger, what: str, field: str, value: str) -> None:
    """Tamper with what the server keeps."""
    await ledger._link.client.hset(ledger._link.keys[what], field, value)


# -- exact sums -----------------------------------------------------------------------------------

AROUND = st.one_of(
    st.integers(2**53 - 3, 2**53 + 3),
    st.integers(10**18 - 3, 10**18 + 3),
    st.integers(MAX_AMOUNT_PUSD - 3, MAX_AMOUNT_PUSD),
    st.integers(0, 12),
)


@given(cap=AROUND, spent=AROUND, wanted=AROUND)
@settings(max_examples=examples(60), deadline=None)
def test_the_last_pico_dollar_is_decided_exactly(
    redis: RedisServer, cap: int, spent: int, wanted: int
) -> None:
    """Beyond 2^53 a double cannot tell neighbours apart; the cap still does."""

    async def scenario() -> None:
        usd = f"{cap // DOLLAR}.{cap % DOLLAR:012d}"
        async with SharedLedger.connect(redis.url, name=uuid.uuid4().hex, cap=usd) as ledger:
            for amount, used in ((spent, 0), (wanted, spent if spent <= cap else 0)):
                if used + amount <= cap:
                    await ledger.reserve(amount, wait=False)
                else:
                    with pytest.raises(BudgetExceeded) as caught:
                        await ledger.reserve(amount, wait=False)
                    assert caught.value.available_pusd == cap - used
            await ledger.verify()

    asyncio.run(scenario())


async def test_a_million_dollars_is_counted_to_the_pico_dollar(
    redis: RedisServer, name: str
) -> None:
    async with SharedLedger.connect(redis.url, name=name, cap="1000000") as ledger:
        entry = await ledger.reserve(999_999 * DOLLAR + 1)
        await ledger.post(entry, charge(999_999 * DOLLAR + 1, usage=USAGE))
        with pytest.raises(BudgetExceeded) as caught:
            await ledger.reserve(DOLLAR)
        assert caught.value.available_pusd == DOLLAR - 1
        await ledger.reserve(DOLLAR - 1)
        assert ledger.balance().available_pusd == 0
        await ledger.verify()


@pytest.mark.parametrize("amount", [-1, MAX_AMOUNT_PUSD + 1])
async def test_amounts_that_cannot_be_are_refused_before_anything_is_written(
    redis: RedisServer, name: str, amount: int
) -> None:
    async with SharedLedger.connect(redis.url, name=name, cap=NO_CAP) as ledger:
        with pytest.raises(ValueError):
            await ledger.reserve(amount)
        entry = await ledger.reserve(5)
        with pytest.raises(ValueError):
            await ledger.post(entry, charge(amount))
        await ledger.post(entry, charge(7))
        assert ledger.balance().overrun_pusd == 2
        await ledger.verify()


async def test_the_statement_is_the_one_a_file_gives(redis: RedisServer, name: str) -> None:
    async def traffic(ledger: Ledger) -> None:
        for number, basis in enumerate(Basis):
            entry = await ledger.reserve(10, account=Account("r/a"), endpoint=f"e{number % 2}")
            await ledger.post(entry, Charge(amount_pusd=4 * number, basis=basis, usage=USAGE))
        entry = await ledger.reserve(10, account=Account("r"), endpoint="odd\ttag")
        await ledger.void(entry, reason="x")

    async with (
        SharedLedger.connect(redis.url, name=name, cap="1") as shared,
        BudgetLedger.in_memory(cap="1") as single,
    ):
        await traffic(shared)
        await traffic(single)
        assert await shared.statement() == await single.statement()


@pytest.mark.parametrize("tasks", [800, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_very_many_tasks_of_two_workers_never_pass_the_cap(
    redis: RedisServer, name: str, tmp_path: Path, tasks: int
) -> None:
    """Holds are twice the cost: at the end less than one hold is left, whoever spent it."""
    hold, cost = DOLLAR // 100, DOLLAR // 200
    workers = [
        SharedLedger.connect(redis.url, name=name, cap="3.00", store=tmp_path / f"{number}.sqlite")
        for number in range(2)
    ]
    async with workers[0], workers[1]:

        async def row(number: int) -> bool:
            ledger = workers[number % 2]
            try:
                entry = await ledger.reserve(hold, request_id=str(number))
            except BudgetExceeded:
                return False
            await ledger.post(entry, charge(cost))
            return True

        done = await asyncio.gather(*(row(number) for number in range(tasks)))
        balance = (await workers[0].unresolved(), workers[0].balance())[1]
        assert balance.posted_pusd == sum(done) * cost
        assert 3 * DOLLAR - hold < balance.posted_pusd <= 3 * DOLLAR
        await workers[1].verify()


# -- what a worker finds when it opens ------------------------------------------------------------


async def test_a_new_ledger_needs_a_cap_and_keeps_it(redis: RedisServer, name: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a cap"):
        await SharedLedger.connect(redis.url, name=name).__aenter__()
    async with SharedLedger.connect(redis.url, name=name, cap="2"):
        pass
    async with SharedLedger.connect(redis.url, name=name) as ledger:
        assert ledger.balance().cap == 2 * DOLLAR


async def test_a_server_that_may_forget_is_refused_unless_accepted(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--appendonly", "no") as server:
        with pytest.raises(ConfigurationError, match="appendonly is no"):
            await SharedLedger.connect(server.url, name="x", cap="1").__aenter__()
        async with SharedLedger.connect(server.url, name="x", cap="1", allow_volatile=True):
            pass
    with (
        redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "everysec") as server,
        pytest.raises(ConfigurationError, match="appendfsync is everysec"),
    ):
        await SharedLedger.connect(server.url, name="x", cap="1").__aenter__()


async def test_no_server_and_no_address_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnreachable, match=r"redis://\[redacted\]@127\.0\.0\.1:1/0"):
        await SharedLedger.connect(
            "redis://:secret@127.0.0.1:1/0", name="x", cap="1", store=tmp_path / "s.sqlite"
        ).__aenter__()
    with pytest.raises(ConfigurationError, match="not an address"):
        await SharedLedger.connect("127.0.0.1:6379", name="x", cap="1").__aenter__()


async def test_the_first_of_two_notes_is_kept_if_asked(redis: RedisServer, name: str) -> None:
    async with (
        SharedLedger.connect(redis.url, name=name, cap="1") as first,
        SharedLedger.connect(redis.url, name=name) as second,
    ):
        await first.note("baseline", "7")
        await second.note("baseline", "8", keep=True)
        assert second.notes["baseline"] == "7"
        await second.note("baseline", "9")
        await second.verify()


async def test_half_a_surrogate_pair_does_not_stop_the_line(redis: RedisServer, name: str) -> None:
    async with SharedLedger.connect(redis.url, name=name, cap="1") as ledger:
        entry = await ledger.reserve(1, request_id="row \ud83d")
        ledger.identify(entry, "gen \ud83d")
        await ledger.hold(entry, reason="odd \ud83d")
        (held,) = await ledger.unresolved()
        assert (held.generation_id, held.reason) == ("gen ?", "odd ?")
        await ledger.verify()


# -- workers that die -----------------------------------------------------------------------------


async def test_an_outcome_survives_a_kill_between_file_and_server(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    store = tmp_path / "w.sqlite"
    ledger = await SharedLedger.connect(redis.url, name=name, cap="1", store=store).__aenter__()
    entry = await ledger.reserve(10)
    ledger._link.put = lambda *_, **__: asyncio.get_running_loop().create_future()  # type: ignore
    posting = asyncio.create_task(ledger.post(entry, charge(4), also=_make_row))
    await asyncio.to_thread(_wait_for, lambda: ledger.store.read(_unsent) == 1)
    await killed(ledger)
    posting.cancel()
    async with SharedLedger.connect(redis.url, name=name, store=store) as again:
        balance = again.balance()
        assert (balance.posted_pusd, balance.open_entries) == (4, 0)
        assert again.store.read(lambda c: c.execute("SELECT * FROM rows").fetchall()) == [(1,)]
        await again.store.submit(lambda _: None)  # behind the crossing out
        assert await again._outbox.count() == 0
        await again.verify()


def _unsent(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM shared_outbox").fetchone()[0])


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def _make_row(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE rows (n)")
    connection.execute("INSERT INTO rows VALUES (1)")


async def test_entries_of_a_silent_owner_are_held_not_freed(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    dead = await SharedLedger.connect(redis.url, name=name, cap="1", store=":memory:").__aenter__()
    await dead.reserve(10)
    dead_owner = dead._owner
    await killed(dead)
    async with SharedLedger.connect(redis.url, name=name) as other:
        assert await other.unresolved() == ()  # not known to be dead yet: it stays as it is
        assert other.balance().pending_pusd == 10
    async with SharedLedger.connect(redis.url, name=name) as other:
        await redis_hash(other, "owners", f"{dead_owner}\tbeat", "0")  # last heard of in 1970
        await other._owners.bury_the_dead()
        (held,) = await other.unresolved()
        assert held.reason == "process died"
        assert other.balance().pending_pusd == 10
        await other.post(held.entry_id, charge(3))
        assert other.balance().available_pusd == DOLLAR - 3
        with pytest.raises(EntryStateError):
            await other.post(held.entry_id, charge(3))
        await other.verify()


async def test_a_row_that_fails_takes_no_money_of_another_owner_along(
    redis: RedisServer, name: str
) -> None:
    def failing(_: sqlite3.Connection) -> None:
        raise RuntimeError("no row")

    async with (
        SharedLedger.connect(redis.url, name=name, cap="1") as first,
        SharedLedger.connect(redis.url, name=name) as other,
    ):
        entry = await first.reserve(10)
        with pytest.raises(RuntimeError, match="no row"):
            await other.post(entry, charge(4), also=failing)
        await other.post(entry, charge(4), also=_make_row)
        assert other.balance().posted_pusd == 4
        with pytest.raises(EntryStateError):
            await other.post(entry, charge(4), also=failing)


async def test_an_owner_taken_for_dead_settles_what_was_held(redis: RedisServer, name: str) -> None:
    async with (
        SharedLedger.connect(redis.url, name=name, cap="1") as slow,
        SharedLedger.connect(redis.url, name=name) as other,
    ):
        entry = await slow.reserve(10)
        await other._owners.hold((await read_entries(other._link))[entry])
        await slow.post(entry, charge(4))
        assert slow.balance().posted_pusd == 4
        assert slow.balance().held_pusd == 0
        await other.verify()


async def test_a_generations_record_is_paid_once_whoever_posts_it(
    redis: RedisServer, name: str
) -> None:
    record = Charge(amount_pusd=3, basis=Basis.RECORD, generation_id="gen-1")
    async with (
        SharedLedger.connect(redis.url, name=name, cap="1") as first,
        SharedLedger.connect(redis.url, name=name) as second,
    ):
        entries = [await first.reserve(10) for _ in range(2)]
        for entry in entries:
            await first.hold(entry, reason="x", generation_id="gen-1")
        await first.post(entries[0], record)
        assert await second.recorded(["gen-1", "gen-2"]) == {"gen-1"}
        with pytest.raises(EntryStateError, match="posted already"):
            await second.post(entries[1], record)
        assert second.balance().posted_pusd == 3
        await second.verify()


async def test_held_money_is_waited_for_only_while_somebody_finds_out(
    redis: RedisServer, name: str
) -> None:
    async with SharedLedger.connect(redis.url, name=name, cap="0.00000000001") as ledger:
        entry = await ledger.reserve(10)
        await ledger.hold(entry, reason="x")
        with pytest.raises(BudgetExceeded):
            await ledger.reserve(5)
        ledger.expect_settling(lost=())
        waiting = asyncio.create_task(ledger.reserve(5))
        await ledger.note("barrier", "x")
        assert not waiting.done()
        await ledger.post(entry, charge(2))
        await waiting


async def test_what_others_settle_reaches_the_file_that_has_the_row(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    store = tmp_path / "w.sqlite"
    async with SharedLedger.connect(redis.url, name=name, cap="1", store=store) as ledger:
        entry = await ledger.reserve(10)
        await ledger.hold(entry, reason="no cost in the answer")
    async with SharedLedger.connect(redis.url, name=name) as other:
        await other.post(entry, charge(6))
    async with SharedLedger.connect(redis.url, name=name, store=store):
        pass
    async with BudgetLedger.open(store) as mirror:
        assert (mirror.balance().posted_pusd, mirror.balance().held_entries) == (6, 0)
        await mirror.verify()


async def test_two_workers_that_live_cannot_do_the_same_shard(
    redis: RedisServer, name: str
) -> None:
    async with SharedLedger.connect(redis.url, name=name, cap="1", label="shard 0 of 2"):
        with pytest.raises(JournalError, match="shard 0 of 2 is being done by process"):
            await SharedLedger.connect(redis.url, name=name, label="shard 0 of 2").__aenter__()
        async with SharedLedger.connect(redis.url, name=name, label="shard 1 of 2"):
            pass


async def test_outcomes_for_another_ledger_are_not_sent_to_this_one(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    store = tmp_path / "w.sqlite"
    async with SharedLedger.connect(redis.url, name=name, cap="1", store=store) as ledger:
        await ledger.store.submit(
            lambda c: c.execute(
                "INSERT INTO shared_outbox (ledger, owner, said) VALUES ('other', 'o', ?)",
                (json.dumps({"op": "mark"}),),
            ).close()
        )
    with pytest.raises(ConfigurationError, match="for another ledger"):
        await SharedLedger.connect(redis.url, name=name, store=store).__aenter__()


# -- a server that goes away ----------------------------------------------------------------------


async def test_a_lost_server_refuses_new_money_and_keeps_outcomes(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    store = tmp_path / "w.sqlite"
    connecting = SharedLedger.connect(own_redis.url, name="x", cap="1", store=store, patience_s=0.3)
    async with connecting as ledger:
        posted, held, waiting = [await ledger.reserve(10) for _ in range(3)]
        own_redis.stop()
        with pytest.raises(LedgerUnreachable, match="run the same command again"):
            await ledger.reserve(10)
        await ledger.post(posted, charge(4))  # returns: it is safe in the file
        await ledger.hold(held, reason="x")
        assert await ledger._outbox.count() == 2
        own_redis.start()
        await _until_answered(ledger)
        balance = ledger.balance()
        assert (balance.posted_pusd, balance.held_pusd, balance.open_entries) == (4, 10, 2)
        await ledger.void(waiting, reason="x")
        await ledger.verify()
        own_redis.stop()
    own_redis.start()
    async with SharedLedger.connect(own_redis.url, name="x", store=store) as ledger:
        assert ledger.balance().posted_pusd == 4
        await ledger.verify()


async def _until_answered(ledger: SharedLedger) -> None:
    while True:
        try:
            await ledger.note("barrier", "x")
        except LedgerUnreachable:
            await asyncio.sleep(0.05)
            continue
        return


async def test_a_server_that_comes_back_empty_is_not_believed(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    async with SharedLedger.connect(
        own_redis.url, name="x", cap="1", store=tmp_path / "w.sqlite", patience_s=0.5
    ) as ledger:
        await ledger._link.client.flushall()
        with pytest.raises(LedgerUnreachable, match="not the ledger that was opened"):
            await ledger.reserve(1)


WORKER = textwrap.dedent(
    """
    import asyncio, sys
    from quantroute.ledger import Basis, Charge, SharedLedger
    from quantroute.errors import BudgetExceeded

    async def main(url, name, store):
        async with SharedLedger.connect(url, name=name, store=store) as ledger:
            async def work():
                while True:
                    try:
                        entry = await ledger.reserve(1000)
                    except BudgetExceeded:
                        return
                    await ledger.post(entry, Charge(amount_pusd=600, basis=Basis.REPORTED))
                    print(entry, flush=True)
            await asyncio.gather(*(work() for _ in range(16)))
    asyncio.run(main(*sys.argv[1:]))
    """
)


def started(url: str, name: str, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, url, name, str(store)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
async def test_kill_9_of_workers_loses_no_outcome_and_passes_no_cap(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    """Each worker is killed in mid-traffic and started again on its file, several times."""
    async with SharedLedger.connect(redis.url, name=name, cap="0.00001") as watcher:
        told: set[str] = set()
        for turn in range(6):
            workers = [started(redis.url, name, tmp_path / f"{n}.sqlite") for n in range(2)]
            for worker in workers:
                assert worker.stdout is not None
                told |= {worker.stdout.readline().strip() for _ in range(40 + 30 * turn)}
                worker.send_signal(signal.SIGKILL)
                told |= {line.strip() for line in worker.stdout if line.endswith("\n")}
                worker.wait()
                worker.stdout.close()
            await watcher.unresolved()
            balance = watcher.balance()
            assert balance.posted_pusd + balance.pending_pusd <= 10**7
        told.discard("")
        for n in range(2):  # what is in the outboxes arrives when the files are opened
            async with SharedLedger.connect(redis.url, name=name, store=tmp_path / f"{n}.sqlite"):
                pass
        await watcher.unresolved()
        assert watcher.balance().posted_entries >= len(told)
        assert watcher.balance().open_entries == watcher.balance().held_entries
        await watcher.verify()
