"""A small catalogue service on loopback, and bodies in the shape that the real one answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from quantroute._http import Service

MODEL = "moonshotai/kimi-k2.5"
DATA = Path(__file__).resolve().parents[1] / "../shared/data/openrouter"

Answer = Callable[[web.Request], web.StreamResponse]


def entry(tag: str = "hosta/int4", **changes: Any) -> dict[str, Any]:
    """One endpoint as published; `changes` replace fields, `...` removes one."""
    fields = {
        "name": f"HostA | {MODEL}-0127",
        "model_id": MODEL,
        "model_name": "MoonshotAI: Kimi K2.5",
        "context_length": 262144,
        "pricing": {"prompt": "0.00000045", "completion": "0.00000225", "discount": 0},
        "provider_name": "HostA",
        "tag": tag,
        "quantization": "int4",
        "max_completion_tokens": 65536,
        "max_prompt_tokens": None,
        "supported_parameters": ["max_tokens", "temperature", "seed"],
        "status": 0,
        "uptime_last_30m": 99.5,
        "uptime_last_5m": None,
        "uptime_last_1d": 98,
        "latency_last_30m": None,
    } | changes
    return {name: value for name, value in fields.items() if value is not ...}


def listing(*entries: Any, model: str = MODEL) -> dict[str, Any]:
    """An endpoint list's body."""
    return {"data": {"id": model, "name": "MoonshotAI: Kimi K2.5", "endpoints": list(entries)}}


def model_row(model: str = MODEL, **changes: Any) -> dict[str, Any]:
    """One entry of the model list."""
    return {
        "id": model,
        "canonical_slug": f"{model}-0127",
        "name": "MoonshotAI: Kimi K2.5",
        "created": 1769487076,
        "context_length": 262144,
        "architecture": {
            "input_modalities": ["text", "image"],
            "output_modalities": ["text"],
            "tokenizer": "Other",
        },
        "pricing": {"prompt": "0.00000045", "completion": "0.00000225"},
        "supported_parameters": ["max_tokens", "temperature", "seed"],
    } | changes


def json_answer(body: Any, *, status: int = 200, **headers: str) -> Answer:
    """Always the same JSON."""
    return lambda request: web.json_response(body, status=status, headers=headers)


def text_answer(text: str, *, status: int = 200, content_type: str = "text/html") -> Answer:
    """Always the same text."""
    return lambda request: web.Response(text=text, status=status, content_type=content_type)


def error_answer(code: int, message: str = "no", *, status: int | None = None) -> Answer:
    """The service's error object."""
    body = {"error": {"code": code, "message": message}}
    return json_answer(body, status=status or code)


@dataclass
class FakeCatalogue:
    """Answers by path; a list of answers is worked off, its last one repeats."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[web.Request] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None
    port: int = 0

    def say(self, path: str, *answers: Answer) -> None:
        self.answers[f"/api/v1{path}"] = list(answers)

    def say_endpoints(self, *answers: Answer, model: str = MODEL) -> None:
        self.say(f"/models/{model}/endpoints", *answers)

    @property
    def service(self) -> Service:
        return Service(base_url=f"http://127.0.0.1:{self.port}/api/v1")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.arrived.set()
        if self.gate is not None:
            await self.gate.wait()
        queue = self.answers.get(request.path)
        if not queue:
            return error_answer(404, "not found")(request)
        return (queue.pop(0) if len(queue) > 1 else queue[0])(request)


@asynccontextmanager
async def running() -> AsyncIterator[FakeCatalogue]:
    """A catalogue on a free port."""
    fake = FakeCatalogue()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port is not None
        fake.port = server.port
        yield fake


def dump(path: Path, content: Any) -> Path:
    """Write JSON to `path`."""
    path.write_text(json.dumps(content))
    return path


def names(folder: Path) -> list[str]:
    """What lies in `folder`."""
    return sorted(path.name for path in folder.iterdir())
