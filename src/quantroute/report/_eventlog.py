"""What `events.jsonl` tells, read as far as it has come; lines that make no sense are counted."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quantroute.report._scale import usd_text

__all__ = ["EventLog", "FailureKind", "Happening"]

_MOST_HAPPENINGS: Final = 60
_MOST_TEXT: Final = 400
#: What a reader of the page wants to see one by one, besides warnings and errors.
_TOLD: Final = frozenset({"run begins", "run stops", "run ends", "endpoint answers again"})
_MOST_LINE_BYTES: Final = 1 << 20
_MOST_KINDS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event, with its facts in a line of text."""

    at: str
    level: str
    event: str
    facts: str


@dataclass(slots=True)
class FailureKind:
    """Attempts that failed in one way; `example` is what the last one said."""

    kind: str
    status: str
    count: int = 0
    example: str = ""


@dataclass(slots=True)
class EventLog:
    """Counts failed attempts by kind, keeps the latest happenings, of one file or of several."""

    failures: dict[tuple[str, str], FailureKind] = field(default_factory=dict, init=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)
    happenings: deque[Happening] = field(
        default_factory=lambda: deque(maxlen=_MOST_HAPPENINGS), init=False
    )
    unreadable_lines: int = field(default=0, init=False)
    stop_reason: str = field(default="", init=False)
    _offsets: dict[Path, int] = field(default_factory=dict, init=False)

    @property
    def is_there(self) -> bool:
        """Whether there was a file to read."""
        return bool(self._offsets)

    def read(self, path: Path) -> None:
        """Take in what was written since; a line that is being written waits for the next time.

        A file that has become shorter is another one under the same name: it is read anew, and
        what the old one told stays counted.
        """
        try:
            with path.open("rb") as file:
                offset = self._offsets.get(path, 0)
                if file.seek(0, 2) < offset:
                    offset = 0
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    self._take(line)
                self._offsets[path] = offset
        except OSError:
            return

    def _take(self, line: bytes) -> None:
        try:
            facts = json.loads(line[:_MOST_LINE_BYTES])
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            self.unreadable_lines += bool(line.strip())
            return
        event = str(facts.get("event"))[:_MOST_TEXT]
        if event in self.counts or len(self.counts) < _MOST_KINDS:
            self.counts[event] += 1
        if event == "attempt failed":
            self._count_failure(facts)
        elif event == "run begins":
            self.stop_reason = ""
        elif event == "run ends":
            self.stop_reason = str(facts.get("stop_reason", ""))[:_MOST_TEXT]
        if event in _TOLD or facts.get("level") in ("warning", "error", "critical"):
            self.happenings.append(_happening(event, facts))

    def _count_failure(self, facts: Mapping[str, Any]) -> None:
        status = facts.get("status")
        key = (_short(facts.get("kind", "unknown")), "" if not status else _short(status))
        if key not in self.failures and len(self.failures) >= _MOST_KINDS:
            key = ("others", "")
        found = self.failures.setdefault(key, FailureKind(kind=key[0], status=key[1]))
        found.count += 1
        found.example = str(facts.get("problem", ""))[:_MOST_TEXT]


def _short(value: object) -> str:
    return str(value)[:60]


def _happening(event: str, facts: Mapping[str, Any]) -> Happening:
    shown = ", ".join(
        f"{name.removesuffix('_pusd')} {usd_text(value)}"
        if name.endswith("_pusd") and isinstance(value, int)
        else f"{name} {value}"
        for name, value in facts.items()
        if name not in ("at", "level", "event", "run") and value not in (None, "")
    )
    return Happening(
        at=_short(facts.get("at", "")),
        level=_short(facts.get("level", "")),
        event=event,
        facts=shown[:_MOST_TEXT],
    )
