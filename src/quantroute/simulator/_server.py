"""The HTTP face: paths, keys, bodies and connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.web_request import BaseRequest

from quantroute.errors import ConfigurationError
from quantroute.simulator._answers import Served
from quantroute.simulator._attempts import finish, refuse_at_edge, serve_chat
from quantroute.simulator._generations import generation_body
from quantroute.simulator._listing import select_models
from quantroute.simulator._refusal import Refusal, unauthorized
from quantroute.simulator._reply import (
    COMMENT,
    PADDING,
    Chunk,
    ending,
    stream_chunks,
    whole_body,
)
from quantroute.simulator._request import parse_chat
from quantroute.simulator._routing import can_cancel
from quantroute.simulator._scenario import parse_change
from quantroute.simulator._state import ServiceState

__all__ = ["Front"]

API: Final = "/api/v1"
_JSON: Final = "application/json"
_KEEP_ALIVE_S: Final = 0.05
_MISSING_BYTES: Final = 64


class Front:
    """Answers HTTP requests out of a `ServiceState`."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state

    async def __call__(self, http: BaseRequest) -> web.StreamResponse:
        """The handler for aiohttp's low-level server."""
        path = http.path
        try:
            if path == f"{API}/chat/completions":
                return await self._chat(http)
            if http.method == "GET" and path.startswith(API):
                self.state.run_due_events(arriving=0)
                return self._get(http, path.removeprefix(API))
            if path.startswith("/__sim/"):
                return await self._control(http, path.removeprefix("/__sim/"))
            raise Refusal(404, "Not Found")
        except Refusal as refusal:
            return self._refused(refusal, http)

    # -- catalogue, key, generation --------------------------------------------------------------

    def _get(self, http: BaseRequest, path: str) -> web.Response:
        catalogue = self.state.catalogue
        if path == "/models":
            rows = select_models(catalogue, http.query)
            return _raw(catalogue.models_body() if rows is None else _encoded(rows))
        if path == "/models/count":
            return _json({"data": {"count": len(catalogue.listed())}})
        if path == "/providers":
            return _raw(catalogue.providers_body())
        if path == "/key":
            self._authorize(http)
            label = f"{self.state.api_key[:12]}...{self.state.api_key[-3:]}"
            return _json({"data": self.state.account.key_json(label)})
        if path == "/credits":
            return self._credits(http)
        if path == "/generation":
            self._authorize(http)
            return _json(generation_body(self.state, http.query.get("id", "")))
        if path.startswith("/models/") and path.endswith("/endpoints"):
            name = path.removeprefix("/models/").removesuffix("/endpoints")
            return _raw(catalogue.endpoints_body(self._model(name)))
        if path.startswith("/model/"):
            name = path.removeprefix("/model/")
            return _json({"data": self._model(name).wire})
        raise Refusal(404, "Not Found")

    def _model(self, name: str) -> Any:
        model = self.state.catalogue.find(name)
        if model is None:
            raise Refusal(404, f"Model {name} not found")
        return model

    def _credits(self, http: BaseRequest) -> web.Response:
        if self._key_of(http) != self.state.management_key:
            self._authorize(http)
            raise Refusal(403, "Only management keys can fetch credits for an account")
        account = self.state.account
        total = 0.0 if account.credits_usd is None else float(account.credits_usd)
        return _json({"data": {"total_credits": total, "total_usage": float(account.usage_usd)}})

    def _key_of(self, http: BaseRequest) -> str:
        return http.headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def _authorize(self, http: BaseRequest) -> None:
        key = self._key_of(http)
        if key != self.state.api_key:
            raise unauthorized("User not found." if key else "No auth credentials found")

    # -- control ---------------------------------------------------------------------------------

    async def _control(self, http: BaseRequest, what: str) -> web.Response:
        state = self.state
        if what == "bill" and http.method == "GET":
            return _json(state.bill.as_json(with_records=http.query.get("records") != "0"))
        if what == "stats" and http.method == "GET":
            return _json(state.stats.as_json())
        if what == "set" and http.method == "POST":
            try:
                state.apply(parse_change(await _read(http)))
            except ConfigurationError as error:
                raise Refusal(422, str(error)) from error
            return _json({"ok": True})
        raise Refusal(404, "Not Found")

    # -- chat ------------------------------------------------------------------------------------

    async def _chat(self, http: BaseRequest) -> web.StreamResponse:
        if http.method != "POST":
            raise Refusal(405, "Method Not Allowed")
        stats = self.state.stats
        stats.enter()
        try:
            response = await self._chat_or_refuse(http)
        finally:
            stats.in_flight -= 1
        stats.by_status[response.status] += 1
        return response

    async def _chat_or_refuse(self, http: BaseRequest) -> web.StreamResponse:
        state = self.state
        state.run_due_events(arriving=1)
        try:
            self._authorize(http)
            request = parse_chat(await _read(http))
            sample, rng = state.next_sample(request.prompt_id)
            refuse_at_edge(state, rng)
            served = await serve_chat(state, request, rng, sample)
        except Refusal as refusal:
            return self._refused(refusal, http)
        try:
            if request.is_streamed:
                return await Stream(state, http, served).run()
            return await self._whole(http, served)
        finally:
            finish(state, served.admitted_slug, served.held_usd)

    def _refused(self, refusal: Refusal, http: BaseRequest) -> web.Response:
        """The refusal as a response; the key is echoed where the scenario says so."""
        body = refusal.encoded()
        echo = http.headers.get("Authorization", "")
        if echo and "key_echo_in_errors" in self._error_extras():
            refusal.message += f" (Authorization: {echo})"
            refusal.metadata["raw"] = f"headers: {{'authorization': '{echo}'}}"
            body = refusal.encoded()
        kind = "text/html" if refusal.html is not None else _JSON
        return web.Response(
            status=refusal.code, body=body, content_type=kind, headers=refusal.headers
        )

    def _error_extras(self) -> frozenset[str]:
        tables = self.state.edge_tables
        if not tables.extras:
            return frozenset()
        return tables.draw_extras(self.state.rng("error", self.state.stats.requests))

    async def _whole(self, http: BaseRequest, served: Served) -> web.StreamResponse:
        """An answer that is not streamed; the provider finishes it whoever still listens."""
        state, reply = self.state, served.reply
        wait_s = served.first_token_s + served.generation_s
        breaks = ending(reply) != "close" or reply.shape == "truncated_stream"
        if "padding" in reply.extras and wait_s and not breaks:
            return await self._padded(http, served, wait_s)
        if wait_s:
            await state.clock.sleep(wait_s)
        state.enter(served.record(state))
        if _is_gone(http):
            state.stats.disconnects += 1
        body = _encoded(whole_body(reply))
        if "padding" in reply.extras:
            body = PADDING * 3 + body
        if breaks:
            return await self._broken(http, served, body)
        return _raw(body, {"X-Generation-Id": reply.generation_id})

    async def _padded(self, http: BaseRequest, served: Served, wait_s: float) -> web.StreamResponse:
        """Status 200 at once, blanks while the model works, then the body."""
        state = self.state
        response = web.StreamResponse(
            headers={"Content-Type": _JSON, "X-Generation-Id": served.reply.generation_id}
        )
        rounds = max(1, min(40, round(wait_s / _KEEP_ALIVE_S)))
        is_heard = await _prepare(response, http)
        for _ in range(rounds):
            is_heard = is_heard and await _write(response, PADDING)
            await state.clock.sleep(wait_s / rounds)
        state.enter(served.record(state))
        if not (is_heard and await _write(response, _encoded(whole_body(served.reply)))):
            state.stats.disconnects += 1
        return response

    async def _broken(self, http: BaseRequest, served: Served, body: bytes) -> web.StreamResponse:
        """The connection dies or falls silent; the answer was made and billed all the same."""
        reply = served.reply
        headers = {"Content-Type": _JSON, "X-Generation-Id": reply.generation_id}
        response = web.StreamResponse(headers=headers)
        if reply.shape == "hang":
            await _silence(self.state, http, served.tables.hang_s)
        elif reply.shape != "reset":
            if reply.shape == "cut_chunked":
                response.enable_chunked_encoding()
            else:
                response.content_length = len(body) + _MISSING_BYTES
            await _prepare(response, http)
            await _write(response, body[: len(body) // 2])
            if reply.shape == "stall":
                await _silence(self.state, http, served.tables.hang_s)
        _hang_up(http)
        return response


class Stream:
    """One streamed answer: chunks in time, and the bill for what was made of it."""

    def __init__(self, state: ServiceState, http: BaseRequest, served: Served) -> None:
        self.state = state
        self.http = http
        self.served = served
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Generation-Id": served.reply.generation_id,
            }
        )
        self.is_heard = True
        self.is_billed = False

    async def run(self) -> web.StreamResponse:
        """Speak the answer; returns the finished response."""
        served, reply = self.served, self.served.reply
        if reply.shape in ("hang", "reset"):
            self._bill()
            if reply.shape == "hang":
                await _silence(self.state, self.http, served.tables.hang_s)
            _hang_up(self.http)
            return self.response
        if reply.shape == "cut_content_length":
            self.response.content_length = 1 << 20
        else:
            self.response.enable_chunked_encoding()
        self.is_heard = await _prepare(self.response, self.http)
        if served.first_token_s:
            await self._wait(served.first_token_s)
        await self._speak(stream_chunks(reply))
        if ending(reply) == "hang":
            await _silence(self.state, self.http, served.tables.hang_s)
        if ending(reply) != "close":
            _hang_up(self.http)
        return self.response

    async def _wait(self, seconds: float) -> None:
        """Time to the first token, with the comments that keep the connection alive."""
        if "comments" in self.served.reply.extras:
            await self._send(COMMENT)
        await self.state.clock.sleep(seconds)

    async def _speak(self, chunks: list[Chunk]) -> None:
        """Send every chunk in its time, stopping early where hanging up stops the work.

        The bill is entered before the bytes that let the client know its cost.
        """
        reply = self.served.reply
        total = max(1, reply.usage.output_tokens)
        produced = (0, 0)
        pending: list[bytes] = []
        for chunk in chunks:
            after = (chunk.reasoning_tokens, chunk.content_tokens)
            share = max(0, sum(after) - sum(produced)) / total
            if self.served.generation_s and share:
                await self._flush(pending)
                await self.state.clock.sleep(self.served.generation_s * share)
            if self._stops():
                self._bill(produced)
                return
            produced = after
            pending.append(chunk.payload)
        self._bill()
        await self._flush(pending)

    async def _flush(self, pending: list[bytes]) -> None:
        if pending:
            await self._send(b"".join(pending))
            pending.clear()

    async def _send(self, payload: bytes) -> None:
        self.is_heard = self.is_heard and await _write(self.response, payload)

    def _stops(self) -> bool:
        """Whether the listener is gone and the provider is one that stops then."""
        if self.is_heard and not _is_gone(self.http):
            return False
        self.is_heard = False
        slug = self.served.endpoint.slug
        return can_cancel(slug, self.state.traffic_of(slug))

    def _bill(self, produced: tuple[int, int] | None = None) -> None:
        if not self.is_heard or _is_gone(self.http):
            self.state.stats.disconnects += 1
        self.state.enter(self.served.record(self.state, produced=produced))


# -- connections -----------------------------------------------------------------------------------


async def _read(http: BaseRequest) -> bytes:
    """The body of a request.

    Raises:
        Refusal: 413, it is larger than the service takes.
    """
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, "Request body is too large") from None


def _is_gone(http: BaseRequest) -> bool:
    return http.transport is None or http.transport.is_closing()


async def _prepare(response: web.StreamResponse, http: BaseRequest) -> bool:
    """Send the headers; False if nobody is there any more."""
    try:
        await response.prepare(http)
    except ConnectionError:
        return False
    return True


async def _write(response: web.StreamResponse, payload: bytes) -> bool:
    """Send bytes; False if nobody is there any more."""
    try:
        await response.write(payload)
    except (ConnectionError, RuntimeError):  # RuntimeError: the headers never got out
        return False
    return True


async def _silence(state: ServiceState, http: BaseRequest, seconds: float) -> None:
    """Say nothing until the client leaves or `seconds` are over."""
    until_s = state.clock.now_s() + seconds
    while not _is_gone(http) and state.clock.now_s() < until_s:
        await state.clock.sleep(min(_KEEP_ALIVE_S, seconds))


def _hang_up(http: BaseRequest) -> None:
    """Close the connection after what was written, without ending the body properly."""
    if http.transport is not None:
        http.transport.close()


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def _json(body: Any) -> web.Response:
    return _raw(_encoded(body))


def _raw(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type=_JSON, headers=headers)


def make_server(front: Front, *, max_body_bytes: int) -> web.Server:
    """aiohttp's low-level server around a front: no router, no access log, larger bodies."""
    loop = asyncio.get_running_loop()

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
        return BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes
        )

    handler: Callable[[BaseRequest], Any] = front
    return web.Server(handler, request_factory=request, access_log=None)
