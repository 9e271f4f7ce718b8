"""Events of the package: through the application's structlog if it is configured, else `logging`.

structlog prints to stdout when nobody has configured it. A library must not: a script's stdout is
its output. So until then events go to the standard `logging` module, as text, under the name of the
part that speaks: silent below WARNING, on stderr above, and wherever the application sends them.

structlog is not imported here: it brings rich with it, for tracebacks in colour that a library does
not print. An application that has configured it has imported it.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["EventLog", "get_logger"]

#: Frames between whoever speaks and `logging`: `_say`, and the method of the level.
_FRAMES: Final = 3
_NUMBERS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class EventLog:
    """One part's events; each call takes the event in plain words and facts as keywords."""

    name: str

    def debug(self, event: str, **facts: Any) -> None:
        self._say("debug", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self._say("info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._say("warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._say("error", event, facts)

    def _say(self, level: str, event: str, facts: dict[str, Any]) -> None:
        # Looked up at each event: an application may configure structlog after the import.
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            getattr(structlog.get_logger(self.name), level)(event, **facts)
            return
        logger, number = logging.getLogger(self.name), _NUMBERS[level]
        if logger.isEnabledFor(number):
            logger.log(number, "%s", _as_text(event, facts), stacklevel=_FRAMES)


def _as_text(event: str, facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in {"event": event, **facts}.items())


def get_logger(name: str) -> EventLog:
    """The event log of a part, such as `quantroute.client`."""
    return EventLog(name)
