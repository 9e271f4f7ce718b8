"""The real `openai` package through the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from client_support import MODEL, opened
from quantroute.proxy import Proxy
from quantroute.simulator import DEFAULT_API_KEY

openai = pytest.importorskip("openai", reason="the openai package is not installed")

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
async def sdk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The SDK's client on a proxy with a cap of two cents."""
    monkeypatch.setenv("OPENROUTER_API_KEY", DEFAULT_API_KEY)
    async with opened(cap_usd="0.02") as (client, simulator), Proxy(client, port=0) as proxy:
        async with openai.AsyncOpenAI(base_url=proxy.base_url, api_key="unused") as found:
            yield found
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd


async def test_a_completion(sdk: Any) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=300)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    assert answer.quantroute["precision"] == "int4"


async def test_a_stream(sdk: Any) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_completion_tokens=300,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert chunks[-1].usage.completion_tokens > 0


async def test_headers_through_the_raw_response(sdk: Any) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=300
    )
    assert float(raw.headers["x-quantroute-cost-usd"]) > 0
    assert raw.headers["x-quantroute-precision"] == "int4"


async def test_the_list_of_models(sdk: Any) -> None:
    assert MODEL in {model.id async for model in await sdk.models.list()}


async def test_a_wrong_request_is_a_bad_request(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        await sdk.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


async def test_the_cap_ends_it_without_retries(sdk: Any) -> None:
    async def ask() -> str:
        try:
            await sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=300)
        except openai.APIStatusError as error:
            return str(error.body["code"])
        return "answered"

    outcomes = await asyncio.gather(*(ask() for _ in range(150)))
    assert set(outcomes) == {"answered", "budget_exceeded"}
