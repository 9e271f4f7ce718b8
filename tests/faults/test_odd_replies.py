"""Replies that are nearly right: bills without parts, hints beyond sense, events with holes."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from client_support import until
from faults.hostile import (
    COST_PUSD,
    DONE,
    ONE_TRY,
    USAGE,
    Asked,
    Hostile,
    LoopClock,
    Wire,
    answers,
    chunk,
    completion,
    facing,
    leaping,
    request,
)
from quantroute import Client, ConfigurationError
from quantroute.client import GaveUp, LocalEndpoint, RetryPolicy, RowRefused, Timeouts
from quantroute.domain import Sampling
from quantroute.errors import CreditsExhausted
from quantroute.generation import RowClass, classify
from quantroute.storage import Work
from registry_support import MODEL, entry

pytestmark = pytest.mark.usefixtures("key")

END = chunk(choice={"finish_reason": "stop"}, usage=USAGE)


async def held_ids(client: Client) -> list[str | None]:
    return [entry.generation_id for entry in await client.ledger.unresolved()]


class TestBills:
    @pytest.mark.parametrize("usage", [{"cost": 0}, {"cost": "0.0", "prompt_tokens": 10}], ids=str)
    async def test_a_cost_of_zero_without_counts_is_a_cost_that_got_lost(self, usage: Any) -> None:
        """Text from a paid endpoint: without token counts, too, zero is no bill."""
        async with facing(answers(completion(usage=usage))) as (client, _):
            answer = await client.chat(MODEL, "x")
            assert (answer.cost_pusd, client.ledger.balance().held_entries) == (None, 1)
            assert "zero_cost" in answer.flags

    @pytest.mark.parametrize(
        ("usage", "prices"),
        [
            ({"cost": 0}, "0"),
            (USAGE | {"cost": 0, "prompt_tokens": 0, "completion_tokens": 0}, "1"),
        ],
    )
    async def test_zero_is_right_where_nothing_is_asked(self, usage: Any, prices: str) -> None:
        """A free endpoint; an answer from the service's cache, which counts no tokens."""
        price = f"0.00000{prices}"
        listed = [entry(pricing={"prompt": price, "completion": price})]
        async with facing(answers(completion(usage=usage)), endpoints=listed) as (client, _):
            assert (await client.chat(MODEL, "x")).cost_pusd == 0

    async def test_an_empty_usage_behind_the_bill_does_not_wipe_it_out(self) -> None:
        empty = b'data: {"id": "gen-1-a", "choices": [], "usage": {}}\n\n'
        async with facing(streams(chunk("Blue."), END, empty, DONE)) as (client, _):
            assert (await client.chat(MODEL, "x", stream=True)).cost_pusd == COST_PUSD

    async def test_a_byok_record_without_the_providers_share_settles_nothing(self) -> None:
        """As with answers: a part of the bill that is not said is not zero."""
        record = {"total_cost": 0.00001, "is_byok": True, "upstream_inference_cost": None}
        settings = {"generation_data": record}
        async with facing(answers(completion(usage=...)), **settings) as (client, server):
            await client.complete(request())
            assert (await client.reconcile(patience_s=0.0, quiet_s=600.0)).still_held == 1
            server.generation_data = record | {"upstream_inference_cost": 0.0002}
            assert (await client.reconcile(patience_s=0.0)).settled_by_record == 1
            assert client.ledger.balance().posted_pusd == 210_000_000

    @pytest.mark.parametrize(
        ("count", "flag"),
        [
            (2**41, "usage_contradiction"),
            (9 * 10**15, "usage_contradiction"),
            (2**60, "usage_missing"),
        ],
    )
    async def test_a_count_that_cannot_be_true_bills_nothing(self, count: int, flag: str) -> None:
        """A server of one's own bills by its counts: then the bound is charged, and no more."""
        usage = {"prompt_tokens": 1, "completion_tokens": count}
        async with Hostile(answers(completion(usage=usage))) as server:
            own = LocalEndpoint(
                name="mine",
                base_url=server.url,
                serves=MODEL,
                quantization="int4",
                output_usd_per_million="1",
                answers_as=f"{MODEL}-0127",
            )
            async with facing(answers(completion()), local=[own], endpoints=[]) as (client, _):
                answer = await client.chat(MODEL, "x", max_output_tokens=400)
                assert answer.flags == (flag,)
                assert answer.cost_pusd == client.ledger.balance().posted_pusd == 400 * 10**6

    async def test_text_that_cannot_be_stored_is_not_told_as_an_impossible_bill(self) -> None:
        def sink(*_: object) -> Work[None]:
            return lambda connection: connection.execute("SELECT ?", ("\ud800",)).close()

        async with facing(answers(completion())) as (client, _):
            with capture_logs() as events, pytest.raises(UnicodeEncodeError):
                await client.complete(request(), sink=sink)
            assert client.ledger.balance().posted_pusd == COST_PUSD
        assert "charge not credible" not in [event["event"] for event in events]


class TestKeysUsage:
    """Requests without an id, settled by what the key has spent: never for less than they cost."""

    async def test_what_was_lost_before_the_first_look_at_the_key_is_not_free(self) -> None:
        """The service did not say what the key had spent, then it counted the lost request."""

        async def chat(wire: Wire, asked: Asked) -> None:
            server.key_data = {"usage": 0.5}
            await wire.hang_up()

        async with facing(chat, retry=ONE_TRY) as (client, server):
            await client.complete(request())
            bound_pusd = client.ledger.balance().held_pusd
            async with client.attended() as attendance:
                pass
            assert attendance.at_end is not None
            assert attendance.at_end.is_explained
            done = await client.reconcile(patience_s=0.0, quiet_s=0.0)
            assert done.settled_by_key_usage == 1
            assert client.ledger.balance().posted_pusd == bound_pusd

    async def test_what_another_key_lost_is_not_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.hang_up()

        async with facing(chat, retry=ONE_TRY, key_data={"usage": 0}) as (client, _):
            await client.complete(request())
            bound_pusd = client.ledger.balance().held_pusd
            monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-anotherkeyofthesameuser")
            await client.note_baseline()
            await client.reconcile(patience_s=0.0, quiet_s=0.0)
            assert client.ledger.balance().posted_pusd == bound_pusd

    def test_a_record_that_never_comes_does_not_hold_up_the_others(self) -> None:
        """What the key spent covers it as well, once it is as old as what has no id."""

        async def chat(wire: Wire, asked: Asked) -> None:
            server.key_data = {"usage": 0.0001}
            if len(server.chats) == 1:
                await wire.answer(completion(usage=...))
            else:
                await wire.hang_up()

        async def main() -> None:
            nonlocal server
            settings = {"retry": ONE_TRY, "key_data": {"usage": 0}, "clock": LoopClock()}
            async with facing(chat, **settings) as (client, server):
                for _ in range(2):
                    await client.complete(request())
                assert (await client.reconcile(patience_s=0.0, quiet_s=0.0)).still_held == 2
                await asyncio.sleep(60.0)
                done = await client.reconcile(patience_s=0.0, quiet_s=0.0)
                assert (done.settled_by_key_usage, done.still_held) == (2, 0)
                assert client.ledger.balance().posted_pusd == 10**8

        server = Hostile(chat)
        leaping(main())


class TestHints:
    @pytest.mark.parametrize(
        "date", ["10 Sep 99999999999999999999 06:02:00 GMT", "10 Sep 2026 06:02:00 +99999999999999"]
    )
    async def test_a_date_beyond_all_calendars_is_no_hint(self, date: str) -> None:
        """It must not end the row with an error of Python's."""
        chat = answers(
            {"error": {"code": 502, "message": "x"}},
            status="502 Bad Gateway",
            headers=[f"Retry-After: Thu, {date}"],
        )
        async with facing(chat, retry=ONE_TRY) as (client, _):
            assert isinstance(await client.complete(request()), GaveUp)

    async def test_a_hint_in_the_body_is_bounded_as_one_in_a_header(self) -> None:
        body = {"error": {"code": 503, "message": "x", "availability": {"retry_after": 9e6}}}
        async with facing(answers(body, status="503 No")) as (client, _):
            row = asyncio.ensure_future(client.complete(request()))
            await until(lambda: any(item.faults for item in client.endpoint_reports()))
            assert 3_000 < client.endpoint_reports()[0].paused_for_s <= 3_600
            row.cancel()
            await asyncio.wait([row])

    async def test_a_middleman_that_took_us_for_gone_does_not_damn_the_row(self) -> None:
        """499 comes from a proxy's own timeout, not from the service's judgement of the row."""
        chat = answers("<html>", status="499 X", headers=["Content-Type: text/html"])
        async with facing(chat, retry=ONE_TRY) as (client, _):
            assert isinstance(await client.complete(request()), GaveUp)


class TestIds:
    @pytest.mark.parametrize("how", ["limit", "cancelled"])
    async def test_an_id_that_only_events_named_outlives_a_lost_end(self, how: str) -> None:
        """A middleman dropped the header: the record must be found all the same."""
        begun = asyncio.Event()

        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.start_stream()
            await wire.say(chunk("Blu"))
            begun.set()
            await asyncio.sleep(10**6)

        limits = Timeouts(idle_s=0.05 if how == "limit" else 60.0)
        async with facing(chat, retry=ONE_TRY, timeouts=limits) as (client, _):
            row = asyncio.ensure_future(client.complete(request(is_streamed=True)))
            if how == "cancelled":
                await begun.wait()
                await asyncio.sleep(0.02)  # for the client's end of the loopback to read
                row.cancel()
            await asyncio.wait([row])
            assert await held_ids(client) == ["gen-1-a"]

    async def test_odd_bytes_in_the_id_are_stored_as_utf_8_can(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.say(
                b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nX-Generation-Id: gen-\xff\r\n\r\n"
            )
            await asyncio.sleep(10**6)

        limits = Timeouts(idle_s=0.05)
        async with facing(chat, retry=ONE_TRY, timeouts=limits) as (client, _):
            await client.complete(request())
            assert await held_ids(client) == ["gen-?"]
        gc.collect()
        assert "never retrieved" not in caplog.text


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"object": "error", "message": "context too long", "code": 400}, "context too long"),
            ({"detail": "no such field"}, "no such field"),
            ("", "status 400 and no words"),
        ],
        ids=str,
    )
    async def test_an_error_in_another_servers_form_is_told(self, body: Any, words: str) -> None:
        """A refusal without a reason helps nobody; SGLang and others have forms of their own."""
        async with facing(answers(body, status="400 Bad Request")) as (client, _):
            refused = await client.complete(request())
        assert isinstance(refused, RowRefused)
        assert words in refused.problem

    @pytest.mark.parametrize("media", ["application/json", "application/problem+json", "text/json"])
    async def test_an_error_instead_of_a_stream_is_read_as_what_it_is(self, media: str) -> None:
        body = {"error": {"code": 402, "message": "Insufficient credits"}}
        chat = answers(body, headers=[f"Content-Type: {media}"])
        async with facing(chat) as (client, _):
            with pytest.raises(CreditsExhausted):
                await client.chat(MODEL, "x", stream=True)


@pytest.mark.parametrize(
    "settings", [lambda nan: Timeouts(idle_s=nan), lambda nan: RetryPolicy(base_s=nan)]
)
def test_not_a_number_is_no_limit(settings: Any) -> None:
    with pytest.raises(ConfigurationError):
        settings(float("nan"))


class TestEvents:
    @pytest.mark.parametrize(
        ("events", "text", "row_class"),
        [
            ((b'data: {"choices":[{"delta":{"content":"not\n\n',), "The sky is blue.", "error"),
            ((b"data: ping\n\n", b"data: null\n\n"), "The sky is blue.", "good"),
        ],
        ids=["torn", "noise"],
    )
    async def test_an_answer_with_a_hole_is_no_training_data(
        self, events: tuple[bytes, ...], text: str, row_class: str
    ) -> None:
        chat = streams(chunk("The sky is"), *events, chunk(" blue."), END, DONE)
        async with facing(chat) as (client, _):
            answer = await client.chat(MODEL, "x", stream=True)
        assert answer.content == text
        assert classify(answer, sampling=Sampling()).row_class is RowClass(row_class)

    async def test_a_bill_that_is_torn_behind_the_end_leaves_the_text_whole(self) -> None:
        chat = streams(
            chunk("Blue.", choice={"delta": {"content": "Blue."}, "finish_reason": "stop"}),
            b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()[:30],
        )
        async with facing(chat) as (client, _):
            answer = await client.chat(MODEL, "x", stream=True)
        assert "malformed_event" not in answer.flags


def streams(*events: bytes) -> Any:
    """A chat path that streams these events and hangs up."""

    async def chat(wire: Wire, asked: Asked) -> None:
        await wire.start_stream()
        await wire.say(*events)
        await wire.hang_up()

    return chat
