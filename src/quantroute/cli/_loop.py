"""The event loop of a command: uvloop's where it is installed and nobody declined it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, TypeVar

__all__ = ["choose", "loop_name", "run"]

T = TypeVar("T")

_is_declined: ContextVar[bool] = ContextVar("uvloop is declined", default=False)


def choose(*, uvloop: bool) -> None:
    """Whether commands of this context use uvloop, if it is there."""
    _is_declined.set(not uvloop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on the loop that was chosen. Of a library's users nobody is forced."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def loop_name() -> str:
    """The loop that `run` uses, for people: "uvloop 0.21.0", or "asyncio"."""
    if _factory() is None:
        return "asyncio"
    return f"uvloop {version('uvloop')}"


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if _is_declined.get():
        return None
    try:
        import uvloop
    except ImportError:  # an extra, and not there for every system
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
