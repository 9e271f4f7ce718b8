"""One POST over aiohttp: separate limits, every wire fault mapped, the id caught at first sight.

The only module of the client that knows aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import aiohttp
from msgspec import Struct
from yarl import URL

from quantroute._headers import header, media_type, retry_after_s
from quantroute._http import Service, SessionPool
from quantroute.client._reply import BodyDecoder, Reply, StreamDecoder, shortened, storable
from quantroute.clock import Clock
from quantroute.errors import ConfigurationError, QuantrouteError, TransportError
from quantroute.secrets import EnvKey

__all__ = ["Exchange", "Timeouts", "Transport"]

_GENERATION_ID: Final = "X-Generation-Id"
#: Nothing of the request has left: no connection, no TLS, or a proxy that would not open a tunnel.
_NEVER_SENT: Final = (
    aiohttp.ClientConnectorError,
    aiohttp.ClientHttpProxyError,
    aiohttp.InvalidURL,
)
#: More than any answer: 262,144 tokens of six escaped bytes come to a few megabytes, streamed with
#: a frame around each to about a hundred. Beyond it somebody floods the memory.
_MOST_BYTES: Final = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits of one attempt, in seconds, each on its own; None switches one off.

    Args:
        connect_s: name look-up, TCP and TLS. Nothing has been sent when it strikes.
        first_byte_s: from sending to the first byte of the *answer*; keep-alive blanks and stream
            comments do not count. A non-streamed answer begins when the model has finished, so the
            default allows for long reasoning.
        idle_s: silence on an open answer; blanks and comments do count as life.
        total_s: the whole attempt.
    """

    connect_s: float | None = 20.0
    first_byte_s: float | None = 1_800.0
    idle_s: float | None = 180.0
    total_s: float | None = 3_600.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "idle_s", "total_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:  # written so that NaN is refused
                raise ConfigurationError(f"{name} must be positive or None, not {limit}")


class Exchange(Struct, frozen=True, kw_only=True):
    """A reply with its timing, in seconds from sending."""

    reply: Reply
    first_byte_s: float | None
    total_s: float


class _Deadline:
    """The nearest of the running limits, kept on one `asyncio.timeout`.

    The deadline moves with every chunk, the timer does not: when it fires too early it is set
    anew. (`Timeout.reschedule` makes a new timer each time; three of them per short answer.)
    """

    __slots__ = (
        "_first_byte_at",
        "_limits",
        "_loop",
        "_moment",
        "_scope",
        "_timer",
        "_total_at",
        "reason",
    )

    def __init__(
        self,
        limits: Timeouts,
        scope: asyncio.Timeout,
        loop: asyncio.AbstractEventLoop,
        started_at: float,
    ) -> None:
        self._loop, self._limits, self._scope = loop, limits, scope
        self._timer: asyncio.TimerHandle | None = None
        self._first_byte_at = started_at + (limits.first_byte_s or float("inf"))
        self._total_at = started_at + (limits.total_s or float("inf"))
        self.reason = ""
        self._arm(self._first_byte_at, "first_byte_s")

    def on_bytes(self, *, has_begun: bool) -> None:
        """Bytes came: the idle limit starts anew; the first-byte limit ends when it has begun."""
        idle_at = self._loop.time() + (self._limits.idle_s or float("inf"))
        if has_begun or idle_at < self._first_byte_at:
            self._arm(idle_at, "idle_s")
        else:
            self._arm(self._first_byte_at, "first_byte_s")

    def _arm(self, moment: float, reason: str) -> None:
        if self._total_at < moment:
            moment, reason = self._total_at, "total_s"
        self.reason, self._moment = reason, moment
        if moment == float("inf"):
            self.close()
        elif self._timer is None:
            # No later than the idle limit will want it, which begins with the answer's headers.
            idle_at = self._loop.time() + (self._limits.idle_s or float("inf"))
            self._timer = self._loop.call_at(min(moment, idle_at), self._on_time)
        elif moment < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(moment, self._on_time)

    def _on_time(self) -> None:
        if self._moment > self._loop.time():
            self._timer = self._loop.call_at(self._moment, self._on_time)
        else:
            self._timer = None
            self._scope.reschedule(self._moment)

    def close(self) -> None:
        """The attempt is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True)
class Transport:
    """Sends bodies to one service. The session belongs to the pool that is handed in."""

    service: Service
    sessions: SessionPool
    timeouts: Timeouts
    clock: Clock
    key: EnvKey
    # Made once each, not per request: a parsed URL, and aiohttp's form of the connection limit.
    _urls: dict[str, URL] = field(default_factory=dict, init=False)
    _connecting: aiohttp.ClientTimeout = field(init=False)

    def __post_init__(self) -> None:
        # Name look-up and a proxy's CONNECT count too; `sock_connect` leaves them out.
        self._connecting = aiohttp.ClientTimeout(total=None, connect=self.timeouts.connect_s)

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.service.base_url + path)
        return url

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        is_streamed: bool,
        on_id: Callable[[str], None],
    ) -> Exchange:
        """Send one body and read the reply to its end.

        `on_id` is called as soon as the answer's headers name a generation, unless the whole answer
        came with them; and with the id that a stream's events named, if its end does not come.
        Raises:
            TransportError: no usable reply; `maybe_billed` is False only for failed connections.
        """
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        deadline: _Deadline | None = None
        try:
            async with asyncio.timeout(None) as scope:
                deadline = _Deadline(self.timeouts, scope, loop, sent_at)
                session = self.sessions.get()
                # Awaited, and then entered: what it is entered by would wait between the two.
                response = await session.post(
                    self._url(path),
                    data=body,
                    headers={**headers, "Content-Type": "application/json"},
                    allow_redirects=False,
                    timeout=self._connecting,
                    proxy=self.sessions.proxy_url,
                )
                async with response:
                    return await self._read(response, is_streamed, on_id, deadline, sent_at)
        except TimeoutError as error:
            raise self._timed_out(error, deadline) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from None
        finally:
            if deadline is not None:
                deadline.close()

    async def get(self, path: str, *, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of a small GET (accounting endpoints), within 30 seconds.

        Raises:
            TransportError: no reply.
        """
        status, body, _ = await self.get_dated(path, headers=headers)
        return status, body

    async def get_dated(
        self, path: str, *, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str | None]:
        """The same, with the service's clock: the Date header as it came."""
        try:
            async with asyncio.timeout(30.0):
                session = self.sessions.get()
                async with session.get(
                    self.service.base_url + path,
                    headers=dict(headers),
                    allow_redirects=False,
                    proxy=self.sessions.proxy_url,
                ) as response:
                    return response.status, await response.read(), response.headers.get("Date")
        except TimeoutError as error:
            raise self._timed_out(error, None) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from None

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        is_streamed: bool,
        on_id: Callable[[str], None],
        deadline: _Deadline,
        sent_at: float,
    ) -> Exchange:
        loop = asyncio.get_running_loop()
        decoder = self._decoder(response, is_streamed)
        content = response.content
        is_all_here = content.is_eof()  # as with most short answers: nothing to wait for
        if not is_all_here:
            deadline.on_bytes(has_begun=False)
            if decoder.header_id:
                on_id(decoder.header_id)
        first_byte_s: float | None = None
        is_cut, received_bytes = False, 0
        try:
            while chunk := content.read_nowait() if is_all_here else await content.readany():
                received_bytes += len(chunk)
                if received_bytes > _MOST_BYTES:
                    raise TransportError(
                        problem=f"an answer of more than {_MOST_BYTES} bytes", maybe_billed=True
                    )
                has_begun = decoder.feed(chunk)
                if has_begun and first_byte_s is None:
                    first_byte_s = loop.time() - sent_at
                if not is_all_here:
                    deadline.on_bytes(has_begun=has_begun)
        except (aiohttp.ClientError, ConnectionError):
            is_cut = True  # what arrived is judged; an incomplete answer classifies as such
        except BaseException:  # a limit, or cancelled: the bill must be found out all the same
            if decoder.generation_id and not decoder.header_id:
                with contextlib.suppress(QuantrouteError):  # what happened is what must be told
                    on_id(decoder.generation_id)
            raise
        return Exchange(
            reply=decoder.finish(is_cut=is_cut),
            first_byte_s=first_byte_s,
            total_s=loop.time() - sent_at,
        )

    def _decoder(
        self, response: aiohttp.ClientResponse, is_streamed: bool
    ) -> BodyDecoder | StreamDecoder:
        # What came decides, not what was asked: an error before the stream is a plain JSON body.
        media = media_type(response.headers)
        is_events = media == "text/event-stream"
        if is_streamed and response.status == 200 and not media.endswith("json"):
            is_events = True
        decoder = StreamDecoder if is_events else BodyDecoder
        generation_id = header(response.headers, _GENERATION_ID)
        redactor = self.key.redactor()  # of the key as it is now: it may be set or changed late
        return decoder(
            response.status,
            redactor,
            retry_after_s=self._retry_after_s(response),
            header_id=storable(generation_id, redactor) if generation_id else None,
        )

    def _retry_after_s(self, response: aiohttp.ClientResponse) -> float | None:
        if response.status == 200 and "Retry-After" not in response.headers:
            return None  # a thousand times a second, not worth looking for the rarer forms
        now = datetime.fromtimestamp(self.clock.time_s(), UTC)
        return retry_after_s(response.headers, now=now)

    def _timed_out(self, error: TimeoutError, deadline: _Deadline | None) -> TransportError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return TransportError(
                problem=f"no connection within {self.timeouts.connect_s} s to "
                f"{self.service.route()}",
                maybe_billed=False,
            )
        name = deadline.reason if deadline else "total_s"
        limit_s = getattr(self.timeouts, name) if deadline else 30.0
        return TransportError(problem=f"{name} of {limit_s} s exceeded", maybe_billed=True)

    def _broken(self, error: Exception) -> TransportError:
        # Not chained: aiohttp's texts may hold a URL with a proxy's password.
        never_sent = isinstance(error, _NEVER_SENT)
        text = shortened(self.key.redactor().text(str(error)))
        return TransportError(
            problem=f"{type(error).__name__}: {text}",
            maybe_billed=not never_sent,
        )
