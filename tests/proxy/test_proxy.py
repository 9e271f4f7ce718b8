"""The local proxy, spoken to over HTTP as a foreign client would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from client_support import MODEL, opened, until
from quantroute import Client
from quantroute.errors import ConfigurationError
from quantroute.ledger import Account
from quantroute.proxy import Proxy
from quantroute.simulator import (
    DEFAULT_API_KEY,
    Scenario,
    Simulator,
    kimi_mission_scenario,
)

KEY_VARIABLE = "OPENROUTER_API_KEY"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, DEFAULT_API_KEY)


class Caller:
    """A caller's session on the proxy."""

    def __init__(self, http: aiohttp.ClientSession, proxy: Proxy) -> None:
        self.http, self.proxy = http, proxy

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
        """Status and JSON body of a chat request."""
        url = f"{self.proxy.base_url}/chat/completions"
        body = QUESTION | {"max_tokens": 400} | fields
        async with self.http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON body of a GET."""
        root = self.proxy.base_url.removesuffix("/v1")
        async with self.http.get(root + path, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def proxied(
    scenario: Scenario | None = None, *, token_variable: str | None = None, **settings: Any
) -> AsyncIterator[tuple[Caller, Client, Simulator]]:
    async with (
        opened(scenario, **settings) as (client, simulator),
        Proxy(client, port=0, token_variable=token_variable, account=Account("proxy")) as proxy,
        aiohttp.ClientSession() as http,
    ):
        yield Caller(http, proxy), client, simulator


async def test_an_answer_has_the_usual_form_and_says_where_it_came_from() -> None:
    async with proxied() as (caller, _, simulator):
        status, body = await caller.ask()
    assert status == 200
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert body["object"] == "chat.completion"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert body["quantroute"]["precision"] == "int4"
    assert body["quantroute"]["cost_usd"] is not None
    assert len(simulator.bill.records) == 1


async def test_the_ledger_pays_from_the_account_the_caller_names() -> None:
    async with proxied() as (caller, client, _):
        await caller.ask(headers={"x-quantroute-account": "team-a"})
        await caller.ask()
        named = client.ledger.balance(Account("proxy/team-a"))
        assert named.posted_entries == 1
        assert client.ledger.balance(Account("proxy")).posted_entries == 2


async def test_a_stream_brings_the_whole_answer_then_usage_then_the_end() -> None:
    async with proxied() as (caller, _, _):
        url = f"{caller.proxy.base_url}/chat/completions"
        fields = QUESTION | {"stream": True, "stream_options": {"include_usage": True}}
        async with caller.http.post(url, json=fields) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1] if not event.startswith(":")]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(
        choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"n": 2}, "n:"),
        ({"temprature": 1.0}, "temprature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": []}, "at least one message"),
        ({"temperature": 7}, "temperature must be in"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_would_not_be_done_is_refused(fields: dict[str, Any], problem: str) -> None:
    async with proxied() as (caller, _, simulator):
        status, body = await caller.ask(**fields)
        assert not simulator.bill.records
    assert status == 400
    assert problem in body["error"]["message"]


async def test_fields_without_an_effect_are_taken() -> None:
    async with proxied() as (caller, _, _):
        status, _ = await caller.ask(user="me", metadata={"a": "b"}, store=False, n=1)
    assert status == 200


async def test_text_in_parts_and_the_developer_role_are_understood() -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    async with proxied() as (caller, _, _):
        status, _ = await caller.ask(messages=messages)
    assert status == 200


async def test_a_request_over_the_cap_is_refused_with_402() -> None:
    async with proxied(cap_usd="0.000001") as (caller, _, simulator):
        status, body = await caller.ask()
        assert not simulator.bill.records
    assert status == 402
    assert body["error"]["code"] == "budget_exceeded"


async def test_a_policy_without_endpoints_says_so() -> None:
    async with proxied(only=["Fireworks"]) as (caller, _, _):
        status, body = await caller.ask()
    assert status == 404
    assert body["error"]["code"] == "no_eligible_endpoint"


async def test_the_cap_holds_for_many_callers_at_once() -> None:
    async with proxied(cap_usd="0.02") as (caller, client, simulator):
        answers = await asyncio.gather(*(caller.ask() for _ in range(200)))
        posted = client.ledger.balance().posted_pusd
        assert posted == simulator.bill.total_pusd
    assert posted <= 20_000_000_000
    assert {status for status, _ in answers} == {200, 402}


async def test_another_host_name_is_refused() -> None:
    async with proxied() as (caller, _, simulator):
        status, body = await caller.ask(headers={"Host": "evil.example"})
        assert not simulator.bill.records
    assert status == 403
    assert "evil.example" in body["error"]["message"]


async def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_TOKEN", "open sesame")
    async with proxied(token_variable="PROXY_TOKEN") as (caller, _, _):
        refused, _ = await caller.ask(headers={"Authorization": "Bearer wrong"})
        admitted, _ = await caller.ask(headers={"Authorization": "Bearer open sesame"})
    assert (refused, admitted) == (403, 200)


async def test_listening_to_others_needs_a_token() -> None:
    async with opened() as (client, _):
        with pytest.raises(ConfigurationError, match="lets others spend your money"):
            Proxy(client, host="0.0.0.0")


async def test_a_caller_who_leaves_is_paid_for_and_settled() -> None:
    slow = kimi_mission_scenario(time_scale=0.1)  # an answer takes half a second
    async with proxied(slow) as (caller, client, simulator):
        asking = asyncio.create_task(caller.ask())
        await until(lambda: client.ledger.balance().open_entries == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: client.ledger.balance().open_entries == 0)
        balance = client.ledger.balance()
        assert balance.posted_entries == 1
        assert balance.posted_pusd == simulator.bill.total_pusd


async def test_models_health_and_status() -> None:
    async with proxied() as (caller, _, _):
        await caller.ask()
        _, models = await caller.get("/v1/models")
        _, model = await caller.get(f"/v1/models/{MODEL}")
        _, health = await caller.get("/health")
        _, status = await caller.get("/quantroute/status")
    assert MODEL in {item["id"] for item in models["data"]}
    assert any(not verdict["is_eligible"] for verdict in model["quantroute"])
    assert health == {"status": "ok"}
    assert status["endpoints"][0]["answered"] == 1
    assert status["posted_usd"] != "0"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://localhost:3000", 200),
    ],
)
async def test_a_page_from_elsewhere_cannot_spend(origin: str, status: int) -> None:
    """A browser sends a plain POST for any page, under our own name and without asking."""
    async with proxied() as (caller, client, _):
        found, body = await caller.ask(headers={"Origin": origin, "Content-Type": "text/plain"})
        assert found == status
        assert status == 200 or body["error"]["code"] == "not_allowed"
        assert bool(client.ledger.balance().posted_entries) is (status == 200)


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"[" * 100_000, 400, "invalid_request_error"),
        (b"[1]", 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b'{"model": "a/\\ud800", "messages": []}', 404, "model_not_found"),
        (b'{"model": "gpt", "messages": []}', 404, "model_not_found"),
        (b'{"model": "no/such", "messages": []}', 404, "model_not_found"),
    ],
    ids=["deep", "list", "torn", "surrogate", "no id", "unknown"],
)
async def test_odd_bodies_have_an_error_of_the_usual_form(
    raw: bytes, status: int, code: str
) -> None:
    raw = raw.replace(b"[]", b'[{"role": "user", "content": "x"}]')
    async with (
        proxied() as (caller, _, _),
        caller.http.post(f"{caller.proxy.base_url}/chat/completions", data=raw) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_a_body_beyond_the_limit_is_told_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantroute.proxy._server._MAX_BODY_BYTES", 1 << 10)
    async with proxied() as (caller, _, _):
        status, body = await caller.ask(user="x" * 2_000)
    assert (status, body["error"]["code"]) == (413, "request_refused")


async def test_null_asks_for_nothing() -> None:
    async with proxied() as (caller, _, _):
        status, _ = await caller.ask(tools=None, response_format=None, functions=None)
    assert status == 200


async def test_odd_bytes_are_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_TOKEN", "let-me-in")
    async with proxied(token_variable="PROXY_TOKEN") as (caller, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", caller.proxy.port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n"
            b"Connection: close\r\n\r\n"
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 403")
        writer.close()


async def test_the_ledger_carries_the_id_that_the_caller_sees() -> None:
    async with proxied() as (caller, client, _):
        _, body = await caller.ask()
        named = client.ledger.store.read(
            lambda c: c.execute("SELECT request_id FROM journal WHERE kind = 'reserved'").fetchall()
        )
    assert named == [(body["id"],)]
