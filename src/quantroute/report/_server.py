"""The page of a run that is under way, on a loopback address: it reads, and spends nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
import secrets
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from quantroute._loopback import LOOPBACK, served
from quantroute.report._page import live_page, page_body
from quantroute.report._picture import Picture, RunWatcher

__all__ = ["DEFAULT_REPORT_PORT", "ReportServer"]

DEFAULT_REPORT_PORT: Final = 8788
#: Looking shall cost a tenth of the time at most, however large a store has become.
_LEAST_PAUSE_S: Final = 2.0
_PAUSE_PER_LOOK: Final = 10.0
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ReportServer:
    """Serves `/` (the page) and `/data.json` (what it shows now) until it is left.

    Args:
        watcher: of the run; its store is only read.
        port: 0 picks a free one.
    """

    def __init__(self, watcher: RunWatcher, *, port: int = DEFAULT_REPORT_PORT) -> None:
        self.port = port
        self._watcher = watcher
        self._looking = asyncio.Lock()
        self._picture: Picture | None = None
        self._version = ""
        self._body = ""
        self._due_s = 0.0
        self._pause_s = _LEAST_PAUSE_S
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """What a browser is given."""
        return f"http://{LOOPBACK}:{self.port}/"

    async def __aenter__(self) -> Self:
        await self._look()  # nothing to show is an error at once, not in the browser
        routes = {"/": self._page, "/data.json": self._data}
        self.port = await self._stack.enter_async_context(served(routes, port=self.port))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _look(self) -> Picture:
        """The latest picture; browsers that ask at the same time share it."""
        async with self._looking:
            now_s = time.monotonic()
            if self._picture is None or now_s >= self._due_s:
                self._picture = await asyncio.to_thread(
                    self._watcher.picture, at=dt.datetime.now(dt.UTC)
                )
                self._body = page_body(self._picture)
                self._version = hashlib.sha256(self._body.encode()).hexdigest()[:16]
                took_s = time.monotonic() - now_s
                self._pause_s = max(_LEAST_PAUSE_S, took_s * _PAUSE_PER_LOOK)
                self._due_s = time.monotonic() + self._pause_s / 2
            return self._picture

    async def _page(self, _: web.Request) -> web.Response:
        picture = await self._look()
        page = live_page(picture, version=self._version, nonce=secrets.token_urlsafe(16))
        return web.Response(text=page, content_type="text/html", headers=_HEADERS)

    async def _data(self, _: web.Request) -> web.Response:
        await self._look()
        body = {
            "version": self._version,
            "html": self._body,
            "again_ms": round(self._pause_s * 1_000),
        }
        return web.Response(
            text=json.dumps(body), content_type="application/json", headers=_HEADERS
        )
