"""Cancelled anywhere, broken anywhere: the ledger stays right (sections B and C, promises 1-4)."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from client_support import fast, opened, until
from faults.hostile import (
    COST_PUSD,
    USAGE,
    Asked,
    LoopClock,
    Wire,
    answers,
    chunk,
    completion,
    facing,
    leaping,
    request,
)
from quantroute import Client, Service
from quantroute.client import Answered, GaveUp, RetryPolicy
from quantroute.client._catalogue import Catalogue
from quantroute.client._dispatch import Dispatcher
from quantroute.clock import SystemClock
from quantroute.domain import Endpoint, Quantization
from quantroute.errors import (
    AccountError,
    BudgetExceeded,
    CreditsExhausted,
    JournalError,
    KeyRejected,
    NoEligibleEndpoint,
)
from quantroute.ledger import BudgetLedger
from quantroute.pricing import Pricing, TokenUsage
from quantroute.routing import BreakerSettings, Candidate, Feedback, LimitSettings, Router
from quantroute.routing._breaker import Breaker, BreakerState
from quantroute.simulator import Simulator, kimi_mission_scenario
from quantroute.testing import FakeClock
from registry_support import MODEL, entry

pytestmark = pytest.mark.usefixtures("key")

OUT_OF_FUNDS = {"error": {"code": 402, "message": "Insufficient credits"}}


def assert_nothing_leaks(client: Client) -> None:
    """No lease is out, nobody waits, and every entry is resolved or held."""
    dispatcher = client._opened().dispatcher
    assert dispatcher.router.in_flight == 0
    assert all(report.in_flight == 0 for report in client.endpoint_reports())
    assert dispatcher.waiting == 0
    balance = client.ledger.balance()
    assert balance.open_entries == balance.held_entries, balance


async def turns_until(condition: Callable[[], bool]) -> None:
    """Turn the loop until it holds, two seconds at most; not one turn more."""
    deadline_s = time.monotonic() + 2
    while not condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - turns are the unit
        await asyncio.sleep(0)


class TestCancelling:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_after_every_number_of_turns_of_the_loop(self, stream: bool) -> None:
        """Look-up, slot, reservation, connection, headers, body, settlement: each is hit."""
        began = 0
        is_slow = False

        async def chat(wire: Wire, asked: Asked) -> None:
            nonlocal began
            began += 1
            if is_slow:
                await asyncio.sleep(0.2)
            for _ in range(3):
                await asyncio.sleep(0)
            if stream:
                await wire.start_stream(headers=["X-Generation-Id: gen-1-a"])
                await wire.say(chunk("Bl"))
                await asyncio.sleep(0)
                await wire.say(chunk("ue.", choice={"finish_reason": "stop"}, usage=USAGE))
                await wire.say("data: [DONE]\n\n")
                await wire.hang_up()
            else:
                raw = json.dumps(completion())
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(raw)}\r\n"
                await wire.say(head, "X-Generation-Id: gen-1-a\r\n\r\n", raw[:20])
                await asyncio.sleep(0)
                await wire.say(raw[20:])

        phases = {"voided": 0, "held": 0, "posted": 0}
        async with facing(chat, cap_usd="1000") as (client, _):
            for turns in range(120):
                await asyncio.sleep(0.002)  # the service may still be getting the last one
                before = client.ledger.balance()
                began_before = began
                is_slow = turns == 118  # one that is certainly under way when it is cancelled
                task = asyncio.ensure_future(client.complete(request(is_streamed=stream)))
                for turn in range(turns):
                    if turn == 40:
                        # How many turns a commit takes is the machine's business: the sweep goes
                        # on where the service has just begun.
                        await turns_until(lambda seen=began_before: began > seen)  # type: ignore[misc]
                    # From there on, long enough now and then for the writer thread to settle.
                    await asyncio.sleep(0.001 if turn % 16 == 15 and turn > 80 else 0)
                if turns == 119:
                    await asyncio.wait({task}, timeout=2)  # the end of the sweep: not cancelled
                task.cancel()
                await asyncio.wait({task})
                await client.ledger.store.submit(lambda _: None)  # what is queued is done
                assert_nothing_leaks(client)
                after = client.ledger.balance()
                held = after.held_entries - before.held_entries
                posted = after.posted_entries - before.posted_entries
                assert held + posted >= began - began_before, f"{turns}: sent, and not counted"
                phases["held"] += held
                phases["posted"] += posted
                phases["voided"] += after.voided_entries - before.voided_entries
                if task.cancelled() is False:
                    assert isinstance(task.result(), Answered)
            await client.ledger.verify()
        assert phases["held"] > 0
        assert phases["posted"] > 0

    async def test_while_waiting_for_a_slot_for_money_and_for_a_pause(self) -> None:
        release = asyncio.Event()

        async def chat(wire: Wire, asked: Asked) -> None:
            await release.wait()
            await wire.answer(completion())

        # One worst case fits: the second waits for money; with one slot the third waits for that.
        for settings in ({"cap_usd": "0.0015"}, {"max_in_flight": 1}):
            release.clear()
            async with facing(chat, **settings) as (client, server):
                first = asyncio.ensure_future(client.complete(request()))
                await until(lambda: server.chats)
                waiting = [
                    asyncio.ensure_future(client.complete(request(f"p{n}"))) for n in range(5)
                ]
                for turn in range(30):
                    await asyncio.sleep(0)
                    if turn % 6 == 5:
                        waiting[turn // 6].cancel()
                await asyncio.wait(waiting)
                assert all(task.cancelled() for task in waiting)
                release.set()
                assert isinstance(await first, Answered)
                assert isinstance(await client.complete(request("next")), Answered)
                assert len(server.chats) == 2
                assert_nothing_leaks(client)
                assert client.ledger.balance().pending_pusd == 0

    async def test_twice_in_the_same_instant(self) -> None:
        """The second cancellation comes while the first is being dealt with."""

        async def chat(wire: Wire, asked: Asked) -> None:
            await asyncio.sleep(60)

        async with facing(chat) as (client, server):
            for turns in range(12):
                task = asyncio.ensure_future(client.complete(request()))
                await until(lambda sent=turns: len(server.chats) > sent)
                task.cancel()
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
            await client.ledger.store.submit(lambda _: None)
            assert_nothing_leaks(client)
            assert client.ledger.balance().held_entries == 12

    async def test_a_cancelled_row_stays_cancelled_when_the_store_is_broken(
        self, tmp_path: Path
    ) -> None:
        """`asyncio.timeout` around a request must see its own cancellation."""

        async def chat(wire: Wire, asked: Asked) -> None:
            await asyncio.sleep(60)

        async with facing(chat, ledger=tmp_path / "l.sqlite") as (client, server):

            async def bounded() -> None:
                async with asyncio.timeout(0.2):
                    await client.complete(request())

            task = asyncio.ensure_future(bounded())
            await until(lambda: server.chats)
            await break_store(client)
            with pytest.raises(TimeoutError):
                await task
            assert client._opened().dispatcher.router.in_flight == 0


async def break_store(client: Client) -> None:
    """The disk goes: the next transaction fails, and all that follow are refused."""

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(JournalError):
        await client.ledger.store.submit(fail)


class TestBrokenLedger:
    async def test_a_journal_that_fails_stops_sending_and_loses_nothing(
        self, tmp_path: Path
    ) -> None:
        """Rows end with a JournalError, nothing more is sent, and a reopening holds the rest."""
        path, gate = tmp_path / "l.sqlite", asyncio.Event()

        async def chat(wire: Wire, asked: Asked) -> None:
            await gate.wait()
            await wire.answer(completion())

        async with facing(chat, ledger=path, max_in_flight=4) as (client, server):
            rows = [asyncio.ensure_future(client.complete(request(f"p{n}"))) for n in range(12)]
            await until(lambda: len(server.chats) == 4)
            await break_store(client)
            gate.set()
            results = await asyncio.gather(*rows, return_exceptions=True)
            assert all(isinstance(item, JournalError) for item in results), results
            assert len(server.chats) == 4
            assert client._opened().dispatcher.router.in_flight == 0
        async with BudgetLedger.open(path) as ledger:
            assert ledger.balance().held_entries == 4
            await ledger.verify()

    async def test_work_that_fails_beside_a_charge_does_not_take_the_charge_back(self) -> None:
        """The sink's own statement is wrong: the row raises, the money is posted."""

        def sink(answer: Any, entry_id: str) -> Any:
            return lambda c: c.execute("INSERT INTO nowhere VALUES (1)")

        async with facing(answers(completion())) as (client, _):
            with pytest.raises(sqlite3.OperationalError):
                await client.complete(request(), sink=sink)
            assert client.ledger.balance().posted_pusd == COST_PUSD
            assert_nothing_leaks(client)

    async def test_two_clients_on_one_file(self, tmp_path: Path) -> None:
        """Both spend under one cap, and the service's bill is what the ledger says."""
        path, cap = tmp_path / "l.sqlite", 20_000_000_000
        async with Simulator(kimi_mission_scenario(time_scale=0.001), seed=3) as simulator:
            service = Service(base_url=simulator.base_url)
            settings = fast(service=service, ledger=path, cap_usd="0.02", max_in_flight=20)
            async with Client(**settings) as one, Client(**settings) as two:
                done = await asyncio.gather(
                    *(
                        client.complete(request(f"{n}", max_output_tokens=500))
                        for n in range(100)
                        for client in (one, two)
                    ),
                    return_exceptions=True,
                )
                assert all(isinstance(item, Answered | BudgetExceeded) for item in done), done
                assert sum(isinstance(item, Answered) for item in done) > 10
                await one.ledger.verify()
            async with BudgetLedger.open(path) as ledger:
                assert ledger.balance().posted_pusd == simulator.bill.total_pusd <= cap

    async def test_two_clients_reconcile_the_same_entries_at_once(self, tmp_path: Path) -> None:
        """Whoever comes second finds them settled, and that is no error."""
        record = {"id": "gen-1-a", "total_cost": 0.0000135}
        chat = answers(*(completion(usage=..., id=f"gen-1-{n}") for n in range(30)))
        settings = {"ledger": tmp_path / "l.sqlite", "generation_data": record}
        async with facing(chat, **settings) as (one, server):
            for n in range(30):
                await one.complete(request(f"p{n}"))
            service = Service(base_url=server.url)
            async with Client(**fast(service=service, ledger=tmp_path / "l.sqlite")) as two:
                both = await asyncio.gather(*(c.reconcile(patience_s=5.0) for c in (one, two)))
                assert [item.still_held for item in both] == [0, 0]
                assert one.ledger.balance().posted_entries == 30
                await one.ledger.verify()


class TestReconciling:
    def test_a_service_that_hangs_holds_nobody_up(self) -> None:
        """Patience is for the pass, not for each of thousands of entries."""

        async def main() -> None:
            chat = answers(completion(usage=...))
            settings = {"is_silent_on_accounts": True, "clock": LoopClock(), "cap_usd": "100"}
            async with facing(chat, **settings) as (client, _):
                await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(200)))
                began_s = asyncio.get_running_loop().time()
                done = await client.reconcile(patience_s=5.0)
                assert done.still_held == 200
                # One round of look-ups, the key's usage, and the entries again.
                assert asyncio.get_running_loop().time() - began_s < 95

        leaping(main())

    async def test_without_a_key_the_error_is_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with facing(answers(completion(usage=...))) as (client, _):
            await client.complete(request())
            monkeypatch.delenv("OPENROUTER_API_KEY")
            with pytest.raises(KeyRejected):
                await client.reconcile(patience_s=0.1)

    async def test_an_id_cannot_add_parameters_to_the_look_up(self) -> None:
        chat = answers(completion(id="gen&id=other#x y", usage=...))
        async with facing(chat) as (client, server):
            await client.complete(request())
            await client.reconcile(patience_s=0.0)
            targets = [item.target for item in server.asked if "/generation" in item.target]
            assert targets == ["/api/v1/generation?id=gen%26id%3Dother%23x%20y"]

    async def test_an_absurd_record_settles_nothing(self) -> None:
        record = {"id": "gen-1-a", "total_cost": 9_999_999}
        settings = {"generation_data": record}
        async with facing(answers(completion(usage=...)), **settings) as (client, _):
            await client.complete(request())
            done = await client.reconcile(patience_s=0.0, quiet_s=600.0)
            assert done.still_held == 1
            assert 500 < done.quiet_in_s <= 600
            assert (await client.reconcile(patience_s=0.0, quiet_s=0.0)).quiet_in_s == 0

    async def test_a_clock_that_was_set_back_delays_nothing_beyond_the_asked_age(self) -> None:
        """The entry is from the future; its age is not known to be negative."""
        clock = FakeClock()
        async with facing(answers(completion(usage=...)), clock=clock) as (client, _):
            await client.complete(request())
            clock.set_time(clock.time_s() - 3_600)
            assert (await client.reconcile(patience_s=0.0, quiet_s=600.0)).quiet_in_s == 600
            assert (await client.reconcile(patience_s=0.0, quiet_s=0.0)).quiet_in_s == 0


class TestStopping:
    async def test_out_of_funds_admits_nobody_in_the_freed_slot(self) -> None:
        """Fault 46: with eight slots at most eight requests meet the empty account."""
        async with facing(answers(OUT_OF_FUNDS), max_in_flight=8) as (client, server):
            results = await asyncio.gather(
                *(client.complete(request(f"p{n}")) for n in range(200)), return_exceptions=True
            )
            assert all(isinstance(item, CreditsExhausted) for item in results)
            assert len(server.chats) <= 8
            assert client.ledger.balance().pending_pusd == 0
            assert_nothing_leaks(client)

    async def test_rows_between_two_attempts_hear_of_it_without_a_warning(self) -> None:
        """A row whose attempt failed while another stopped the run: no coroutine is forgotten."""

        async def chat(wire: Wire, asked: Asked) -> None:
            if "stopper" in asked.body.decode():
                await wire.answer(OUT_OF_FUNDS, status="402 Payment Required")
            else:
                await until(lambda: client._opened().stopped_by)
                await wire.answer({"error": {"code": 502, "message": "x"}}, status="502 Bad")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with facing(chat) as (client, _):
                results = await asyncio.gather(
                    *(client.complete(request(text)) for text in ("a", "b", "stopper")),
                    return_exceptions=True,
                )
                assert all(isinstance(item, CreditsExhausted) for item in results)
                gc.collect()

    async def test_a_result_of_the_same_instant_is_undone(self) -> None:
        """The reservation arrives together with the stop: it is given back."""
        async with facing(answers(completion())) as (client, _):
            engine = client._opened()
            undone: list[int] = []

            async def arrive() -> int:
                engine.stop_admitting(AccountError(problem="stop", status=402))
                return 7

            async def undo(result: int) -> None:
                undone.append(result)

            # Delivered or undone, never lost.
            try:
                assert await engine.unless_stopped(arrive(), undo=undo) == 7
            except AccountError:
                assert undone == [7]

    async def test_closing_closes_everything_although_something_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with facing(answers(completion())) as (client, _):
            ledger, registry = client.ledger, client.registry
            close = client._sessions.close

            async def failing(self: Any) -> None:
                await close()
                raise OSError("broken")

            monkeypatch.setattr(type(client._sessions), "close", failing)
            with pytest.raises(OSError, match="broken"):
                await client.aclose()
            monkeypatch.undo()
            await registry.aclose()
            assert ledger._owner == ""


class TestMoneyRules:
    def priced(self, **prices: str) -> list[dict[str, Any]]:
        return [entry(pricing={"prompt": "0.000001", "completion": "0.000002"} | prices)]

    @pytest.mark.parametrize(
        "prices",
        [
            {"prompt": "-1", "completion": "-1"},
            {"prompt": "-1000000"},
            {"completion": "NaN"},
            {"completion": None},
            {"completion": "abc"},
            {"completion": "Infinity"},
            {"request": "-1"},
            {"mystery": "0.1"},
        ],
        ids=str,
    )
    async def test_an_endpoint_without_a_price_is_never_asked_under_a_cap(
        self, prices: Any
    ) -> None:
        """Faults 01, 10 and 20, through the client."""
        async with facing(answers(completion()), endpoints=self.priced(**prices)) as (client, sv):
            with pytest.raises(NoEligibleEndpoint):
                await client.chat(MODEL, "x")
            assert sv.chats == []

    async def test_fees_per_request_are_reserved(self) -> None:
        """Fault 10: free tokens, half a cent a request."""
        prices = {"prompt": "0", "completion": "0", "request": "0.005"}
        seen: list[int] = []

        async def chat(wire: Wire, asked: Asked) -> None:
            seen.append(client.ledger.balance().pending_pusd)
            await wire.answer(completion(usage=USAGE | {"cost": 0.005}))

        async with facing(chat, endpoints=self.priced(**prices)) as (client, _):
            assert (await client.chat(MODEL, "x")).cost_pusd == 5_000_000_000
        assert seen == [5_000_000_000]

    def test_contradicting_parts_are_charged_at_the_dearest_reading(self) -> None:
        """Fault 13: more cached than there was input cannot make it cheaper."""
        pricing = Pricing(
            prices={
                name: Decimal(text)
                for name, text in {
                    "prompt": "0.000003", "completion": "0.00001",
                    "input_cache_read": "0.0000003", "input_cache_write": "0.00000375",
                    "internal_reasoning": "0.00002",
                }.items()
            }
        )  # fmt: skip
        when = datetime(2026, 8, 3, tzinfo=UTC)

        def charge(**tokens: int) -> int:
            return pricing.charge_pusd(TokenUsage(**tokens), when=when)

        honest = charge(input_tokens=262_960, output_tokens=1_744, cached_tokens=257_955)
        assert honest == 5_005 * 3_000_000 + 257_955 * 300_000 + 1_744 * 10_000_000
        assert charge(input_tokens=10, output_tokens=0, cached_tokens=50) == 10 * 3_750_000
        assert charge(input_tokens=0, output_tokens=10, reasoning_tokens=99) == 10 * 20_000_000

    async def test_each_attempt_is_its_own_entry(self) -> None:
        """Fault 22: three paid failures and an answer are four charges, all in the ledger."""
        failed = completion(
            choices=[{"finish_reason": "error", "message": {"content": "half"}}],
            usage=USAGE | {"cost": 0.001},
        )
        async with facing(answers(failed, failed, failed, completion())) as (client, _):
            done = await client.complete(request())
            assert isinstance(done, Answered)
            assert done.attempts == 4
            assert client.ledger.balance().posted_entries == 4
            assert client.ledger.balance().posted_pusd == 3 * 10**9 + COST_PUSD

    async def test_paid_failures_are_bounded(self) -> None:
        failed = completion(choices=[], usage=USAGE)
        retry = RetryPolicy(base_s=0.001, max_attempts=9, max_paid_attempts=3)
        async with facing(answers(failed), retry=retry) as (client, server):
            assert isinstance(await client.complete(request()), GaveUp)
            assert len(server.chats) == 3

    @pytest.mark.parametrize("usage", [..., None, {}, {"prompt_tokens": None}])
    async def test_an_answer_without_a_bill_stays_reserved_in_full(self, usage: Any) -> None:
        """Faults 16 and 28: never released to zero."""
        async with facing(answers(completion(usage=usage))) as (client, _):
            answer = await client.chat(MODEL, "x")
            balance = client.ledger.balance()
            assert answer.cost_pusd is None
            assert balance.held_pusd == balance.pending_pusd > COST_PUSD

    async def test_max_tokens_is_always_sent_and_reserved(self) -> None:
        """Fault 32: no limit in the list; what is sent is what was reserved for."""
        endless = [entry(max_completion_tokens=None, context_length=262_144)]
        async with facing(answers(completion()), endpoints=endless) as (client, server):
            await client.complete(request(max_output_tokens=262_144))
            sent = server.chats[0].json["max_tokens"]
            assert 262_144 - 200 < sent < 262_144
            await client.complete(request(max_output_tokens=7))
            assert server.chats[1].json["max_tokens"] == 7


class TestTurns:
    """The dispatcher's and router's own small print."""

    def candidate(self, tag: str = "a") -> Candidate:
        endpoint = Endpoint(
            model="m/x",
            tag=tag,
            provider_name=tag,
            quantization=Quantization.INT4,
            pricing=Pricing.flat(input_usd_per_token="0", output_usd_per_token="0"),
        )
        return Candidate(endpoint=endpoint, expected_pusd=1, worst_pusd=1, max_tokens=1)

    async def test_a_feeder_that_leaves_does_not_take_the_turn_along(self) -> None:
        hand = Dispatcher(Router(1), SystemClock())
        lease = await hand.acquire([self.candidate()])
        feeders = [asyncio.ensure_future(hand.slot()) for _ in range(3)]
        await asyncio.sleep(0)
        hand.release(lease, Feedback.SUCCESS)
        feeders[0].cancel()
        async with asyncio.timeout(1):
            await asyncio.wait(feeders[1:])

    def test_a_full_account_waits_for_a_return_and_not_for_a_clock(self) -> None:
        """While all slots are in use no timer can help; one that fires anyway burns a core."""
        router = Router(2, limits=LimitSettings(initial=2, ramp_interval_s=0.1))
        wanted = [self.candidate()]
        assert router.acquire(wanted, 0.0)
        assert router.acquire(wanted, 0.0)
        assert router.acquire(wanted, 5.0) is None
        assert router.retry_at_s(wanted, 5.0) is None

    def test_a_straggler_of_the_outage_is_not_the_probes_verdict(self) -> None:
        breaker = Breaker(BreakerSettings(failures=1, pause_s=1.0))
        breaker.failed(sent_at_s=0.0, now_s=1.0, problem="503")
        breaker.sent()
        assert breaker.state is BreakerState.PROBING
        assert not breaker.failed(sent_at_s=0.5, now_s=3.0, problem="503")
        breaker.abandoned(sent_at_s=0.5)
        assert breaker.state is BreakerState.PROBING
        assert breaker.failed(sent_at_s=2.5, now_s=3.0, problem="503")

    async def test_names_are_judged_once_for_two_thousand_rows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        judged = 0
        judge = Catalogue._judge

        def counted(self: Any, *args: Any, **named: Any) -> Any:
            nonlocal judged
            judged += 1
            return judge(self, *args, **named)

        monkeypatch.setattr(Catalogue, "_judge", counted)
        async with opened(exclude=["Fireworks"]) as (client, _):
            await asyncio.gather(*(client.verdicts(MODEL) for _ in range(2_000)))
        assert judged == 1
