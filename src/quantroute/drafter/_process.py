"""A trainer as a process of its own: started, listened to, stopped in an orderly way."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Final

from quantroute.drafter._launch import Launch

__all__ = ["Ended", "follow"]

_KEPT_LINES: Final = 12
_PADDING: Final = re.compile(" {40,}")  # no code is indented so far
_STOP_WITHIN_S: Final = 150  # the trainer may take two minutes to save


class Ended:
    """How it ended: the exit status, the last lines it said, whether we were told to stop."""

    def __init__(self, status: int, last_lines: tuple[str, ...], *, was_stopped: bool) -> None:
        self.status = status
        self.last_lines = last_lines
        self.was_stopped = was_stopped


def follow(
    launch: Launch, log: Path, *, on_line: Callable[[str], None], keep: tuple[int, ...] = ()
) -> Ended:
    """Run the command until it ends; every line goes to `log` and to `on_line`.

    The first SIGINT or SIGTERM is passed on, once, so that the trainer can save; the second kills
    it. `keep` are file descriptors the child inherits: a lock held through them lasts as long as
    the trainer, even if this process is killed.
    """
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 - the command is ours, the interpreter the user's
            launch.argv,
            env=os.environ | launch.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,  # and with it, a progress bar's carriage return ends a line
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl+C reaches it through us, and once
            pass_fds=keep,
        )
        with _passing_signals_on(process) as told:
            assert process.stdout is not None
            for line in _lines(process.stdout):
                file.write(f"{line}\n")
                file.flush()
                last.append(line)
                on_line(line)
            status = process.wait()
    return Ended(status, tuple(last), was_stopped=told.is_set())


def _lines(output: IO[str]) -> Iterator[str]:
    """Without empty lines, the bars that are drawn over and over, and a wide terminal's blanks."""
    with output:
        for line in output:
            text = _PADDING.sub("  ", line.rstrip())
            if text and "━" not in text and "it/s]" not in text:
                yield text


@contextlib.contextmanager
def _passing_signals_on(process: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Hand signals to the trainer's whole group while the block runs; in the main thread only."""
    told = threading.Event()

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        first = not told.is_set()
        told.set()
        _signal_group(process, signal.SIGINT if first else signal.SIGKILL)

    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    except BaseException:
        _signal_group(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_WITHIN_S)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
