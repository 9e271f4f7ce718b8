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
from quantroute.ledger._server_client import (
    advice,
    check_durability,
    check_keys,
    connected,
    failures,
    if_cancelled,
    is_of_another_ledger,
    told,
)
from quantroute.secrets import redact_url

__all__ = ["KEPT", "MARK", "ServerLink"]

log = get_logger("quantroute.ledger")

KEPT: Final = {"kept in the outbox": True}
"""The result of an outcome that is safe here but has not reached the server yet."""

MARK: Final = {"op": "mark"}

_LARGEST_BATCH: Final = 256
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
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

    `confirmed` is the number of the last batch that the server has answered.

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
        self._name = name
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
        self._problem: Exception | None = None
        self._broken: JournalError | None = None
        self.confirmed = 0

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

    async def open(self, *, allow_volatile: bool, may_create: bool) -> None:
        """Connect, check that the server forgets nothing, find or make the ledger.

        Raises:
            LedgerUnreachable: no answer.
            ConfigurationError: the client library is missing, the server may lose data, or has
                something else under the ledger's keys; or there is no such ledger and none is made.
        """
        self.client = connected(self._url)
        try:
            self._script = self.client.register_script(_script_text())
            await self.reading(self._check_durability(allow_volatile=allow_volatile))
            if problem := await self.reading(check_keys(self.client, self.keys)):
                raise ConfigurationError(
                    f"{self.place}: {problem}; choose another name for the ledger"
                )
            self.ledger_id = await self._ledger_id(may_create=may_create)
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

    async def _ledger_id(self, *, may_create: bool) -> str:
        owners = self.keys["owners"]
        if may_create:
            await self.reading(self.client.hsetnx(owners, "ledger", secrets.token_hex(8)))
        found: str | None = await self.reading(self.client.hget(owners, "ledger"))
        if found is None:
            raise ConfigurationError(
                f"{self.place} has no ledger {self._name!r}: check the address and the name; a new "
                "ledger needs a cap: '5.00' USD, or NO_CAP"
            )
        return found

    async def _check_durability(self, *, allow_volatile: bool) -> None:
        problem = await check_durability(self.client)
        if problem is None:
            return
        if not allow_volatile:
            raise ConfigurationError(
                f"{self.place}: {problem}; a budget that a restart forgets is no cap. Set "
                "`appendonly yes`, `appendfsync always`, `no-appendfsync-on-rewrite no` and "
                "`maxmemory-policy noeviction`, or accept the risk with allow_volatile"
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
        if self._broken is not None:
            raise self._broken.with_traceback(None)
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
            if lost_s > self._patience_s or self._is_another:
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
        if self._problem is None:
            problem = f"no answer within {self._patience_s:g} s"
            return LedgerUnreachable(path=self.place, problem=problem)
        problem = told(self._problem)
        return LedgerUnreachable(path=self.place, problem=problem, advice=advice(self._problem))

    @property
    def _is_another(self) -> bool:
        """Whether the server answered, but has lost what it had confirmed."""
        return self._problem is not None and is_of_another_ledger(self._problem)

    async def reading(self, question: Any) -> Any:
        """The answer to a question that changes nothing.

        Raises:
            LedgerUnreachable: no answer.
        """
        try:
            return await question
        except failures() as error:
            if_cancelled(error)
            raise LedgerUnreachable(
                path=self.place, problem=told(error), advice=advice(error)
            ) from error

    # -- the sender -------------------------------------------------------------------------------

    async def _send_forever(self) -> None:
        try:
            await self._send_batches()
        except Exception as error:  # noqa: BLE001
            # A mistake of ours, or a server that answers nonsense: nobody must wait for ever.
            self._broken = JournalError(path=self.place, problem=f"the line broke: {error!r}")
            log.error("the line to the shared ledger broke", problem=repr(error))
            for sending in (*self._batch, *self._queue):
                if not sending.future.done():
                    sending.future.set_exception(self._broken)
                    sending.future.exception()  # not everybody waits for the answer

    async def _send_batches(self) -> None:
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
            self.confirmed = self._batch_number
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
            except failures() as error:
                if_cancelled(error)
                self._note_loss(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self.is_lost:
                log.warning("the shared ledger answers again", server=self.place)
                self._lost_since_s, self._problem = None, None
            return reply, accounts

    def _note_loss(self, problem: Exception) -> None:
        self._problem = problem
        if self._lost_since_s is None:
            self._lost_since_s = asyncio.get_running_loop().time()
            log.warning(
                "the shared ledger does not answer", server=self.place, problem=told(problem)
            )
        for sending in (*self._batch, *self._queue):
            if sending.future.done():
                continue
            if sending.is_safe:
                sending.future.set_result(KEPT)
            elif self._is_another:  # waiting does not bring back what is lost
                sending.future.set_exception(self._unreachable())
                sending.future.exception()  # not everybody waits for the answer


def _settle(sending: _Sending, result: Result) -> None:
    if sending.on_done is not None:
        sending.on_done(result)
    if not sending.future.done():
        sending.future.set_result(result)


def _script_text() -> str:
    return (files("quantroute.ledger") / "_shared_books.lua").read_text(encoding="utf-8")
