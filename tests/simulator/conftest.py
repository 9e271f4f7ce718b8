"""A simulated service and a plain aiohttp client for it; nothing of quantroute's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from quantroute.simulator import (
    AnswerSpec,
    EndpointSpec,
    ModelSpec,
    ProviderSpec,
    Scenario,
    Simulator,
)

MODEL = "moonshotai/kimi-k2.5"


@dataclass(frozen=True, slots=True)
class Got:
    """One HTTP answer, read to its end."""

    status: int
    headers: Any
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The data events of a stream; the sentinel stays text."""
        lines = [line[6:] for line in self.raw.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Service:
    """A running simulator and a session that holds its key."""

    def __init__(self, simulator: Simulator, session: aiohttp.ClientSession) -> None:
        self.simulator = simulator
        self.session = session
        self.bill = simulator.bill
        self.stats = simulator.stats

    async def get(self, path: str, **query: str) -> Got:
        root = self.simulator.root_url if path.startswith("/__sim") else self.simulator.base_url
        async with self.session.get(root + path, params=query) as response:
            return Got(response.status, response.headers, await response.read())

    async def post(self, path: str, body: Any) -> Got:
        root = self.simulator.root_url if path.startswith("/__sim") else self.simulator.base_url
        async with self.session.post(root + path, json=body) as response:
            return Got(response.status, response.headers, await response.read())

    def body(self, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
        fields.setdefault("model", MODEL)
        fields.setdefault("max_tokens", 400)
        return {"messages": [{"role": "user", "content": prompt}], **fields}

    async def chat(self, prompt: str = "hello", **fields: Any) -> Got:
        return await self.post("/chat/completions", self.body(prompt, **fields))

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Go round the loop until something holds that no event announces; two seconds at most."""
        async with asyncio.timeout(2):
            while not is_so():  # noqa: ASYNC110 - the counters have no event to wait on
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self.wait_for(lambda: not self.stats.in_flight)

    async def names(self, count: int = 1, **provider: Any) -> list[str]:
        """The providers that answer under some preferences, one request after the other."""
        found = []
        for number in range(count):
            got = await self.chat(f"prompt {number}", provider=provider)
            found.append(got.json["provider"] if got.status == 200 else str(got.status))
        return found


Open = Callable[..., Awaitable[Service]]


@pytest.fixture
async def open_service() -> AsyncIterator[Open]:
    """Opens services; they are closed with the test."""
    async with AsyncExitStack() as stack:

        async def open_one(scenario: Scenario | None = None, **settings: Any) -> Service:
            simulator = await stack.enter_async_context(Simulator(scenario, **settings))
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {simulator.api_key}"},
                    connector=aiohttp.TCPConnector(limit=0),
                )
            )
            return Service(simulator, session)

        yield open_one


@pytest.fixture
async def service(open_service: Open) -> Service:
    """The shipped case, all oddities off."""
    return await open_service()


@pytest.fixture
def small() -> Callable[..., Scenario]:
    """A scenario of one model with given endpoints; short answers."""

    def build(*endpoints: EndpointSpec, **settings: Any) -> Scenario:
        slugs = dict.fromkeys(endpoint.slug for endpoint in endpoints)
        settings.setdefault("answers", AnswerSpec(mean_tokens=40))
        return Scenario(
            models=(
                ModelSpec(
                    id=MODEL,
                    canonical_slug=f"{MODEL}-0127",
                    reasoning={"mandatory": False, "default_enabled": True},
                    endpoints=endpoints,
                ),
            ),
            providers=tuple(ProviderSpec(slug=slug, name=slug.title()) for slug in slugs),
            **settings,
        )

    return build


@pytest.fixture
def endpoint() -> Callable[..., EndpointSpec]:
    """An endpoint; prices in USD per million tokens, for legibility."""

    def build(
        tag: str, prompt: str = "0.5", completion: str = "2.5", **fields: Any
    ) -> EndpointSpec:
        extra = fields.pop("pricing", {})
        return EndpointSpec(
            tag=tag,
            pricing={"prompt": f"{prompt}e-6", "completion": f"{completion}e-6"} | extra,
            **fields,
        )

    return build
