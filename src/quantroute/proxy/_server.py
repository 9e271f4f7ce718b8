"""The HTTP face: OpenAI's paths in front of one `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import time
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from quantroute._log import get_logger
from quantroute._loopback import LOOPBACK_NAMES, is_loopback, is_own_page
from quantroute.client import Answer, Client
from quantroute.errors import ConfigurationError, QuantrouteError, RateLimited, RequestRefused
from quantroute.ledger import ROOT, Account, check_account
from quantroute.money import to_usd
from quantroute.proxy._reply import (
    NotAllowed,
    completion,
    error_body,
    headers_of,
    status_of,
    stream,
)
from quantroute.proxy._request import ProxyRequest, parse_request

__all__ = ["DEFAULT_MAX_OUTPUT_TOKENS", "DEFAULT_PORT", "Proxy"]

DEFAULT_PORT: Final = 8787
DEFAULT_MAX_OUTPUT_TOKENS: Final = 4_096
_MAX_BODY_BYTES: Final = 64 << 20
_BACKLOG: Final = 4_096
#: While an answer is not there yet, a stream says so, lest something in between cut the line.
_KEEP_ALIVE_S: Final = 10.0
_RETRY_AFTER_S: Final = "5"
_DRAIN_S: Final = 120.0

log = get_logger("quantroute.proxy")


class Proxy:
    """An OpenAI-compatible service whose answers come through `client`.

    >>> async with Client(cap_usd="5.00") as client, Proxy(client, port=0) as proxy:
    ...     openai = AsyncOpenAI(base_url=proxy.base_url, api_key="unused")

    Everything that holds for the client holds for whoever calls: policy, cap, routing, retries.
    Streamed answers are sent once they are complete and settled, so that a retry never shows and
    the bill is exact; until then the stream carries comments. A caller who leaves does not undo the
    request: it is paid for, so it is brought to its end and settled.

    Args:
        client: open, and on this event loop.
        host: address to listen on. Others than loopback ones need a token.
        port: 0 picks a free one.
        token_variable: environment variable with a token that callers must send as their API key;
            None lets everyone in who reaches the address.
        account: ledger account that pays; a caller may name one below it in `x-quantroute-account`.
        default_max_output_tokens: for requests that do not say.

    Raises:
        ConfigurationError: the host is not a loopback address and there is no token.
    """

    def __init__(
        self,
        client: Client,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        token_variable: str | None = None,
        account: Account = ROOT,
        default_max_output_tokens: int = DEFAULT_MAX_OUTPUT_TOKENS,
    ) -> None:
        if host not in LOOPBACK_NAMES and token_variable is None:
            raise ConfigurationError(
                f"listening on {host} lets others spend your money: name an environment variable "
                "that holds a token for them, or listen on 127.0.0.1"
            )
        if token_variable is not None and not os.environ.get(token_variable):
            raise ConfigurationError(f"the environment variable {token_variable} holds no token")
        self.client = client
        self.host = host
        self.port = port
        self._token_variable = token_variable
        self._account = account
        self._default_max_output_tokens = default_max_output_tokens
        self._runner: web.AppRunner | None = None
        self._live: set[asyncio.Task[Answer]] = set()

    @property
    def base_url(self) -> str:
        """What OpenAI's clients are given as `base_url`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/quantroute/status", self._status)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port, backlog=_BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigurationError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}; "
                "name another port"
            ) from error
        self._runner = runner
        self.port = runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take nothing new, bring to an end what is paid for, then close."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        if self._live:
            await asyncio.wait(self._live, timeout=_DRAIN_S)
        await runner.cleanup()

    # -- chat -------------------------------------------------------------------------------------

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        try:
            self._admit(http)
            request = parse_request(
                await _body_of(http),
                account=self._account_of(http),
                default_max_output_tokens=self._default_max_output_tokens,
                request_id=request_id,
            )
        except QuantrouteError as error:
            return _failed(error)
        answering = asyncio.ensure_future(self.client.answer(request.chat))
        self._live.add(answering)
        answering.add_done_callback(self._forget)
        if request.is_streamed:
            return await self._streamed(http, request, answering)
        try:
            answer = await asyncio.shield(answering)
        except QuantrouteError as error:
            return _failed(error)
        body = completion(
            answer,
            model=request.chat.model,
            request_id=request_id,
            created_s=int(time.time()),
        )
        return _json(body, headers=headers_of(answer))

    async def _streamed(
        self, http: web.Request, request: ProxyRequest, answering: asyncio.Task[Answer]
    ) -> web.StreamResponse:
        # A quick refusal still has a status of its own; later ones travel inside the stream.
        await asyncio.wait({answering}, timeout=_KEEP_ALIVE_S)
        if answering.done() and (failure := answering.exception()) is not None:
            if isinstance(failure, QuantrouteError):
                return _failed(failure)
            raise failure
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        with contextlib.suppress(ConnectionError):  # the caller left; the answer is settled anyway
            await response.prepare(http)
            while not answering.done():
                await response.write(b": waiting for the answer\n\n")
                await asyncio.wait({answering}, timeout=_KEEP_ALIVE_S)
            for event in self._events(request, answering):
                await response.write(event)
            await response.write_eof()
        return response

    def _events(self, request: ProxyRequest, answering: asyncio.Task[Answer]) -> Iterable[bytes]:
        failure = answering.exception()
        if isinstance(failure, QuantrouteError):
            return [b"data: " + json.dumps(error_body(failure)).encode() + b"\n\n"]
        return stream(
            answering.result(),
            model=request.chat.model,
            request_id=request.chat.request_id,
            created_s=int(time.time()),
            wants_usage=request.wants_usage,
        )

    def _forget(self, answering: asyncio.Task[Answer]) -> None:
        self._live.discard(answering)
        if not answering.cancelled() and (error := answering.exception()) is not None:
            log.info("request failed", error=str(error))

    # -- everything else --------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        try:
            self._admit(http)
            found = await self.client.registry.models()
        except QuantrouteError as error:
            return _failed(error)
        return _json({"object": "list", "data": [_model_card(item.id) for item in found.models]})

    async def _model(self, http: web.Request) -> web.Response:
        try:
            self._admit(http)
            bound = await self.client.verdicts(http.match_info["model"])
        except QuantrouteError as error:
            return _failed(error)
        verdicts = [
            {
                "endpoint": str(verdict.endpoint.key),
                "is_eligible": verdict.eligible,
                "reasons": [reason.text for reason in verdict.reasons],
            }
            for verdict in bound.verdicts
        ]
        return _json(_model_card(http.match_info["model"]) | {"quantroute": verdicts})

    async def _health(self, http: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _status(self, http: web.Request) -> web.Response:
        try:
            self._admit(http)
        except QuantrouteError as error:
            return _failed(error)
        balance = self.client.ledger.balance()
        endpoints = [
            {
                "endpoint": str(report.key),
                "in_flight": report.in_flight,
                "limit": report.limit,
                "answered": report.answered,
                "faults": report.faults,
                "rate_limited": report.rate_limited,
                "breaker": report.breaker.value,
            }
            for report in self.client.endpoint_reports()
        ]
        return _json(
            {
                "posted_usd": f"{to_usd(balance.posted_pusd):f}",
                "pending_usd": f"{to_usd(balance.pending_pusd):f}",
                "in_flight": len(self._live),
                "endpoints": endpoints,
            }
        )

    # -- who may --------------------------------------------------------------------------------

    def _admit(self, http: web.Request) -> None:
        if self._token_variable is not None:
            token = os.environ.get(self._token_variable, "")
            given = http.headers.get("Authorization", "").removeprefix("Bearer ")
            if not token or not hmac.compare_digest(_raw(given), _raw(token)):
                raise NotAllowed("the API key is not the token this proxy was started with")
        elif not is_loopback(http.host):
            raise NotAllowed(f"this proxy answers to 127.0.0.1 and localhost, not {http.host!r}")
        elif not is_own_page(http.headers.get("Origin")):
            raise NotAllowed(
                "this proxy answers no web page from elsewhere: start it with a token "
                "(--token-env) and send that"
            )

    def _account_of(self, http: web.Request) -> Account:
        name = http.headers.get("x-quantroute-account")
        if name is None:
            return self._account
        return check_account(f"{self._account}/{name}" if self._account else name)


def _raw(header: str) -> bytes:
    """A header as it came: aiohttp keeps odd bytes as surrogates."""
    return header.encode("utf-8", "surrogateescape")


async def _body_of(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(
            problem=f"the body is larger than {_MAX_BODY_BYTES >> 20} MiB; send less", status=413
        ) from None


def _failed(error: QuantrouteError) -> web.Response:
    headers = {"Retry-After": _RETRY_AFTER_S} if isinstance(error, RateLimited) else None
    return _json(error_body(error), status=status_of(error), headers=headers)


def _json(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return web.Response(body=raw, status=status, headers=headers, content_type="application/json")


def _model_card(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "quantroute"}
