"""A headless Chromium, by its debugging protocol: what a page asks for and complains of.

No driver and no library: aiohttp's WebSocket is enough.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
)
_START_S = 30.0


@dataclass(slots=True)
class Tab:
    """One tab. `requests` are the addresses that the page asked for, `complaints` its errors."""

    socket: aiohttp.ClientWebSocketResponse
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _replies: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        """Take in what the browser says, until it is gone."""
        async for message in self.socket:
            told = message.json()
            if "id" in told:
                self._replies.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        reply = self._replies[number]
        await self.socket.send_json({"id": number, "method": method, "params": params})
        told = await reply
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def visit(self, url: str, *, width: int = 1400, height: int = 1000) -> None:
        """Open a page in a window of that size and wait until it is loaded."""
        self.requests.clear()
        self.complaints.clear()
        self._loaded.clear()
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call("Page.navigate", url=url)
        await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Page.loadEventFired":
                self._loaded.set()


@asynccontextmanager
async def opened_tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser with one tab, ended with the block; `profile` is a new folder."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_START_S):
            port = await _port_of(browser)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page, *_) = [item for item in await answer.json() if item["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
            await listening
    finally:
        if browser.returncode is None:
            browser.terminate()
        await browser.communicate()


async def _port_of(browser: asyncio.subprocess.Process) -> int:
    """Where it listens, as it says itself."""
    assert browser.stderr is not None
    async for line in browser.stderr:
        if b"DevTools listening on ws://127.0.0.1:" in line:
            return int(line.split(b"127.0.0.1:")[1].split(b"/")[0])
    raise AssertionError("the browser ended before it listened")
