"""The line to the server: many operations per round trip, in order, each applied exactly once.

One batch is under way at a time; what comes meanwhile gathers for the next, as in a group commit.
A batch carries its number. If its reply is lost it is sent again under the same number, and the
server gives the first reply again instead of doing it twice.

When the server cannot be reached the line keeps trying. Outcomes that are safe in the outbox do not
wait for it; whoever wants new money does, for `patience_s`, and is refused then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from quantroute._log import get_logger
from quantroute.errors import ConfigurationError, JournalError, LedgerUnreachable
from quantroute.secrets import redact_url

__all__ = ["KEPT", "MARK", "ServerLink"]

log = get_logger("quantroute.ledger")

KEPT: Final = {"kept in the outbox": True}
"""The result of an outcome that is safe here but has not reached the server yet."""

MARK: Final = {"op": "mark"}

_LARGEST_BATCH: Final = 256
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_REPLY_WITHIN_S: Final = 10.0
_KEYS: Final = ("accounts", "entries", "lines", "journal", "notes", "owners")

Result = Mapping[str, Any]
_DONE: Final[Result] = {}


@dataclass(slots=True, eq=False)
class _Sending:
    """An operation on its way. `is_safe` ones are in the outbox: nobody needs to wait for them."""

    said: Mapping[str, Any]
    is_safe: bool
    future: asyncio.Future[Result]
    on_done: Callable[[Result], None] | None = None
    is_given_up: bool = False


class ServerLink:
    """A connection to one ledger on one server; used from one event loop.

    Args:
        on_accounts: told the accounts after each batch, as the server keeps them.
        patience_s: how long those who wait for an answer wait for a lost server.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        owner: str,
        about: Mapping[str, object],
        patience_s: float,
        on_accounts: Callable[[dict[str, str]], None],
    ) -> None:
        self._url = url
        self._patience_s = patience_s
        self._on_accounts = on_accounts
        self._owner = owner
        self._about = json.dumps(about)
        self.keys: dict[str, str] = {item: f"{{{name}}}:{item}" for item in _KEYS}
        self.ledger_id = ""
        self.client: Any = None
        self._script: Any = None
        self._queue: deque[_Sending] = deque()
        self._batch: list[_Sending] = []
        self._batch_number = 0
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._lost_since_s: float | None = None
        self._problem = ""

    @property
    def place(self) -> str:
        """The server's address without a password."""
        return redact_url(self._url)

    @property
    def is_lost(self) -> bool:
        """Whether the server did not answer the last time."""
        return self._lost_since_s is not None

    @property
    def waiting(self) -> int:
        """Operations that the server has not answered yet."""
        return len(self._queue) + len(self._batch)

    # -- opening and closing ----------------------------------------------------------------------

    async def open(self, *, allow_volatile: bool) -> None:
        """Connect, check that the server forgets nothing, find or make the ledger.

        Raises:
            LedgerUnreachable: no answer.
            ConfigurationError: the client library is missing, or the server may lose data.
        """
        self.client = _client(self._url)
        try:
            self._script = self.client.register_script(_script_text())
            await self.reading(self._check_durability(allow_volatile=allow_volatile))
            owners = self.keys["owners"]
            await self.reading(self.client.hsetnx(owners, "ledger", secrets.token_hex(8)))
            self.ledger_id = await self.reading(self.client.hget(owners, "ledger"))
        except BaseException:
            await self.client.aclose()
            raise
        self._sender = asyncio.create_task(self._send_forever())

    async def aclose(self) -> None:
        """Stop sending and disconnect. What was not sent stays in the outbox."""
        if self._sender is not None:
            self._sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sender
            self._sender = None
        for sending in (*self._batch, *self._queue):
            sending.future.cancel()
        if self.client is not None:
            await self.client.aclose()

    async def _check_durability(self, *, allow_volatile: bool) -> None:
        problem = await _volatility(self.client)
        if problem is None:
            return
        if not allow_volatile:
            raise ConfigurationError(
                f"{self.place}: {problem}; a budget that a restart forgets is no cap. Set "
                "`appendonly yes`, `appendfsync always` and `maxmemory-policy noeviction`, or "
                "accept the risk with allow_volatile"
            )
        log.warning("the shared ledger may be lost", server=self.place, problem=problem)

    # -- saying -----------------------------------------------------------------------------------

    def put(
        self,
        said: Mapping[str, Any],
        *,
        is_safe: bool = False,
        on_done: Callable[[Result], None] | None = None,
    ) -> asyncio.Future[Result]:
        """Queue an operation; the future gets its result, or `KEPT` if it is safe and must wait."""
        if self._sender is None:
            raise JournalError(path=self.place, problem="the ledger is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(_Sending(said, is_safe, future, on_done))
        if is_safe and self.is_lost:
            future.set_result(KEPT)
        self._wake.set()
        return future

    async def call(self, said: Mapping[str, Any]) -> Result:
        """The result of an operation that only the server can decide.

        Raises:
            LedgerUnreachable: no answer in time. If it was sent it may be done all the same.
        """
        if self._lost_since_s is not None:
            lost_s = asyncio.get_running_loop().time() - self._lost_since_s
            if lost_s > self._patience_s:
                raise self._unreachable()
        future = self.put(said)
        try:
            async with asyncio.timeout(self._patience_s):
                return await future
        except TimeoutError:
            raise self._unreachable() from None
        finally:
            if future.cancelled():
                self._give_up(future)

    def _give_up(self, future: asyncio.Future[Result]) -> None:
        """Do not even send what nobody waits for any more, if it has not been sent yet."""
        for sending in self._queue:
            if sending.future is future:
                sending.is_given_up = True

    def _unreachable(self) -> LedgerUnreachable:
        problem = self._problem or f"no answer within {self._patience_s:g} s"
        return LedgerUnreachable(path=self.place, problem=problem)

    async def reading(self, question: Any) -> Any:
        """The answer to a question that changes nothing.

        Raises:
            LedgerUnreachable: no answer.
        """
        try:
            return await question
        except _failures() as error:
            _if_cancelled(error)
            raise LedgerUnreachable(path=self.place, problem=_told(error)) from error

    # -- the sender -------------------------------------------------------------------------------

    async def _send_forever(self) -> None:
        while True:
            await self._wake.wait()
            while self._queue and len(self._batch) < _LARGEST_BATCH:
                sending = self._queue.popleft()
                if not sending.is_given_up:
                    self._batch.append(sending)
            if not self._batch:
                self._wake.clear()
                continue
            self._batch_number += 1
            said = json.dumps([sending.said for sending in self._batch], ensure_ascii=False)
            reply, accounts = await self._deliver(said)
            self._on_accounts(dict(zip(accounts[::2], accounts[1::2], strict=True)))
            answered, self._batch = self._batch, []
            for sending, result in zip(answered, json.loads(reply), strict=True):
                _settle(sending, result or _DONE)

    async def _deliver(self, said: str) -> tuple[str, Sequence[str]]:
        """Send the batch until it is answered."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                reply, accounts = await self._script(
                    keys=list(self.keys.values()),
                    args=[self.ledger_id, self._owner, self._batch_number, self._about, said],
                )
            except _failures() as error:
                _if_cancelled(error)
                self._note_loss(_told(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self.is_lost:
                log.warning("the shared ledger answers again", server=self.place)
                self._lost_since_s, self._problem = None, ""
            return reply, accounts

    def _note_loss(self, problem: str) -> None:
        self._problem = problem
        if self._lost_since_s is None:
            self._lost_since_s = asyncio.get_running_loop().time()
            log.warning("the shared ledger does not answer", server=self.place, problem=problem)
        for sending in (*self._batch, *self._queue):
            if sending.is_safe and not sending.future.done():
                sending.future.set_result(KEPT)


def _settle(sending: _Sending, result: Result) -> None:
    if sending.on_done is not None:
        sending.on_done(result)
    if not sending.future.done():
        sending.future.set_result(result)


def _client(url: str) -> Any:
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigurationError(
            "a shared ledger needs the redis client: pip install 'quantroute[redis]'"
        ) from None
    try:
        return Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_REPLY_WITHIN_S,
            socket_connect_timeout=_REPLY_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # a batch is sent again by us, under its number
        )
    except ValueError as error:
        raise ConfigurationError(
            f"{redact_url(url)}: not an address of a server ({error}); write "
            "redis://HOST:PORT/DATABASE"
        ) from None


def _failures() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError)


def _if_cancelled(error: Exception) -> None:
    """A cancellation that the client library turned into an error of the connection is one still.

    Seen with redis 8.1.0 when a task is cancelled while its answer arrives.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _script_text() -> str:
    return (files("quantroute.ledger") / "_shared_books.lua").read_text(encoding="utf-8")


async def _volatility(client: Any) -> str | None:
    """Why the server might forget what it acknowledged; None if it does not."""
    from redis.exceptions import ResponseError

    try:
        found: dict[str, str] = {}
        for setting in ("appendonly", "appendfsync", "maxmemory-policy"):
            found |= await client.config_get(setting)
    except ResponseError as error:
        return f"its durability cannot be checked ({error})"
    if found.get("appendonly") != "yes":
        return f"appendonly is {found.get('appendonly', 'unknown')}"
    if found.get("appendfsync") != "always":
        return f"appendfsync is {found.get('appendfsync', 'unknown')}"
    if str(found.get("maxmemory-policy", "")).startswith("allkeys"):
        return f"maxmemory-policy is {found['maxmemory-policy']}"
    return None
