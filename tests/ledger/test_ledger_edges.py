"""The corners of the ledger: waiting, overruns, statements, broken files, two lives at once."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quantroute.errors import (
    BudgetExceeded,
    ConfigurationError,
    EntryStateError,
    JournalError,
)
from quantroute.ledger import ROOT, Account, Basis, BudgetLedger, Charge, EntryId, _waiting
from quantroute.money import MAX_AMOUNT_PUSD, NO_CAP
from quantroute.pricing import TokenUsage
from sqlite_support import database

TEN = "0.000000000010"  # a cap of ten pico-dollars: amounts in these tests are small integers


def charge(amount: int, basis: Basis = Basis.REPORTED, usage: TokenUsage | None = None) -> Charge:
    return Charge(amount_pusd=amount, basis=basis, usage=usage)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is woken by what happened, not by the slow look at other processes."""
    monkeypatch.setattr(_waiting, "_POLL_S", 60.0)


async def settle_down(ledger: BudgetLedger) -> None:
    """Let everybody go on as far as they can: each note is written behind what was queued."""
    for _ in range(5):
        await ledger.note("barrier", "x")


# -- waiting --------------------------------------------------------------------------------------


async def test_waiters_are_served_in_order_the_large_before_the_small_behind_it() -> None:
    """First come, first served: a small request does not slip past a large one in the line."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        first, second = await ledger.reserve(5), await ledger.reserve(4)
        served: list[str] = []

        async def wait(name: str, amount: int) -> None:
            await ledger.reserve(amount)
            served.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait("large", 6))
            await settle_down(ledger)
            group.create_task(wait("small", 2))
            await settle_down(ledger)
            await ledger.post(first, charge(0))  # room for 6
            await settle_down(ledger)
            assert served == ["large"]
            await ledger.post(second, charge(0))
        assert served == ["large", "small"]


async def test_a_waiter_gives_up_as_soon_as_it_can_never_fit() -> None:
    """What was spent meanwhile leaves no room, ever: the error comes without a timeout."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        entry = await ledger.reserve(8)
        waiting = asyncio.ensure_future(ledger.reserve(5))
        await settle_down(ledger)
        assert not waiting.done()
        await ledger.post(entry, charge(6))
        with pytest.raises(BudgetExceeded) as caught:
            await asyncio.wait_for(waiting, 10)
        assert caught.value.posted_pusd == 6


async def test_nobody_waits_for_held_money() -> None:
    """Held entries are resolved when nothing is in flight: waiting for them would never end."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        await ledger.hold(await ledger.reserve(4), reason="lost")
        under_way = await ledger.reserve(5)
        waiting = asyncio.ensure_future(ledger.reserve(6))
        await settle_down(ledger)
        assert not waiting.done()  # 4 held + 6 fit once the five are back
        await ledger.hold(under_way, reason="lost too")
        with pytest.raises(BudgetExceeded):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(BudgetExceeded):
            await asyncio.wait_for(ledger.reserve(2), 10)


async def test_raising_the_cap_wakes_a_waiter() -> None:
    """And a sub-account's cap that is raised does as well."""
    account = Account("run/a")
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        await ledger.set_cap(account, "0.000000000005")
        await ledger.reserve(4, account=account)
        waiting = asyncio.ensure_future(ledger.reserve(3, account=account))
        await settle_down(ledger)
        assert not waiting.done()
        await ledger.set_cap(account, NO_CAP)
        await asyncio.wait_for(waiting, 10)


async def test_a_cancelled_settlement_still_wakes_those_who_wait() -> None:
    """The money is free as soon as it is free on disk, whoever is left to hear of it."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        entry = await ledger.reserve(10)
        waiting = asyncio.ensure_future(ledger.reserve(10))
        await settle_down(ledger)
        posting = asyncio.ensure_future(ledger.post(entry, charge(0)))
        await asyncio.sleep(0)
        posting.cancel()
        await asyncio.wait_for(waiting, 10)


async def test_a_cancelled_reservation_makes_room_for_those_who_wait() -> None:
    """A reservation whose task was cancelled is voided behind, and its room is used."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        cancelled = asyncio.ensure_future(ledger.reserve(10))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(ledger.reserve(10))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait_for(waiting, 10)
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_cancelling_the_first_in_line_lets_the_next_one_try() -> None:
    """A line does not end with whoever stands at its head."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        entry = await ledger.reserve(8)
        head = asyncio.ensure_future(ledger.reserve(9))
        await settle_down(ledger)
        behind = asyncio.ensure_future(ledger.reserve(3))
        await settle_down(ledger)
        head.cancel()
        await settle_down(ledger)
        assert not behind.done()
        await ledger.void(entry, reason="never sent")
        await asyncio.wait_for(behind, 10)
        assert ledger.balance().pending_pusd == 3


async def test_cancelled_while_the_store_fails_stays_cancelled(tmp_path: Path) -> None:
    """A broken store must not turn a cancellation into another error."""
    async with BudgetLedger.open(tmp_path / "l.sqlite", cap=TEN) as ledger:
        reserving = asyncio.ensure_future(ledger.reserve(0))
        await asyncio.sleep(0)
        ledger.store.close()
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving


# -- sums -----------------------------------------------------------------------------------------


async def test_an_overrun_is_posted_in_full_and_flagged() -> None:
    """The charge counts as it is; the journal's own flag says that it was too much."""
    async with BudgetLedger.in_memory(cap=TEN) as ledger:
        await ledger.post(await ledger.reserve(4, endpoint="a"), charge(9))
        await ledger.post(await ledger.reserve(1, endpoint="a"), charge(1))
        balance = ledger.balance()
        assert (balance.posted_pusd, balance.overrun_pusd, balance.available_pusd) == (10, 5, 0)
        (line,) = await ledger.statement()
        assert (line.entries, line.overruns, line.posted_pusd) == (2, 1, 10)
        await ledger.verify()


async def test_a_statement_splits_by_account_endpoint_and_basis() -> None:
    """Every token and pico-dollar is on exactly one line, and the bases add up."""
    usage = TokenUsage(
        input_tokens=10, output_tokens=20, reasoning_tokens=3, cached_tokens=4, cache_write_tokens=5
    )
    a, b = Account("run/a"), Account("run/b")
    async with BudgetLedger.in_memory(cap="1") as ledger:
        for number, basis in enumerate(Basis, start=1):
            entry = await ledger.reserve(100, account=a, endpoint="x/int4")
            await ledger.post(entry, charge(number, basis, usage))
        await ledger.void(await ledger.reserve(5, account=a, endpoint="x/int4"), reason="refused")
        await ledger.post(await ledger.reserve(5, account=b, endpoint="y"), charge(5))
        await ledger.reserve(5, account=b, endpoint="y")  # under way: not on the statement
        first, second = await ledger.statement()
    assert (first.account, first.endpoint, first.entries, first.voided) == (a, "x/int4", 6, 1)
    assert (first.input_tokens, first.output_tokens, first.reasoning_tokens) == (50, 100, 15)
    assert (first.cached_tokens, first.cache_write_tokens) == (20, 25)
    by_basis = {
        Basis.REPORTED: first.reported_pusd,
        Basis.RECORD: first.record_pusd,
        Basis.KEY_USAGE: first.key_usage_pusd,
        Basis.PRICED: first.priced_pusd,
        Basis.BOUND: first.bound_pusd,
    }
    assert by_basis == {basis: number for number, basis in enumerate(Basis, start=1)}
    assert first.posted_pusd == sum(by_basis.values())
    assert (second.account, second.entries, second.posted_pusd) == (b, 1, 5)


async def test_a_cap_may_come_before_the_account_has_anything() -> None:
    """Capping a nested account first leaves a journal that replays to the same sums."""
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await ledger.set_cap(Account("run/dataset"), "0.5")
        await ledger.verify()


async def test_sums_cannot_leave_what_a_column_holds() -> None:
    """Without a cap the limit is the column's; refusing keeps the ledger open for others."""
    async with BudgetLedger.in_memory(cap=NO_CAP) as ledger:
        await ledger.reserve(MAX_AMOUNT_PUSD - 10)
        with pytest.raises(BudgetExceeded):
            await ledger.reserve(11, wait=False)
        entry = await ledger.reserve(10)
        usage = TokenUsage(input_tokens=10**30, output_tokens=0)
        with pytest.raises(ValueError, match="cannot be true"):
            await ledger.post(entry, charge(1, usage=usage))
        await ledger.post(entry, charge(1))
        await ledger.verify()


async def test_the_balance_follows_other_processes_at_the_next_transaction(tmp_path: Path) -> None:
    """Also for accounts that only the other one has touched."""
    path, account = tmp_path / "l.sqlite", Account("run")
    async with BudgetLedger.open(path, cap="1") as first, BudgetLedger.open(path) as second:
        await second.post(await second.reserve(10, account=account), charge(7))
        await first.note("any", "transaction")
        assert first.balance(account).posted_pusd == 7
        assert first.balance().posted_pusd == 7


# -- opening and closing --------------------------------------------------------------------------


async def test_one_ledger_opens_once_at_a_time() -> None:
    """And again after it was closed."""
    ledger = BudgetLedger.in_memory(cap="1")
    async with ledger:
        with pytest.raises(ConfigurationError, match="open already"):
            await ledger.__aenter__()
        await ledger.reserve(1)
    async with ledger:
        assert ledger.balance().pending_pusd == 0
    await ledger.aclose()  # idempotent


async def test_a_living_owner_is_known_by_whatever_name_the_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link, or from another folder: its reservations are not those of a dead process."""
    for name in ("real", "linked"):
        (tmp_path / name).mkdir()
    link = tmp_path / "linked" / "l.sqlite"
    monkeypatch.chdir(tmp_path / "real")
    async with BudgetLedger.open("l.sqlite", cap="5") as one:
        await one.reserve(1_000)
        link.symlink_to(tmp_path / "real" / "l.sqlite")
        monkeypatch.chdir(tmp_path)
        async with BudgetLedger.open(link) as two:
            assert two.balance().held_entries == 0
    assert [item.name for item in (tmp_path / "real").iterdir()] == ["l.sqlite"]


async def test_dropping_an_open_ledger_warns() -> None:
    """Money under way would be forgotten until the next opening."""
    ledgers = [BudgetLedger.in_memory(cap="1")]
    await ledgers[0].__aenter__()
    store = ledgers[0].store
    await store.submit(lambda connection: None)  # by now the writer has let go of the opening
    with pytest.warns(ResourceWarning, match="unclosed"):
        ledgers.clear()
    store.close()


async def test_an_unusable_folder_is_explained_and_leaves_nothing_open(tmp_path: Path) -> None:
    """The error names the path, and the ledger can be given up without a warning."""
    (tmp_path / "file").write_text("")
    ledger = BudgetLedger.open(tmp_path / "file" / "l.sqlite", cap="1")
    with pytest.raises(JournalError, match=r"l\.sqlite"):
        await ledger.__aenter__()
    del ledger
    gc.collect()


async def test_an_unknown_record_in_the_journal_is_a_journal_error(tmp_path: Path) -> None:
    """A record that this version cannot read is named by its number."""
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1"):
        pass
    with database(path) as connection:
        connection.execute("INSERT INTO journal (at_s, kind) VALUES (1, 'refunded')")
    async with BudgetLedger.open(path) as ledger:
        with pytest.raises(JournalError, match="journal record 2"):
            await ledger.verify()


async def test_a_commit_that_fails_leaves_the_file_free_for_others(tmp_path: Path) -> None:
    """The failed process keeps no lock: another one can write at once."""
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1") as broken:
        pages = broken.store.read(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        await broken.store.submit(
            lambda c: c.execute(f"PRAGMA max_page_count={pages + 2}").fetchall() and None
        )
        results = await asyncio.gather(
            *(broken.reserve(1, request_id="r" * 2_000) for _ in range(50)), return_exceptions=True
        )
        assert any(isinstance(result, JournalError) for result in results)
        with pytest.raises(JournalError, match="free space"):
            await broken.reserve(1)
        async with BudgetLedger.open(path) as healthy:
            await healthy.reserve(1)
            made = sum(isinstance(result, str) for result in results)
            assert healthy.balance().pending_pusd == made + 1
            await healthy.verify()


# -- processes ------------------------------------------------------------------------------------

_VICTIM = textwrap.dedent(
    """
    import asyncio, sys
    from quantroute.ledger import BudgetLedger, Basis, Charge

    async def main(path):
        async with BudgetLedger.open(path) as ledger:
            async def row():
                while True:
                    entry = await ledger.reserve(3)
                    print("reserved", entry, flush=True)
                    await ledger.post(entry, Charge(amount_pusd=1, basis=Basis.REPORTED))
                    print("posted", entry, flush=True)
            await asyncio.gather(*(row() for _ in range(8)))

    asyncio.run(main(sys.argv[1]))
    """
)


def run_and_kill(path: Path, *, after_lines: int) -> list[list[str]]:
    """Start a spender, kill it in the middle of its traffic; what it had acknowledged."""
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    lines = [victim.stdout.readline() for _ in range(after_lines)]
    victim.send_signal(signal.SIGKILL)
    lines += victim.stdout.read().splitlines(keepends=True)
    victim.wait()
    victim.stdout.close()
    return [line.split() for line in lines if line.endswith("\n")]


async def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path) -> None:
    """Each reservation told is on file, each posting told is posted, the rest is held."""
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1") as survivor:
        kept = await survivor.reserve(100)
        told: list[list[str]] = []
        for after_lines in (1, 57, 212):
            told += run_and_kill(path, after_lines=after_lines)
            async with BudgetLedger.open(path) as ledger:
                await ledger.verify()
        async with BudgetLedger.open(path) as ledger:
            held = {entry.entry_id: entry for entry in await ledger.unresolved()}
            balance = ledger.balance()
        reserved = {entry for word, entry in told if word == "reserved"}
        posted = {entry for word, entry in told if word == "posted"}
        assert posted.isdisjoint(held)
        assert balance.posted_entries >= len(posted)
        assert balance.posted_entries + len(held) >= len(reserved)
        assert balance.posted_pusd == balance.posted_entries
        assert balance.held_pusd == 3 * len(held)
        assert {entry.reason for entry in held.values()} <= {"process died"}
        # The survivor's own entry was never touched.
        assert kept not in held
        await survivor.post(kept, charge(1))
        assert survivor.balance(ROOT).pending_pusd == balance.held_pusd
        await survivor.verify()


@pytest.mark.slow
@pytest.mark.timeout(300)  # forty processes that start
async def test_kill_9_at_forty_moments(tmp_path: Path) -> None:
    """The same, often, on one growing file."""
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1"):
        pass
    posted = 0
    for after_lines in range(1, 400, 10):
        told = run_and_kill(path, after_lines=after_lines)
        posted += sum(word == "posted" for word, _ in told)
        async with BudgetLedger.open(path) as ledger:
            await ledger.verify()
            balance = ledger.balance()
            assert balance.posted_entries >= posted
            assert balance.pending_pusd == balance.held_pusd


@pytest.mark.slow
async def test_two_thousand_tasks_on_a_file_spend_the_cap_tightly(tmp_path: Path) -> None:
    """Worst case twice the cost: nothing is left pending, and less than one reservation unspent."""
    cap = 1_000_000
    async with BudgetLedger.open(tmp_path / "l.sqlite", cap="0.000001") as ledger:

        async def row() -> None:
            while True:
                try:
                    entry = await ledger.reserve(200)
                except BudgetExceeded:
                    return
                await asyncio.sleep(0)
                await ledger.post(entry, charge(100))

        async with asyncio.TaskGroup() as group:
            for _ in range(2_000):
                group.create_task(row())
        balance = ledger.balance()
        assert balance.pending_pusd == 0
        assert cap - 200 < balance.posted_pusd <= cap
        await ledger.verify()


async def test_a_record_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    """Lone surrogates and numbers beyond a column, among good neighbours of the same commit."""
    bad = [{"request_id": "\ud800"}, {"attempt": 2**70}, {"endpoint": "\udfff"}]
    async with BudgetLedger.open(tmp_path / "l.sqlite", cap="1") as ledger:
        facts: list[dict[str, object]] = [bad[n % 3] if n % 7 == 3 else {} for n in range(100)]
        results = await asyncio.gather(
            *(ledger.reserve(1, **fact) for fact in facts),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        for fact, result in zip(facts, results, strict=True):
            assert isinstance(result, UnicodeEncodeError | OverflowError if fact else str)
        good = [result for result in results if isinstance(result, str)]
        assert ledger.balance().pending_pusd == len(good)
        await ledger.verify()
        doubled = await asyncio.gather(
            *(ledger.post(EntryId(entry), charge(1)) for entry in good + good),
            return_exceptions=True,
        )
        assert [isinstance(result, EntryStateError) for result in doubled] == (
            [False] * len(good) + [True] * len(good)
        )
        assert (ledger.balance().posted_pusd, ledger.balance().pending_pusd) == (len(good), 0)
        await ledger.verify()
