"""Events of the package: through the application's structlog if it is configured, else `logging`.

structlog prints to stdout when nobody has configured it. A library must not: a script's stdout is
its output. So until then events go to the standard `logging` module, as text, under the name of the
part that speaks: silent below WARNING, on stderr above, and wherever the application sends them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

__all__ = ["EventLog", "get_logger"]


class _Sink(Protocol):
    def debug(self, event: str, **facts: Any) -> Any: ...
    def info(self, event: str, **facts: Any) -> Any: ...
    def warning(self, event: str, **facts: Any) -> Any: ...
    def error(self, event: str, **facts: Any) -> Any: ...


def _as_text(logger: logging.Logger) -> _Sink:
    sink: _Sink = structlog.wrap_logger(
        logger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return sink


@dataclass(slots=True)
class EventLog:
    """One part's events; each call takes the event in plain words and facts as keywords."""

    name: str
    _plain: _Sink = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._plain = _as_text(logging.getLogger(self.name))

    def debug(self, event: str, **facts: Any) -> None:
        self._sink().debug(event, **facts)

    def info(self, event: str, **facts: Any) -> None:
        self._sink().info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._sink().warning(event, **facts)

    def error(self, event: str, **facts: Any) -> None:
        self._sink().error(event, **facts)

    def _sink(self) -> _Sink:
        # Looked up at each event: an application may configure structlog after the import.
        if structlog.is_configured():
            sink: _Sink = structlog.get_logger(self.name)
            return sink
        return self._plain


def get_logger(name: str) -> EventLog:
    """The event log of a part, such as `quantroute.client`."""
    return EventLog(name)
