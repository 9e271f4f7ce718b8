"""The client of the server: its address, what it may forget, and what its refusals mean."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from quantroute.errors import ConfigurationError

__all__ = [
    "LOST_LEDGER_ADVICE",
    "advice",
    "check_durability",
    "check_keys",
    "connected",
    "failures",
    "if_cancelled",
    "is_of_another_ledger",
    "told",
]

LOST_LEDGER_ADVICE: Final = (
    "restore the server's data as they were; or begin with another ledger (URL#NAME), under a cap "
    "lowered by what `quantroute status RUN` without a ledger says was spent"
)

_REPLY_WITHIN_S: Final = 10.0
_KINDS: Final = {"journal": "stream"}  # all others are hashes
_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory-policy", "no-appendfsync-on-rewrite")


def connected(url: str) -> Any:
    """A client of the server at `url`; nothing is sent yet.

    Raises:
        ConfigurationError: the client library is missing, or that is no address.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigurationError(
            "a shared ledger needs the redis client: pip install 'quantroute[redis]'"
        ) from None
    try:
        address = urlsplit(url)
        if address.scheme != "unix" and not address.path.strip("/").isdigit() and address.path:
            raise ValueError("a database is a number")
        return Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_REPLY_WITHIN_S,
            socket_connect_timeout=_REPLY_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # a batch is sent again by us, under its number
        )
    except ValueError:  # its text may quote a password
        raise ConfigurationError(
            "the ledger's URL is not an address of a server; write redis://HOST:PORT/DATABASE or "
            "redis://:PASSWORD@HOST:PORT/DATABASE, in a password %40 for @, %23 for #, %2F for /"
        ) from None


async def check_durability(client: Any) -> str | None:
    """Why the server might forget what it acknowledged; None if it does not."""
    from redis.exceptions import ResponseError

    try:
        pipe = client.pipeline(transaction=False)
        for setting in _SETTINGS:
            pipe.config_get(setting)
        found = {name: value for each in await pipe.execute() for name, value in each.items()}
    except ResponseError as error:
        return f"its durability cannot be checked ({error})"
    if found.get("appendonly") != "yes":
        return f"appendonly is {found.get('appendonly', 'unknown')}"
    if found.get("appendfsync") != "always":
        return f"appendfsync is {found.get('appendfsync', 'unknown')}"
    if found.get("no-appendfsync-on-rewrite", "no") != "no":
        return "no-appendfsync-on-rewrite is yes"
    if str(found.get("maxmemory-policy", "")).startswith("allkeys"):
        return f"maxmemory-policy is {found['maxmemory-policy']}"
    return None


async def check_keys(client: Any, keys: Mapping[str, str]) -> str | None:
    """Which of the ledger's keys, by what each is, another program uses; None if none."""
    pipe = client.pipeline(transaction=False)
    for key in keys.values():
        pipe.type(key)
    for (item, key), kind in zip(keys.items(), await pipe.execute(), strict=True):
        if kind not in ("none", _KINDS.get(item, "hash")):
            return f"its key {key} holds a {kind} of another program"
    return None


def failures() -> tuple[type[Exception], ...]:
    """What the client library raises when the server does not do what was asked."""
    from redis.exceptions import RedisError

    return (RedisError, OSError)


def if_cancelled(error: Exception) -> None:
    """A cancellation that the client library turned into an error of the connection is one still.

    Seen with redis 8.1.0 when a task is cancelled while its answer arrives.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def told(error: Exception) -> str:
    """`error` in words; errors of our own script speak for themselves."""
    if is_of_another_ledger(error):
        return str(error).removeprefix("LEDGER ")
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def is_of_another_ledger(error: Exception) -> bool:
    """Whether our script said that this is not the ledger that was opened, or not all of it."""
    return str(error).startswith("LEDGER ")


def advice(error: Exception) -> str | None:
    """What helps, where it is not waiting for the server."""
    from redis.exceptions import AuthenticationError, OutOfMemoryError, ReadOnlyError

    if is_of_another_ledger(error):
        return LOST_LEDGER_ADVICE
    if isinstance(error, ReadOnlyError):
        return "give the address of the primary server: this one is its replica"
    if isinstance(error, OutOfMemoryError):
        return (
            "raise the server's maxmemory or delete ledgers that are done (six keys {NAME}:* "
            "each), then run the same command again"
        )
    if isinstance(error, AuthenticationError):
        return "write the server's user and password as redis://USER:PASSWORD@HOST:PORT/DATABASE"
    return None
