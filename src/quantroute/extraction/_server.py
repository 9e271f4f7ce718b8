"""What the sources behind a server share: asking with retries, health, a bound on what is open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp

from quantroute._http import Service, SessionPool
from quantroute.clock import Clock, SystemClock
from quantroute.errors import SourceError

__all__ = ["Refused", "StateServer", "spread"]

_TRANSIENT: Final = frozenset({408, 409, 425, 429})
#: Of these no single request is the cause: a key, an address, another server behind it.
_OF_ALL: Final = frozenset({401, 403, 404, 405})
_MAX_DELAY_S: Final = 20.0
_HEALTH_TIMEOUT_S: Final = 5.0
_TEXT_CHARS: Final = 300

Item = TypeVar("Item")
Result = TypeVar("Result")


class Refused(Exception):
    """The server says that this request can never succeed."""


@dataclass(slots=True)
class StateServer:
    """A vLLM or SGLang server. `url` is its root, without `/v1`.

    `retries` follow a failed attempt, after 0.5, 1, 2, ... seconds; `timeout_s` is for one answer.
    """

    url: str
    retries: int = 4
    timeout_s: float = 600.0
    clock: Clock = field(default_factory=SystemClock)
    _pool: SessionPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        self._pool = SessionPool(Service(base_url=self.url))

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises as `post`."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A JSON object.

        Raises:
            Refused: a final status; only this request is affected.
            SourceError: every attempt failed, or no request would be answered.
        """
        return await self._ask("POST", path, body)

    async def is_alive(self) -> bool:
        """Whether `/health` answers with 200 within seconds."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        try:
            session = self._pool.get()
            async with session.get(
                f"{self.url}/health", timeout=timeout, proxy=self._pool.proxy_url
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def pause(self, attempt: int) -> None:
        """Wait before attempt number `attempt` + 1, counted from 1."""
        await self.clock.sleep(min(0.5 * 2 ** (attempt - 1), _MAX_DELAY_S))

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        problem = ""
        for attempt in range(1, self.retries + 2):
            if attempt > 1:
                await self.pause(attempt - 1)
            try:
                return await self._once(method, path, body)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"[:_TEXT_CHARS]
            except _Transient as error:
                problem = str(error)
        state = "it is up" if await self.is_alive() else "it does not answer on /health any more"
        raise SourceError(
            source=self.url,
            problem=f"{path} failed {self.retries + 1} times ({problem}); {state}; what is "
            "committed stays: look at the server's log and run again",
        )

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        session = self._pool.get()
        async with session.request(
            method,
            f"{self.url}{path}",
            json=body,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            proxy=self._pool.proxy_url,
        ) as response:
            text = await response.text()
            if response.status in _TRANSIENT or response.status >= 500:
                raise _Transient(f"status {response.status}: {text[:_TEXT_CHARS]}")
            if response.status in _OF_ALL:
                raise SourceError(
                    source=self.url,
                    problem=f"{path} is refused with status {response.status}: "
                    f"{text[:_TEXT_CHARS]}; it would refuse any example: look at its address "
                    "and at what it serves, and run again; what is committed stays",
                )
            if response.status != 200:
                raise Refused(f"status {response.status}: {text[:_TEXT_CHARS]}")
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        return answer


class _Transient(Exception):
    pass


async def spread(
    items: Iterable[Item], ask: Callable[[Item], Awaitable[Result]], *, limit: int
) -> AsyncIterator[Result]:
    """`ask` for each item, at most `limit` at a time; results as they come.

    The first error ends it; what is still open is cancelled.
    """
    iterator = iter(items)
    open_tasks: set[asyncio.Task[Result]] = set()
    try:
        while True:
            while len(open_tasks) < limit:
                item = next(iterator, None)
                if item is None:
                    break
                open_tasks.add(asyncio.ensure_future(ask(item)))
            if not open_tasks:
                return
            await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in open_tasks if task.done()]:
                result = task.result()
                open_tasks.remove(task)
                yield result
    finally:
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
