"""A plain OpenAI-compatible chat server over real HTTP, as vLLM and its like behave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class LocalServer:
    """Answers like a model that thinks first; `bodies` and `headers` are what it was sent.

    Args:
        reasoning_name: the field its reasoning comes in.
        has_usage: whether it counts tokens.
        status: an error instead of an answer.
        cuts: close the connection instead of answering.
        answer_s: how long an answer takes.
    """

    model: str = "kimi-local"
    reasoning_name: str = "reasoning_content"
    has_usage: bool = True
    status: int = 200
    cuts: bool = False
    finish_reason: str = "stop"
    answer_s: float = 0.0
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            for _ in range(20):
                await asyncio.sleep(self.answer_s / 20)
            return await self._chat(request)
        finally:
            self.in_flight -= 1

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.cuts:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.status != 200:
            return web.json_response(
                {"object": "error", "message": "no", "code": self.status}, status=self.status
            )
        if body.get("stream"):
            return await self._stream(request, body)
        message = {"role": "assistant", "content": "An answer.", self.reasoning_name: "Thought."}
        reply: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": self.model,
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}],
        }
        if self.has_usage:
            reply["usage"] = self.usage
        return web.json_response(reply)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {self.reasoning_name: "Thought."},
            {"content": "An answer."},
        ]
        for delta in deltas:
            await self._event(response, {"choices": [{"index": 0, "delta": delta}]})
        last = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        await self._event(response, {"choices": [last]})
        if self.has_usage and (body.get("stream_options") or {}).get("include_usage"):
            await self._event(response, {"choices": [], "usage": self.usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, fields: dict[str, Any]) -> None:
        chunk = {"id": "chatcmpl-1", "model": self.model, **fields}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@contextmanager
def running_beside(server: LocalServer) -> Iterator[LocalServer]:
    """The server in a thread of its own, for commands that run in the main one."""
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(server):
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    with ThreadPoolExecutor(1) as beside:
        served = beside.submit(asyncio.run, serve())
        served.add_done_callback(lambda _: is_up.set())
        try:
            is_up.wait()
            yield server
        finally:
            is_over.set()
            served.result()


@asynccontextmanager
async def running(server: LocalServer) -> AsyncIterator[LocalServer]:
    """The server on a loopback port of its own."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server.base_url = f"http://127.0.0.1:{port}/v1"
        yield server
    finally:
        await runner.cleanup()
