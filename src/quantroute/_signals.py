"""Ctrl+C as a request: the first signal drains, the second leaves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

__all__ = ["STOP_SIGNALS", "on_stop_signals"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_stop_signals(
    first: Callable[[], None],
    second: Callable[[], object],
    *,
    signals: Iterable[signal.Signals] = STOP_SIGNALS,
) -> Iterator[None]:
    """While in the block, the first signal calls `first`, each later one `second`.

    Needs the main thread's event loop to be running. The handlers that were there before are put
    back.
    """
    loop = asyncio.get_running_loop()
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping:
            second()
            return
        is_stopping = True
        first()

    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: it was not set from Python, and cannot be put back
                signal.signal(number, handler)
