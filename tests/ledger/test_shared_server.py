"""Servers that forget, are set back, refuse or are another one; and workers that meet on them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantroute.cli._rundir import RunFolder
from quantroute.clock import SystemClock
from quantroute.errors import (
    ConfigurationError,
    JournalError,
    LedgerUnreachable,
    QuantrouteError,
)
from quantroute.generation._allocation import Claim
from quantroute.generation._purse import DatasetCap, FixedPurse
from quantroute.ledger import Account, Basis, BudgetLedger, Charge, SharedLedger, _owners
from quantroute.ledger._server_books import read_entries
from quantroute.ledger._server_link import ServerLink
from redis_support import RedisServer, redis_server

pytestmark = pytest.mark.redis

DOLLAR = 10**12
LOST = "forgotten what it had confirmed"


def charge(amount: int) -> Charge:
    return Charge(amount_pusd=amount, basis=Basis.REPORTED)


def connect(server: RedisServer, name: str, **more: Any) -> SharedLedger:
    return SharedLedger.connect(server.url, name=name, **{"patience_s": 5.0} | more)


async def open_and_close(ledger: SharedLedger) -> None:
    async with ledger:
        pass


async def forget(ledger: SharedLedger, *items: str) -> None:
    """Keys of the ledger go, as by eviction or by hand."""
    await ledger._link.client.delete(*(ledger._link.keys[item] for item in items))


ALL_KEYS = ("accounts", "entries", "lines", "journal", "notes", "owners")


# -- what a server forgot -------------------------------------------------------------------------


async def test_a_file_does_not_begin_again_under_a_full_cap(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    """The server lost the ledger, the file knows that half its cap is spent."""
    store = tmp_path / "w.sqlite"
    async with connect(redis, name, cap="1", store=store) as ledger:
        await ledger.post(await ledger.reserve(DOLLAR // 2), charge(DOLLAR // 2))
        await forget(ledger, *ALL_KEYS)
    with pytest.raises(JournalError, match="lost its data or is another; restore"):
        await open_and_close(connect(redis, name, cap="1", store=store))


async def test_another_name_is_the_way_on_and_keeps_what_could_not_be_said(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    store = tmp_path / "w.sqlite"
    async with connect(redis, name, cap="1", store=store) as ledger:
        entry = await ledger.reserve(DOLLAR // 2)
        await forget(ledger, *ALL_KEYS)
        await ledger.post(entry, charge(DOLLAR // 2))
    async with connect(redis, f"{name}-2", cap="0.5", store=store) as ledger:
        assert await ledger._outbox.count() == 0
        await ledger.post(await ledger.reserve(DOLLAR // 2), charge(DOLLAR // 4))
        assert ledger.balance().posted_pusd == DOLLAR // 4
        await ledger.verify()
    async with BudgetLedger.open(store) as file:
        assert file.balance().posted_pusd == 3 * DOLLAR // 4


async def test_an_older_state_of_the_server_is_refused_live_and_at_the_next_opening(
    own_redis: RedisServer, name: str, tmp_path: Path
) -> None:
    store, copy = tmp_path / "w.sqlite", tmp_path / "copy"
    async with connect(own_redis, name, cap="1", store=store) as ledger:
        await ledger.post(await ledger.reserve(DOLLAR // 4), charge(DOLLAR // 4))
        shutil.copytree(own_redis.folder, copy)  # every write is on the disk already
        await ledger.post(await ledger.reserve(DOLLAR // 2), charge(DOLLAR // 2))
        own_redis.stop()
        shutil.rmtree(own_redis.folder)
        shutil.copytree(copy, own_redis.folder)
        own_redis.start()
        with pytest.raises(LedgerUnreachable, match=LOST):
            await ledger.reserve(DOLLAR // 2)
    with pytest.raises(LedgerUnreachable, match=LOST):
        await open_and_close(connect(own_redis, name, store=store))


@pytest.mark.parametrize("item", ["accounts", "entries", "lines", "journal"])
async def test_no_part_of_the_books_can_go_unnoticed(
    redis: RedisServer, name: str, item: str
) -> None:
    async with connect(redis, name, cap="1") as ledger:
        await ledger.post(await ledger.reserve(DOLLAR // 2), charge(DOLLAR // 2))
        await ledger.reserve(1)
        await forget(ledger, item)
        with pytest.raises(LedgerUnreachable, match=f"{LOST}.*restore the server's data"):
            await ledger.reserve(5 * DOLLAR)
    with pytest.raises(LedgerUnreachable, match=LOST):
        await open_and_close(connect(redis, name, cap="1"))


# -- servers that refuse --------------------------------------------------------------------------


async def test_who_looks_makes_no_ledger(redis: RedisServer, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has no ledger .*check the address and the name"):
        await open_and_close(connect(redis, name))
    async with connect(redis, f"{name}-other", cap="1") as other:
        assert not await other._link.client.exists(f"{{{name}}}:owners")


async def test_keys_of_another_program_are_left_alone(redis: RedisServer, name: str) -> None:
    async with connect(redis, f"{name}-other", cap="1") as other:
        await other._link.client.lpush(f"{{{name}}}:journal", "theirs")
        with pytest.raises(ConfigurationError, match=r"holds a list of another program; choose"):
            await open_and_close(connect(redis, name, cap="1"))
        assert not await other._link.client.exists(f"{{{name}}}:accounts")


async def test_a_replica_says_that_the_primary_is_wanted(
    own_redis: RedisServer, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    follows = ("--replicaof", "127.0.0.1", str(own_redis.port))
    with (
        redis_server(folder, "--appendonly", "yes", "--appendfsync", "always", *follows) as replica,
        pytest.raises(LedgerUnreachable, match="give the address of the primary"),
    ):
        await open_and_close(connect(replica, name, cap="1"))


async def test_a_full_server_counts_nothing_half_and_says_what_to_do(
    own_redis: RedisServer, name: str
) -> None:
    async with connect(own_redis, name, cap="1", patience_s=0.3) as ledger:
        entry = await ledger.reserve(DOLLAR // 2)
        await ledger._link.client.config_set("maxmemory", "1mb")
        with pytest.raises(LedgerUnreachable, match="raise the server's maxmemory"):
            await ledger.reserve(DOLLAR // 2)
        await ledger.post(entry, charge(DOLLAR // 4))  # kept until there is room
        await ledger._link.client.config_set("maxmemory", "0")
        await _until_answered(ledger)
        await ledger.verify()
        assert ledger.balance().available_pusd == 3 * DOLLAR // 4


async def _until_answered(ledger: SharedLedger) -> None:
    while True:
        with contextlib.suppress(LedgerUnreachable):
            return await ledger.note("barrier", "x")
        await asyncio.sleep(0.05)


async def test_syncing_that_stops_during_a_rewrite_is_no_durability(tmp_path: Path) -> None:
    always = ("--appendonly", "yes", "--appendfsync", "always")
    with (
        redis_server(tmp_path, *always, "--no-appendfsync-on-rewrite", "yes") as server,
        pytest.raises(ConfigurationError, match="no-appendfsync-on-rewrite is yes"),
    ):
        await open_and_close(connect(server, "x", cap="1"))


@pytest.mark.parametrize(
    "address",
    [
        "redis://:hun/ter2@127.0.0.1:1/0",
        "redis://:hun@ter2@127.0.0.1:1/0",
        "redis://:hun#ter2@127.0.0.1:1/0",
        "redis://:hun?ter2@127.0.0.1:1/0",
        "redis://:hun ter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?username=me&password=hunter2",
        "redis//:hunter2@127.0.0.1:1/0",
    ],
)
async def test_no_error_tells_a_password(address: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, ledger_url=address)
    with pytest.raises(QuantrouteError) as caught:
        await open_and_close(folder.shared(cap="1"))
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)


async def test_a_wrong_password_says_how_to_write_one(own_redis: RedisServer, name: str) -> None:
    async with connect(own_redis, name, cap="1") as ledger:
        await ledger._link.client.config_set("requirepass", "right")
    with pytest.raises(LedgerUnreachable, match="redis://USER:PASSWORD@HOST"):
        await open_and_close(connect(own_redis, name))


# -- a worker in trouble --------------------------------------------------------------------------


async def test_a_file_that_breaks_after_an_outcome_stops_nobody(
    redis: RedisServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise JournalError(path="w.sqlite", problem="the disk is full")

    async with connect(redis, name, cap="1", store=tmp_path / "w.sqlite") as ledger:
        entry = await ledger.reserve(10)
        with monkeypatch.context() as patch:
            patch.setattr(ledger._outbox, "cross_out", broken)
            async with asyncio.timeout(20):
                await ledger.post(entry, charge(4))
                await ledger.reserve(10)
    async with connect(redis, name, store=tmp_path / "w.sqlite") as ledger:
        assert ledger.balance().posted_pusd == 4  # sent twice, counted once
        await ledger.verify()


async def test_an_answer_that_makes_no_sense_is_told_to_all_who_wait(
    redis: RedisServer, name: str
) -> None:
    async with connect(redis, name, cap="1") as ledger:
        entry = await ledger.reserve(10)
        ledger._link._script = _nonsense
        async with asyncio.timeout(20):
            with pytest.raises(JournalError, match="the line broke"):
                await asyncio.gather(ledger.post(entry, charge(4)), ledger.note("a", "b"))
            with pytest.raises(JournalError, match="the line broke"):
                await ledger.reserve(10)


async def _nonsense(**_: object) -> tuple[str, list[str]]:
    return "<html>", []


async def test_nothing_is_reserved_without_an_owner_while_a_ledger_closes(
    redis: RedisServer, name: str
) -> None:
    ledger = await connect(redis, name, cap="1").__aenter__()
    closing = asyncio.create_task(ledger.aclose())
    await asyncio.sleep(0)
    with pytest.raises(JournalError, match="the ledger is closed"):
        await ledger.reserve(10)
    await closing
    async with connect(redis, name) as again:
        assert again.balance().pending_pusd == 0


# -- workers that meet ----------------------------------------------------------------------------


async def test_an_opening_that_was_refused_does_not_look_alive(
    redis: RedisServer, name: str, tmp_path: Path
) -> None:
    async with connect(redis, name, cap="1", store=tmp_path / "a.sqlite", label="shard 0"):
        with pytest.raises(JournalError, match="is being done by"):
            await open_and_close(connect(redis, name, store=tmp_path / "b.sqlite", label="shard 0"))
    await open_and_close(connect(redis, name, store=tmp_path / "c.sqlite", label="shard 0"))


async def test_a_worker_that_was_replaced_while_it_was_silent_spends_nothing_more(
    redis: RedisServer, name: str
) -> None:
    """As after SIGSTOP, or behind a broken network; its outcomes still count."""
    async with connect(redis, name, cap="1", label="shard 0") as stopped:
        entry = await stopped.reserve(10)
        link, answering = stopped._link, stopped._link._script
        link._script = _silent
        await link.client.hset(link.keys["owners"], f"{stopped._owner}\tbeat", "0")  # 1970
        assert stopped._heart is not None
        stopped._heart.cancel()
        stopped._dead_after_s = 0.01
        stopped._heart = asyncio.create_task(stopped._beat())
        async with connect(redis, name, label="shard 0"):
            with pytest.raises(LedgerUnreachable):
                await _within_a_moment(stopped)
            link._script = answering
            async with asyncio.timeout(20):
                await stopped._heart  # it ends when it finds out
            with pytest.raises(JournalError, match="shard 0 is being done by"):
                await stopped.reserve(10)
            await stopped.post(entry, charge(4))
            assert stopped.balance().posted_pusd == 4


async def _within_a_moment(ledger: SharedLedger) -> None:
    ledger._link._patience_s = 0.05
    try:
        await ledger.note("barrier", "x")
    finally:
        ledger._link._patience_s = 5.0


async def _silent(**_: object) -> None:
    raise ConnectionError("nobody answers")


async def test_an_entry_of_a_newcomer_is_not_taken_for_one_of_the_dead(
    redis: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody opens and reserves between two looks of one who takes over from the dead."""
    async with (
        connect(redis, name, cap="1") as first,
        connect(redis, name) as newcomer,
    ):
        await newcomer._link.call({"op": "forget", "owner": newcomer._owner})

        async def interrupted(link: ServerLink) -> Any:
            await newcomer.reserve(10)
            return await read_entries(link)

        monkeypatch.setattr(_owners, "read_entries", interrupted)
        await first._owners.bury_the_dead(is_opening=True)
        assert await first.unresolved() == ()


async def test_the_first_plan_of_all_workers_sets_the_caps_of_datasets(
    redis: RedisServer, name: str
) -> None:
    """The second opened before the first had set them, and planned for minutes."""

    def caps(amount: int) -> list[DatasetCap]:
        claim = Claim(name="a", need_pusd=amount)
        return [DatasetCap(account=Account("run/a"), cap_pusd=amount, claim=claim)]

    async with (
        connect(redis, name, cap="1") as first,
        connect(redis, name) as second,
    ):
        await FixedPurse(first, caps(DOLLAR // 2), name="run").open()
        late = FixedPurse(second, caps(DOLLAR // 10), name="run")
        await late.open()
        assert late.caps_pusd == {"a": DOLLAR // 2}


class _Late(SystemClock):
    def time_s(self) -> float:
        return super().time_s() - 900


async def test_the_age_of_an_entry_does_not_depend_on_whose_clock_is_late(
    redis: RedisServer, name: str
) -> None:
    """Reconciliation leaves young entries alone: those of a late clock must not look old."""
    async with (
        connect(redis, name, cap="1", clock=_Late()) as late,
        connect(redis, name) as other,
    ):
        await late.hold(await late.reserve(10), reason="x")
        ((seen_late,), (seen,)) = (await late.unresolved(), await other.unresolved())
        assert abs(_Late().time_s() - seen_late.reserved_at_s) < 60
        assert abs(SystemClock().time_s() - seen.reserved_at_s) < 60
        await other.verify()
