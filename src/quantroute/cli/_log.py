"""Events of a command: lines for people on stderr, and every one of them in the run's own file.

Never on stdout, where programs read. The file (`events.jsonl` in the run's folder) holds a JSON
object per line, listed in docs/events.md: state changes, failed attempts, stops, reconciliations.
Nothing is written per answer, so that it costs a run nothing that anyone could measure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import structlog

from quantroute.errors import ConfigurationError
from quantroute.secrets import EnvKey, Redactor

__all__ = ["EVENTS", "EventFile", "configure_logging"]

Event = MutableMapping[str, Any]

#: Events from before the run's folder is there: few, and the first ones tell the most.
_KEPT_BEFORE: Final = 256


class EventFile:
    """Where events are kept; any thread may speak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._redactor = Redactor()
        self._before: deque[str] = deque(maxlen=_KEPT_BEFORE)

    def forget(self) -> None:
        """Another command begins."""
        with self._lock:
            self._before.clear()

    @contextlib.contextmanager
    def written_to(self, path: Path, *, key: EnvKey) -> Iterator[None]:
        """While in the block, append events to `path`; those that came before it first.

        `key` is cut out of every text, whoever said it. A disk that is full ends the writing, not
        the run.
        Raises:
            ConfigurationError: the file cannot be opened.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be written: {error}") from error
        with self._lock:
            self._file, self._redactor = file, _redactor(key)
            earlier = list(self._before)
            self._before.clear()
            for line in earlier:
                self._write(line)
        try:
            yield
        finally:
            with self._lock:
                self._file = None
                with contextlib.suppress(OSError):
                    file.close()

    def keep(self, _: Any, level: str, event: Event) -> Event:
        """A structlog processor: writes the event as a line and passes it on."""
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": level,
            "event": event.get("event"),
            **event,
        }
        line = json.dumps(facts, default=str, ensure_ascii=False)
        with self._lock:
            if self._file is None:
                self._before.append(line)
            else:
                self._write(line)
        return event

    def _write(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(self._redactor.text(line) + "\n")
            self._file.flush()
        except OSError:
            self._file = None


EVENTS: Final = EventFile()
"""The command's events. One per process, as structlog's configuration is."""


def configure_logging(*, verbose: bool) -> None:
    """Warnings by default, every failed attempt with `--verbose`; colours on terminals only."""
    EVENTS.forget()

    def for_people(_: Any, level: str, event: Event) -> Event:
        if level == "info" and not verbose:
            raise structlog.DropEvent
        return event

    structlog.configure(
        processors=[
            EVENTS.keep,
            for_people,
            _redact,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Looked up for each line: a live view puts its own stream there while it is shown.
        logger_factory=lambda *_: structlog.PrintLogger(file=sys.stderr),
    )


def _redactor(key: EnvKey) -> Redactor:
    """Knows the keys that this process holds, also as they look inside JSON text."""
    held = {os.environ.get(name, "").strip() for name in (key.variable, EnvKey().variable)}
    return Redactor(tuple(form for text in held for form in (text, json.dumps(text)[1:-1])))


def _redact(_: Any, __: str, event: Event) -> Event:
    """Key material out of every text, whoever said it."""
    redactor = EnvKey().redactor()
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = redactor.text(value)
    return event
