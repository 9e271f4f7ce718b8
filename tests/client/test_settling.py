"""Charges of unknown outcome, found out while a run goes on; the key's usage before and after."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from client_support import MODEL, fast, opened
from faults.hostile import LoopClock, answers, completion, facing, leaping
from quantroute import BudgetLedger, ChatRequest, Client, ConfigurationError, Service
from quantroute.client import Answered, Attendance, KeyComparison, SettlingSettings, Timeouts
from quantroute.client._settling import Settler
from quantroute.errors import BudgetExceeded, EntryStateError
from quantroute.generation import Prompt, Run, RunConfig, StopReason
from quantroute.ledger import ROOT, Basis, Charge, EntryId, OpenEntry
from quantroute.simulator import AnswerSpec, Faults, Scenario, Simulator, kimi_mission_scenario
from quantroute.testing import FakeClock

pytestmark = pytest.mark.usefixtures("key")

EAGER = SettlingSettings(
    poll_s=0.005, first_pause_s=0.005, longest_pause_s=0.02, patience_s=10.0, per_s=2_000.0
)
#: A look-up that is given up is made again, and counted twice: not on a slow machine either.
PATIENT = Timeouts(connect_s=50.0, first_byte_s=50.0, idle_s=50.0, total_s=50.0)
#: Answers without a bill: the charge is held until the record tells it.
UNBILLED = Faults(usage_missing=1.0)


def scenario(faults: Faults = UNBILLED, **changes: Any) -> Scenario:
    return kimi_mission_scenario(time_scale=0.0, faults=faults, **changes)


def request(text: str = "Hi", **changes: Any) -> ChatRequest:
    settings = {"model": MODEL, "max_output_tokens": 400, "request_id": text} | changes
    return ChatRequest(messages=({"role": "user", "content": text},), **settings)


async def all_settled(client: Client) -> None:
    async with asyncio.timeout(50):
        while client.ledger.balance().held_entries:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)


async def postings(ledger: BudgetLedger) -> Counter[str]:
    """How often each generation's record is posted."""
    rows = await ledger.store.aread(
        lambda c: c.execute(
            "SELECT generation_id FROM journal WHERE kind = 'posted' AND basis = 'record'"
        ).fetchall()
    )
    return Counter(name for (name,) in rows)


async def test_held_charges_are_settled_by_records_that_come_late() -> None:
    settings = {"settling": EAGER, "timeouts": PATIENT}
    async with opened(scenario(generation_misses=3), **settings) as (client, simulator):
        async with client.attended() as attendance:
            done = await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(20)))
            assert all(isinstance(item, Answered) for item in done)
            await all_settled(client)
            while attendance.settled_entries < 20:  # noqa: ASYNC110 - counted once it is posted
                await asyncio.sleep(0.001)
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd > 0
        assert attendance.settled_entries == 20
        assert attendance.settled_pusd == simulator.bill.total_pusd
        # Each was asked for until its record was out, and never again.
        assert set(simulator.bill.lookups.values()) == {4}
        assert set((await postings(client.ledger)).values()) == {1}
        assert attendance.at_start is not None
        assert attendance.at_end is not None
        assert attendance.at_start.agrees
        assert attendance.at_end.agrees
        await client.ledger.verify()


async def test_a_restart_and_a_second_process_settle_each_charge_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with Simulator(scenario(generation_misses=2), seed=1) as simulator:
        settings = fast(ledger=path, service=Service(base_url=simulator.base_url), settling=EAGER)
        async with Client(**settings) as client:
            await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(20)))
            assert client.ledger.balance().held_entries == 20
        async with AsyncExitStack() as stack:
            both = [await stack.enter_async_context(Client(**settings)) for _ in range(2)]
            watched = [await stack.enter_async_context(client.attended()) for client in both]
            for client in both:
                await all_settled(client)
            ledger = both[0].ledger
            assert sum((await postings(ledger)).values()) == 20
            assert set((await postings(ledger)).values()) == {1}
            assert sum(item.settled_entries for item in watched) == 20
            await ledger.verify()
        async with BudgetLedger.open(path) as ledger:
            assert ledger.balance().posted_pusd == simulator.bill.total_pusd


def is_settling() -> bool:
    return any(task.get_name() == "quantroute settling" for task in asyncio.all_tasks())


async def run_of(client: Client, rows: int, **settings: Any) -> Any:
    prompts = [Prompt(id=f"{n}", dataset="d", turns=(f"Question {n}?",)) for n in range(rows)]
    config = RunConfig(name="run", model=MODEL, max_output_tokens=400, datasets=("d",))
    return await Run(client, config, prompts, elastic_limits=False, **settings).execute()


async def test_money_that_a_record_frees_returns_to_the_run() -> None:
    """The cap holds five requests; twenty are asked, and each is held until its record is out."""
    async with opened(scenario(), settling=EAGER, max_in_flight=4) as (client, _):
        quote = await client.quote(MODEL)
        assert quote is not None
        hold_pusd = quote.cost_pusd(input_tokens=60, output_tokens=400)
    cap_usd = f"{5 * hold_pusd}e-12"
    for settling, reason in (
        (EAGER, StopReason.DONE),
        (SettlingSettings(patience_s=0.0, first_pause_s=60.0), StopReason.CAP_REACHED),
    ):
        late = scenario(generation_misses=1, answers=AnswerSpec(mean_tokens=20.0))
        async with opened(late, settling=settling, cap_usd=cap_usd, max_in_flight=4) as (
            client,
            simulator,
        ):
            report = await run_of(client, 20)
            assert report.stop_reason is reason
            assert (report.finished == 20) is (reason is StopReason.DONE)
            balance = client.ledger.balance()
            assert balance.posted_pusd + balance.pending_pusd <= 5 * hold_pusd
            await client.reconcile(patience_s=2.0)
            assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd


async def test_money_whose_record_never_comes_is_not_waited_for_longer_than_patience() -> None:
    settling = SettlingSettings(poll_s=0.005, first_pause_s=0.005, patience_s=0.05, per_s=1_000.0)
    async with opened(
        scenario(generation_delay_s=10**6), settling=settling, cap_usd="0.005", max_in_flight=4
    ) as (client, _):
        report = await run_of(client, 50)
        assert report.stop_reason is StopReason.CAP_REACHED
        assert report.attendance.settled_entries == 0
        assert client.ledger.balance().held_entries > 0


async def test_settling_ends_with_its_block_however_that_ends() -> None:
    async with opened(scenario(generation_delay_s=10**6), settling=EAGER) as (client, _):

        async def broken() -> None:
            async with client.attended():
                await client.complete(request())
                assert is_settling()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await broken()
        assert not is_settling()

        async def cancelled() -> None:
            async with client.attended():
                await asyncio.sleep(3_600)

        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_settling()
        with pytest.raises(BudgetExceeded):  # nobody finds out any more, so nobody waits
            await client.ledger.reserve(10 * 10**12)


async def test_look_ups_take_no_slot_from_rows() -> None:
    """One slot, taken by a request that takes its time: the charges held before are settled."""
    async with opened(scenario(), settling=EAGER, max_in_flight=1) as (client, simulator):
        for n in range(5):
            await client.complete(request(f"p{n}"))
        router = client._opened().dispatcher.router
        candidates = client._opened().catalogue.candidates(
            await client._opened().catalogue.offers(MODEL, request().sampling), request()
        )
        lease = router.acquire(candidates, 0.0)
        assert lease is not None
        assert router.in_flight == router.max_in_flight
        async with client.attended():
            await all_settled(client)
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd


async def test_one_record_pays_for_one_entry_only() -> None:
    """Two attempts were told the same id; what the second cost, only the key's usage can say."""
    charge = Charge(amount_pusd=5, basis=Basis.RECORD, generation_id="gen-1")
    async with BudgetLedger.in_memory(cap="1") as ledger:
        entries = [await ledger.reserve(100) for _ in range(2)]
        for entry_id in entries:
            await ledger.hold(entry_id, reason="lost", generation_id="gen-1")
        results = await asyncio.gather(
            *(ledger.post(entry_id, charge) for entry_id in entries), return_exceptions=True
        )
        assert [type(item) for item in results] == [type(None), EntryStateError]
        assert ledger.balance().posted_pusd == 5
        assert ledger.balance().held_entries == 1
        assert await ledger.recorded(["gen-1", "gen-2"]) == {"gen-1"}
        await ledger.verify()


async def test_a_record_that_was_rolled_back_may_be_posted_again() -> None:
    charge = Charge(amount_pusd=5, basis=Basis.RECORD, generation_id="gen-1")

    def fail(connection: Any) -> None:
        raise ZeroDivisionError

    async with BudgetLedger.in_memory(cap="1") as ledger:
        entry_id = await ledger.reserve(100)
        with pytest.raises(ZeroDivisionError):
            await ledger.post(entry_id, charge, also=fail)
        await ledger.post(entry_id, charge)
        assert ledger.balance().posted_pusd == 5


async def test_a_second_entry_of_one_generation_is_settled_by_the_keys_usage() -> None:
    async with opened(scenario(), cap_usd="1") as (client, simulator):
        await client.complete(request())
        (held,) = await client.ledger.unresolved()
        twin = await client.ledger.reserve(1_000)
        await client.ledger.hold(twin, reason="lost", generation_id=held.generation_id)
        done = await client.reconcile(quiet_s=0.0, patience_s=1.0)
        assert (done.settled_by_record, done.settled_by_key_usage, done.still_held) == (1, 1, 0)
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
        assert done.key is not None
        assert done.key.agrees


@pytest.mark.parametrize("wait", [True, False])
async def test_a_reservation_waits_for_held_money_that_is_being_found_out(wait: bool) -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        entry_id: EntryId = await ledger.reserve(10**12)
        await ledger.hold(entry_id, reason="lost", generation_id="gen-1")
        ledger.expect_settling(lost=())
        second = asyncio.create_task(ledger.reserve(500, wait=wait))
        await asyncio.sleep(0.02)
        if wait:
            assert not second.done()
            await ledger.post(entry_id, Charge(amount_pusd=1, basis=Basis.RECORD))
            await second
        else:
            with pytest.raises(BudgetExceeded):
                await second


async def test_who_waits_for_money_is_refused_once_it_is_lost() -> None:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        entry_id = await ledger.reserve(10**12)
        await ledger.hold(entry_id, reason="lost")
        ledger.expect_settling(lost=())
        second = asyncio.create_task(ledger.reserve(500))
        await asyncio.sleep(0.02)
        assert not second.done()
        ledger.expect_settling(lost=await ledger.unresolved())
        with pytest.raises(BudgetExceeded):
            await second
        assert ledger.balance(ROOT).held_entries == 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        SettlingSettings(per_s=0)


USD = 10**12


@pytest.mark.parametrize(
    ("found", "words", "is_explained"),
    [
        ({"usage_pusd": USD, "posted_pusd": USD}, "agree: $1.000000", True),
        ({"usage_pusd": USD + 7, "posted_pusd": USD}, "agree", True),
        (
            {"usage_pusd": 2 * USD, "posted_pusd": USD, "held_pusd": 3 * USD, "held_entries": 4},
            "4 held charges of up to $3.000000 together are not posted yet",
            True,
        ),
        (
            {"usage_pusd": 9 * USD, "posted_pusd": USD, "held_pusd": 3 * USD, "held_entries": 4},
            "the rest, at least $5.000000, is other use of the same key",
            False,
        ),
        (
            {"usage_pusd": 2 * USD, "posted_pusd": USD, "in_flight_pusd": 2 * USD},
            "requests in flight may have been billed up to $2.000000",
            True,
        ),
        ({"usage_pusd": 2 * USD, "posted_pusd": USD}, "that, at least $1.000000, is other", False),
        (
            {"usage_pusd": 2 * USD, "posted_pusd": USD, "open_before_pusd": 2 * USD},
            "up to $2.000000 was open already when the key's usage was first noted",
            True,
        ),
        (
            {"usage_pusd": 9 * USD, "posted_pusd": USD, "open_before_pusd": 2 * USD},
            "the rest, at least $6.000000, is other use of the same key",
            False,
        ),
        ({"usage_pusd": USD, "posted_pusd": 2 * USD}, "the service counts late", False),
        (
            {"usage_pusd": USD, "posted_pusd": 2 * USD, "estimated_pusd": 2 * USD},
            "$2.000000 of the ledger is charged by listed price or at the bound",
            True,
        ),
    ],
)
def test_a_difference_is_explained_in_words(
    found: dict[str, int], words: str, is_explained: bool
) -> None:
    comparison = KeyComparison(**found)
    assert words in comparison.explanation
    assert comparison.is_explained is is_explained
    assert "\n" not in comparison.explanation


async def test_other_use_of_the_key_shows_at_the_end_of_a_run() -> None:
    async with opened(scenario(Faults())) as (client, simulator):
        async with client.attended() as attendance:
            await client.complete(request())
            other = fast(service=Service(base_url=simulator.base_url))
            async with Client(**other) as somebody_else:
                await somebody_else.complete(request("mine"))
        found = attendance.at_end
        assert found is not None
        assert found.difference_pusd > 0
        assert not found.is_explained
        assert "other use of the same key" in found.explanation


# -- pace, pauses, silence ------------------------------------------------------------------------


async def looked_at(
    answer: tuple[int, int | None], *, entries: int, looks: int, settings: SettlingSettings
) -> list[tuple[float, str]]:
    """When each entry was looked up, by a clock that leaps, until so many looks were made."""
    clock, seen, is_enough = FakeClock(autojump=True), list[tuple[float, str]](), asyncio.Event()

    async def look(entry: OpenEntry) -> tuple[int, int | None]:
        seen.append((clock.now_s(), entry.entry_id))
        if len(seen) >= looks:
            is_enough.set()
        return answer

    async with BudgetLedger.in_memory(cap="1") as ledger:
        for number in range(entries):
            entry_id = await ledger.reserve(100)
            await ledger.hold(entry_id, reason="lost", generation_id=f"gen-{number}")
        settler = Settler(
            ledger=ledger, look=look, clock=clock, settings=settings, attendance=Attendance()
        )
        async with asyncio.timeout(10), settler.running():
            await is_enough.wait()
    return seen


async def test_one_entry_is_looked_up_after_ever_longer_pauses() -> None:
    settings = SettlingSettings(poll_s=0.5, first_pause_s=1.0, longest_pause_s=8.0)
    seen = await looked_at((404, None), entries=1, looks=7, settings=settings)
    times = [at_s for at_s, _ in seen]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    for pause, least in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert pause >= least


async def test_look_ups_keep_the_common_pace() -> None:
    settings = SettlingSettings(
        per_s=2.0, at_once=8, first_pause_s=1_000.0, longest_pause_s=2_000.0
    )
    seen = await looked_at((404, None), entries=12, looks=12, settings=settings)
    assert len({entry_id for _, entry_id in seen}) == 12
    assert seen[-1][0] - seen[0][0] >= 11 / 2 - 1e-6


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_service_that_wants_to_be_left_alone_is(status: int) -> None:
    settings = SettlingSettings(poll_s=0.1, per_s=1_000.0, at_once=4, first_pause_s=2.0)
    seen = await looked_at((status, None), entries=40, looks=12, settings=settings)
    # At most so many as were on the wire together, then nothing for a while, longer each time.
    bursts = sorted({round(at_s, 1) for at_s, _ in seen})
    assert len(bursts) >= 3
    assert bursts[1] - bursts[0] >= 2.0 - 0.2
    assert bursts[2] - bursts[1] >= 4.0 - 0.2


def test_a_service_that_hangs_holds_up_neither_start_nor_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        chat = answers(*(completion(usage=..., id=f"gen-{n}") for n in range(8)))
        settings = {"is_silent_on_accounts": True, "clock": LoopClock(), "cap_usd": "1"}
        async with facing(chat, **settings) as (client, _):
            began_s = loop.time()
            async with client.attended() as attendance:
                for n in range(8):
                    await client.complete(request(f"p{n}"))
            assert (attendance.at_start, attendance.at_end) == (None, None)
            assert client.ledger.balance().held_entries == 8
            assert loop.time() - began_s < 120

    leaping(main())
