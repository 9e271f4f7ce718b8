"""A service that obeys nobody: raw bytes on a loopback socket, and a loop whose time leaps.

The simulator speaks HTTP as aiohttp speaks it. What a broken proxy, an old server or an attacker
puts on the wire has to be written byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from client_support import fast
from quantroute import Client, Service
from quantroute.client import ChatRequest, RetryPolicy
from quantroute.storage import SqliteStore
from registry_support import MODEL, entry, listing

T = TypeVar("T")

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, "cost": 0.0000135}
COST_PUSD = 13_500_000
DONE = b"data: [DONE]\n\n"
ONE_TRY = RetryPolicy(max_attempts=1, max_paid_attempts=1)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Wire:
    """The way back to the client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *parts: bytes | str) -> None:
        for part in parts:
            self.writer.write(part if isinstance(part, bytes) else part.encode())
        await self.writer.drain()

    async def answer(
        self, body: object, *, status: str = "200 OK", headers: Iterable[str] = ()
    ) -> None:
        """A whole, well-formed HTTP/1.1 answer; text is sent as it is, anything else as JSON."""
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        lines = list(headers)
        if not any(line.lower().startswith("content-type") for line in lines):
            lines.append("Content-Type: application/json")
        head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *lines])
        await self.say(head, "\r\n\r\n", raw)

    async def start_stream(self, *, headers: Iterable[str] = ()) -> None:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Connection: close"]
        await self.say("\r\n".join([*lines, *headers]), "\r\n\r\n")

    async def hang_up(self) -> None:
        self.writer.close()


Chat = Callable[[Wire, Asked], Awaitable[None]]


@dataclass
class Hostile:
    """A catalogue of well-behaved entries in front of a chat path that does as `chat` says."""

    chat: Chat
    endpoints: list[dict[str, Any]] = field(default_factory=lambda: [entry()])
    keeps_alive: bool = True
    #: Bodies of `/key` and `/generation`; 404 while they are None.
    key_data: object = None
    generation_data: object = None
    is_silent_on_accounts: bool = False
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    url: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def chats(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    async def __aenter__(self) -> Hostile:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (asked := await read_request(reader)) is not None:
                self.asked.append(asked)
                await self._answer(Wire(reader, writer), asked)
                if not self.keeps_alive or writer.is_closing():
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, wire: Wire, asked: Asked) -> None:
        path = asked.target.partition("?")[0]
        if asked.method == "POST":
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            try:
                await self.chat(wire, asked)
            finally:
                self.in_flight -= 1
        elif path.endswith("/endpoints"):
            await wire.answer(listing(*self.endpoints))
        elif path.endswith("/providers"):
            names = {item["tag"].split("/")[0]: item["provider_name"] for item in self.endpoints}
            await wire.answer({"data": [{"slug": s, "name": n} for s, n in names.items()]})
        elif self.is_silent_on_accounts:
            await asyncio.sleep(10**6)
        else:
            data = self.key_data if path.endswith("/key") else self.generation_data
            await wire.answer({"data": data}, status="404 Not Found" if data is None else "200 OK")


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    """The next request of a connection; None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method=method, target=target, headers=headers, body=body)


def completion(text: str = "Blue.", **changes: Any) -> dict[str, Any]:
    """A whole answer from HostA; `changes` replace top-level fields, `...` removes one."""
    body: dict[str, Any] = {
        "id": "gen-1-aaaaaaaaaaaaaaaaaaaa",
        "model": f"{MODEL}-0127",
        "provider": "HostA",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        ],
        "usage": USAGE,
    } | changes
    return {name: value for name, value in body.items() if value is not ...}


def chunk(text: str = "", **changes: Any) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": {"content": text}} | changes.pop("choice", {})
    body = {"id": "gen-1-a", "model": f"{MODEL}-0127", "provider": "HostA", "choices": [choice]}
    return b"data: " + json.dumps(body | changes).encode() + b"\n\n"


def request(text: str = "Hi", **changes: Any) -> ChatRequest:
    settings = {"model": MODEL, "max_output_tokens": 400, "request_id": text} | changes
    return ChatRequest(messages=({"role": "user", "content": text},), **settings)


def answers(*bodies: object, **how: Any) -> Chat:
    """A chat path that gives these bodies in turn, and the last one for ever."""
    left = list(bodies)

    async def chat(wire: Wire, asked: Asked) -> None:
        await wire.answer(left.pop(0) if len(left) > 1 else left[0], **how)

    return chat


@asynccontextmanager
async def facing(chat: Chat, **settings: Any) -> AsyncIterator[tuple[Client, Hostile]]:
    """An open client in front of a hostile service, whose own settings are taken out."""
    of_server = {
        name: settings.pop(name)
        for name in (
            "endpoints",
            "keeps_alive",
            "key_data",
            "generation_data",
            "is_silent_on_accounts",
        )
        if name in settings
    }
    async with Hostile(chat, **of_server) as server:
        settings.setdefault("service", Service(base_url=server.url))
        async with Client(**fast(**settings)) as client:
            yield client, server


# -- a loop whose time leaps ----------------------------------------------------------------------


class _LeapingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Leaps over a wait, if no other thread is at work and no bytes come within milliseconds.

    What one end of a loopback connection sends is there for the other end at once.
    """

    patience_s = 0.005
    leapt_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[asyncio.Future[Any]] = set()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= self.patience_s or self.elsewhere:
            return super().select(timeout)
        events = super().select(self.patience_s)
        if not events:
            self.leapt_s += timeout - self.patience_s
        return events


class LeapingLoop(asyncio.SelectorEventLoop):
    """Real sockets, real threads, but nobody sits through a timer."""

    def __init__(self) -> None:
        self.leaping = _LeapingSelector()
        super().__init__(self.leaping)

    def time(self) -> float:
        return super().time() + self.leaping.leapt_s

    def waits_for(self, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """No leap before another thread has brought this about, however busy the machine is."""
        self.leaping.elsewhere.add(future)
        future.add_done_callback(self.leaping.elsewhere.discard)
        return future

    def run_in_executor(self, executor: Any, work: Callable[..., T], *args: Any) -> Any:
        return self.waits_for(super().run_in_executor(executor, work, *args))


class LoopClock:
    """The running loop's time, for a client on a leaping loop; read from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        return self._loop.time()

    def time_s(self) -> float:
        return 1_790_000_000.0 + self.now_s()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def leaping(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop on which an hour of waiting takes milliseconds."""
    submit = SqliteStore.submit_nowait

    def watched(store: SqliteStore, work: Any) -> asyncio.Future[Any]:
        loop, future = asyncio.get_running_loop(), submit(store, work)
        return loop.waits_for(future) if isinstance(loop, LeapingLoop) else future

    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=LeapingLoop) as runner,
    ):
        patch.setattr(SqliteStore, "submit_nowait", watched)
        return runner.run(main)
