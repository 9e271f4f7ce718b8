"""What servers and middlemen really put on the wire (sections D, E and J of the fault list)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest

from faults.hostile import (
    COST_PUSD,
    DONE,
    ONE_TRY,
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
from quantroute.client import Answered, GaveUp, RetryPolicy, Timeouts
from quantroute.errors import AccountError, ConfigurationError, TransportError
from quantroute.routing import LimitSettings
from registry_support import MODEL, entry

pytestmark = pytest.mark.usefixtures("key")


def ends(**changes: Any) -> bytes:
    return chunk(choice={"finish_reason": "stop"}, **changes)


class TestBodies:
    async def test_gzip(self) -> None:
        """A middleman compresses what was plain."""

        async def chat(wire: Wire, asked: Asked) -> None:
            raw = gzip.compress(json.dumps(completion("Blue. " * 999)).encode())
            await wire.say(
                f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(raw)}\r\n"
                "Content-Type: application/json\r\n\r\n",
                raw,
            )

        async with facing(chat) as (client, _):
            assert (await client.chat(MODEL, "x")).content == "Blue. " * 999

    async def test_broken_gzip_is_a_cut_answer_and_stays_reserved(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            raw = gzip.compress(json.dumps(completion("Blue. " * 999)).encode())[:-9]
            await wire.say(
                f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(raw)}\r\n\r\n",
                raw[:20],
                b"\0" * (len(raw) - 20),
            )

        async with facing(chat, retry=ONE_TRY) as (client, _):
            assert isinstance(await client.complete(request()), GaveUp)
            assert client.ledger.balance().held_entries == 1

    async def test_http_1_0_without_a_length_ends_with_the_connection(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.say("HTTP/1.0 200 OK\r\n\r\n", json.dumps(completion()))
            await wire.hang_up()

        async with facing(chat) as (client, server):
            for _ in range(3):
                assert (await client.chat(MODEL, "x")).content == "Blue."
            assert len(server.chats) == 3

    async def test_a_success_of_another_number_is_a_success(self) -> None:
        """203: a proxy transformed a 200. The answer is paid for and must not be thrown away."""
        status = "203 Non-Authoritative Information"
        async with facing(answers(completion(), status=status)) as (client, server):
            assert (await client.chat(MODEL, "x")).cost_pusd == COST_PUSD
            assert len(server.chats) == 1

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_answer_of_six_megabytes(self, stream: bool) -> None:
        """Whole, in one event or one body, and without quadratic work on small pieces."""
        text = "word " * 1_250_000

        async def chat(wire: Wire, asked: Asked) -> None:
            if not stream:
                return await wire.answer(completion(text))
            await wire.start_stream()
            raw = chunk(text)
            for start in range(0, len(raw), 1_400):
                await wire.say(raw[start : start + 1_400])
                if start % 140_000 == 0:
                    await asyncio.sleep(0)
            await wire.say(ends(usage=USAGE), DONE)
            return await wire.hang_up()

        async with facing(chat) as (client, _):
            async with asyncio.timeout(8):
                answer = await client.chat(MODEL, "x", stream=stream)
            assert answer.content == text

    async def test_a_stream_of_a_hundred_thousand_lines(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.start_stream()
            for _ in range(100):
                await wire.say((b": OPENROUTER PROCESSING\n\n" * 40 + chunk("a") * 3) * 8)
            await wire.say(ends(usage=USAGE), DONE)
            await wire.hang_up()

        async with facing(chat) as (client, _):
            assert (await client.chat(MODEL, "x", stream=True)).content == "a" * 2_400

    @pytest.mark.parametrize(
        "body",
        [
            '{"a":' * 100_000,
            '{"usage":{"cost":1e999999999}}',
            '{"usage":{"cost":1e99999999999999999999}}',
            '{"error":{"code":1e400}}',
            '{"usage":{"prompt_tokens":' + "9" * 5000 + "}}",
            '{"choices":[{"finish_reason":"stop","message":{"content":1e999999999}}]}',
        ],
        ids=["deep", "exponent", "huge exponent", "code", "digits", "content"],
    )
    @pytest.mark.parametrize("stream", [False, True])
    async def test_json_bombs_cost_one_attempt(self, body: str, stream: bool) -> None:
        """No shape of a body may raise into the run, or turn eleven bytes into a gigabyte."""

        async def chat(wire: Wire, asked: Asked) -> None:
            if not stream:
                return await wire.answer(body)
            await wire.start_stream()
            await wire.say(f"data: {body}\n\n")
            return await wire.hang_up()

        async with facing(chat, retry=ONE_TRY) as (client, _):
            completion_ = await client.complete(request(is_streamed=stream))
            assert isinstance(completion_, GaveUp)
            assert client.ledger.balance().open_entries <= 1

    @pytest.mark.parametrize(
        "usage",
        [
            USAGE | {"cost": 9_500_000.0},
            USAGE | {"cost": 1e30},
            USAGE | {"completion_tokens": 2**50},
            USAGE | {"completion_tokens": 2**50, "cost": 0},
            USAGE | {"prompt_tokens_details": {"cached_tokens": 2**50}},
            USAGE
            | {"cost": 9e6, "is_byok": True, "cost_details": {"upstream_inference_cost": 9e6}},
        ],
        ids=["beyond the journal", "absurd", "tokens", "tokens for nothing", "cached", "sum"],
    )
    async def test_an_impossible_bill_is_held_and_the_answer_kept(self, usage: Any) -> None:
        """One liar must not end the run; its reservation stays counted until the record tells."""
        async with facing(answers(completion(usage=usage))) as (client, _):
            answer = await client.chat(MODEL, "x")
            assert answer.content == "Blue."
            balance = client.ledger.balance()
            assert (balance.held_entries, balance.posted_pusd) == (1, 0)
            assert answer.cost_pusd is None
            await client.ledger.verify()

    async def test_bills_that_together_exceed_the_journal(self) -> None:
        usage = USAGE | {"cost": 5_000_000.0}
        async with facing(answers(completion(usage=usage)), cap_usd="9000000") as (client, _):
            first, second = [await client.complete(request(f"p{n}")) for n in range(2)]
            assert isinstance(first, Answered)
            assert isinstance(second, Answered)
            assert client.ledger.balance().posted_pusd == 5 * 10**18
            assert client.ledger.balance().held_entries == 1

    async def test_a_name_that_utf_8_cannot_carry(self) -> None:
        """Lone surrogates in names and ids reach neither the journal nor an encoder."""
        body = completion(id="gen-\ud800", provider="Host\udfff", model="m\ud800")
        async with facing(answers(body)) as (client, _):
            answer = await client.chat(MODEL, "x")
            assert answer.cost_pusd == COST_PUSD
            assert (answer.provenance.generation_id or "").encode()

    async def test_enormous_headers_are_a_broken_wire_not_a_crash(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            filler = "x" * 100_000
            await wire.answer(completion(), headers=[f"X-Filler: {filler}"])

        async with facing(chat, retry=ONE_TRY) as (client, _):
            gave_up = await client.complete(request())
            assert isinstance(gave_up, GaveUp)
            assert len(gave_up.problem) < 600
            assert client.ledger.balance().held_entries == 1

    async def test_a_flood_without_end_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quantroute.client._transport._MOST_BYTES", 10**6)

        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.start_stream()
            while True:
                await wire.say(b": more\n\n" * 1_000)

        async with facing(chat, retry=ONE_TRY) as (client, _):
            gave_up = await client.complete(request(is_streamed=True))
            assert isinstance(gave_up, GaveUp)
            assert "1000000 bytes" in gave_up.problem

    async def test_a_cost_inside_an_error_status_is_paid(self) -> None:
        """A 502 that names what it cost is no proof that it cost nothing."""
        body = {"error": {"code": 502, "message": "died"}, "usage": USAGE, "id": "gen-1-b"}
        chat = answers(body, status="502 Bad Gateway")
        async with facing(chat, retry=ONE_TRY) as (client, _):
            assert isinstance(await client.complete(request()), GaveUp)
            assert client.ledger.balance().posted_pusd == COST_PUSD

    @pytest.mark.parametrize("status", ["408 Request Timeout", "499 Gone", "502 Bad Gateway"])
    async def test_html_about_what_happened_behind_proves_nothing(self, status: str) -> None:
        chat = answers("<html>", status=status, headers=["Content-Type: text/html"])
        async with facing(chat, retry=ONE_TRY) as (client, _):
            await client.complete(request())
            assert client.ledger.balance().held_entries == 1


class TestStreams:
    """Known faults 52-56, over the whole decoder."""

    async def test_split_at_every_byte_the_answer_is_the_same(self) -> None:
        stream = (
            b"\xef\xbb\xbf: hello\r\n\r\n"
            + chunk("d\u00e9j\u00e0 ").replace(b"\n", b"\r\n")
            + 'data:{"choices":[{"delta":{"content":"vu \u2028\U0001f600"}}]}\n\n'.encode()
            + b"event: x\nid: 7\ndata: : KEEPALIVE\n\n"
            + ends(usage=USAGE)
            + DONE
        )
        cuts = iter(range(1, len(stream)))

        async def chat(wire: Wire, asked: Asked) -> None:
            cut = next(cuts)
            await wire.start_stream()
            await wire.say(stream[:cut])
            await asyncio.sleep(0)  # the client reads what is there
            await asyncio.sleep(0)
            await wire.say(stream[cut:])
            await wire.hang_up()

        async with facing(chat, cap_usd="1000") as (client, _):
            wants = request(is_streamed=True)
            for _ in range(len(stream) - 1):
                done = await client.complete(wants)
                assert isinstance(done, Answered)
                assert done.answer.content == "d\u00e9j\u00e0 vu \u2028\U0001f600"
                assert done.answer.cost_pusd == COST_PUSD

    @pytest.mark.parametrize(
        ("events", "flag"),
        [
            (chunk("a") + DONE, "no_finish_reason"),
            (chunk("a") + ends(usage=USAGE), "no_done"),
        ],
    )
    async def test_one_of_two_ends_is_enough_and_is_told(self, events: bytes, flag: str) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.start_stream()
            await wire.say(events)
            await wire.hang_up()

        async with facing(chat) as (client, _):
            assert flag in (await client.chat(MODEL, "x", stream=True)).flags

    async def test_json_where_a_stream_was_asked(self) -> None:
        """And a stream where a body was asked: what came decides."""
        async with facing(answers(completion())) as (client, _):
            assert (await client.chat(MODEL, "x", stream=True)).content == "Blue."

        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.start_stream()
            await wire.say(chunk("Bl"), chunk("ue."), ends(usage=USAGE), DONE)
            await wire.hang_up()

        async with facing(chat) as (client, _):
            assert (await client.chat(MODEL, "x")).content == "Blue."


class TestConnections:
    async def test_kept_connections_that_the_server_closed_meanwhile(self) -> None:
        """The next request opens a new one; nothing is lost and nothing held."""

        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.answer(completion())
            await wire.hang_up()

        async with facing(chat) as (client, server):
            for n in range(5):
                assert isinstance(await client.complete(request(f"p{n}")), Answered)
                await asyncio.sleep(0.005)
            assert server.connections >= 5
            assert client.ledger.balance().pending_pusd == 0

    async def test_closed_without_an_answer_the_charge_is_unknown(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.hang_up()

        async with facing(chat, retry=ONE_TRY) as (client, server):
            with pytest.raises(TransportError) as caught:
                await client.chat(MODEL, "x")
            assert caught.value.maybe_billed
            assert len(server.chats) == 1  # a POST is not repeated behind our back
            assert client.ledger.balance().held_entries == 1

    async def test_no_service_is_a_transport_error_that_cost_nothing(self) -> None:
        async with facing(answers(completion()), retry=ONE_TRY) as (client, server):
            await client.verdicts(MODEL)
            await server.__aexit__()
            with pytest.raises(TransportError) as caught:
                await client.chat(MODEL, "x")
            assert not caught.value.maybe_billed
            assert client.ledger.balance().pending_pusd == 0

    @pytest.mark.parametrize(
        "status",
        ["302 Found", "307 Temporary Redirect", "407 Proxy Authentication Required"],
    )
    async def test_a_wrong_road_stops_the_run_and_follows_nobody(self, status: str) -> None:
        """The key goes to no other host, and a thousand rows do not try one after another."""
        chat = answers("<html>", status=status, headers=["Location: http://evil.invalid/"])
        async with facing(chat, max_in_flight=4) as (client, server):
            results = await asyncio.gather(
                *(client.complete(request(f"p{n}")) for n in range(40)), return_exceptions=True
            )
            assert all(isinstance(item, AccountError) for item in results)
            assert "base_url" in str(results[0])
            assert len(server.chats) <= 4
            assert client.ledger.balance().pending_pusd == 0


class TestTime:
    """Known faults 43 and 86, on a loop whose time leaps."""

    def run(self, chat: Any, *, limits: Timeouts | None = None, stream: bool = False) -> Any:
        async def main() -> tuple[Any, float, int]:
            settings = {"timeouts": limits or Timeouts(), "retry": ONE_TRY, "clock": LoopClock()}
            async with facing(chat, **settings) as (client, _):
                await client.verdicts(MODEL)
                began_s = asyncio.get_running_loop().time()
                done = await client.complete(request(is_streamed=stream))
                took_s = asyncio.get_running_loop().time() - began_s
                return done, took_s, client.ledger.balance().held_entries

        return leaping(main())

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_after_310_s(self, stream: bool) -> None:
        """No forgotten default of 300 s anywhere; keep-alives are life."""

        async def chat(wire: Wire, asked: Asked) -> None:
            if stream:
                await wire.start_stream()
            else:
                await wire.say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            for _ in range(31):
                await asyncio.sleep(10)
                await wire.say(": OPENROUTER PROCESSING\n\n" if stream else "  \n")
            if stream:
                await wire.say(chunk("Blue."), ends(usage=USAGE), DONE)
            else:
                await wire.say(json.dumps(completion()))
            await wire.hang_up()

        done, took_s, held = self.run(chat, stream=stream)
        assert isinstance(done, Answered)
        assert done.answer.content == "Blue."
        assert took_s >= 310
        assert held == 0

    def test_an_answer_whose_headers_come_with_it(self) -> None:
        """Ten minutes of silence before the first header are not an idle answer."""

        async def chat(wire: Wire, asked: Asked) -> None:
            await asyncio.sleep(600)
            await wire.answer(completion())

        done, took_s, _ = self.run(chat)
        assert isinstance(done, Answered)
        assert took_s >= 600

    def test_one_byte_a_minute_ends_at_the_total_limit(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.say("HTTP/1.1 200 OK\r\n\r\n{")
            while True:
                await asyncio.sleep(60)
                await wire.say(" ")

        done, took_s, held = self.run(chat)
        assert isinstance(done, GaveUp)
        assert "total_s" in done.problem
        assert 3_600 <= took_s < 3_700
        assert held == 1

    def test_blanks_for_ever_end_at_the_first_byte_limit(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.say("HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await asyncio.sleep(60)
                await wire.say(" ")

        done, took_s, held = self.run(chat)
        assert "first_byte_s" in done.problem
        assert 1_800 <= took_s < 1_900
        assert held == 1

    def test_silence_in_the_middle_ends_at_the_idle_limit(self) -> None:
        async def chat(wire: Wire, asked: Asked) -> None:
            await wire.say("HTTP/1.1 200 OK\r\nX-Generation-Id: gen-9\r\n\r\n{")
            await asyncio.sleep(10**6)

        done, took_s, held = self.run(chat)
        assert "idle_s" in done.problem
        assert 180 <= took_s < 200
        assert held == 1

    def test_a_name_server_that_never_answers_is_a_failed_connection(self) -> None:
        """The look-up counts as connecting: nothing was sent, so nothing is held."""

        async def main() -> None:
            settings = {"timeouts": Timeouts(), "retry": ONE_TRY, "clock": LoopClock()}
            async with facing(answers(completion()), **settings) as (client, _):
                await client.verdicts(MODEL)
                await client.note_baseline()
                session = client._sessions.get()
                await session.connector.close()  # the kept connection must not help
                session._connector = _DeafConnector(limit=0)
                began_s = asyncio.get_running_loop().time()
                done = await client.complete(request())
                assert isinstance(done, GaveUp)
                assert "no connection" in done.problem
                assert asyncio.get_running_loop().time() - began_s < 30
                assert client.ledger.balance().pending_pusd == 0

        leaping(main())

    @pytest.mark.parametrize("hint", [[], ["Retry-After: 7"]])
    def test_a_minute_of_429_burns_no_row(self, hint: list[str]) -> None:
        """64 rows, one endpoint, every attempt refused for 60 s: all are answered afterwards."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            opens_s = loop.time() + 60

            async def chat(wire: Wire, asked: Asked) -> None:
                if loop.time() < opens_s:
                    error = {"code": 429, "message": "slow", "metadata": {"provider_name": "HostA"}}
                    await wire.answer({"error": error}, status="429 Too Many", headers=hint)
                else:
                    await wire.answer(completion())

            settings = {
                "timeouts": Timeouts(),
                "retry": RetryPolicy(),
                "limits": LimitSettings(),
                "clock": LoopClock(),
                "cap_usd": "100",
            }
            async with facing(chat, **settings) as (client, server):
                done = await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(64)))
                assert all(isinstance(item, Answered) for item in done)
                assert loop.time() < opens_s + 90
                # Pauses double and bursts shrink: some three refusals a row, not one a second.
                assert len(server.chats) < 64 + 64 * 4
                assert client.ledger.balance().pending_pusd == 0

        leaping(main())

    def test_an_endpoints_retry_after_does_not_hold_up_the_row(self) -> None:
        """503 with an hour's Retry-After: the endpoint rests, the row goes to the next one."""

        async def main() -> None:
            loop = asyncio.get_running_loop()

            async def chat(wire: Wire, asked: Asked) -> None:
                if asked.json["provider"]["only"] == ["hosta/int4"]:
                    error = {"code": 503, "message": "x", "metadata": {"provider_name": "HostA"}}
                    headers = ["Retry-After: 3600"]
                    await wire.answer({"error": error}, status="503 No", headers=headers)
                else:
                    await wire.answer(completion(provider="HostB"))

            dearer = {"prompt": "0.0000006", "completion": "0.000003"}
            two = [entry(), entry("hostb/int4", provider_name="HostB", pricing=dearer)]
            settings = {"clock": LoopClock(), "endpoints": two, "max_in_flight": 1}
            async with facing(chat, **settings) as (client, server):
                began_s = loop.time()
                for n in range(20):
                    done = await client.complete(request(f"p{n}"))
                    assert isinstance(done, Answered)
                assert loop.time() - began_s < 60
                asked = [item.json["provider"]["only"] for item in server.chats]
                assert asked.count(["hosta/int4"]) == 1

        leaping(main())


class _DeafConnector(aiohttp.TCPConnector):
    """Never resolves a name."""

    async def _resolve_host(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(10**6)


class TestMessages:
    @pytest.mark.parametrize(
        "message",
        [
            "hi",
            {"role": "user", "content": "x", "extra": {1, 2}},
            {"role": "user", "content": "x", "extra": float("nan")},
            {"role": "user", "content": "x", "extra": "\ud800"},
        ],
    )
    async def test_what_cannot_be_sent_is_refused_before_money_is_set_aside(
        self, message: Any
    ) -> None:
        async with facing(answers(completion())) as (client, server):
            with pytest.raises(ConfigurationError, match="message 0"):
                await client.chat(MODEL, [message])
            assert client.ledger.balance().open_entries == 0
            assert server.chats == []

    async def test_replayed_reasoning_counts_in_the_bound(self) -> None:
        """A million tokens of earlier thoughts are read by the model, so they are reserved for."""
        bounds = []

        async def chat(wire: Wire, asked: Asked) -> None:
            await asyncio.sleep(0)
            bounds.append(client.ledger.balance().pending_pusd)
            await wire.answer(completion())

        async with facing(chat, endpoints=[entry(context_length=None)]) as (client, _):
            for thoughts in ("", "t" * 1_000_000):
                earlier = {"role": "assistant", "content": "a", "reasoning": thoughts}
                again = {"role": "user", "content": "x"}
                await client.chat(MODEL, [again, earlier, again])
        # $0.45 per million input tokens, and at most one token per byte.
        assert bounds[1] - bounds[0] >= 450_000_000_000
