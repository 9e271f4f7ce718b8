"""The journal as a story: what was spent and set aside when, read as far as it has come.

`Timeline.read` goes on where it stopped, so that looking at a run every other second costs what has
been added since. Memory is bounded: so many moments, ever further apart, and what is open.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quantroute.ledger._journal import SCHEMA
from quantroute.storage import openable, read_only

__all__ = ["Moment", "Timeline", "journal_reader", "openable_journal"]


_FINEST_S: Final = 0.125
_MOST_MOMENTS: Final = 4_096
#: Records are stamped before they are written, in almost the same order. Further back than this it
#: is the clock that was set.
_SET_BACK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How things stood at `at_s` (Unix time). Pico-dollars; `cap_pusd` is None without a cap.

    `posted_pusd + pending_pusd` is what the cap bounds; `in_flight` are attempts without an end.
    """

    at_s: float
    posted_pusd: int
    pending_pusd: int
    cap_pusd: int | None
    in_flight: int


@contextlib.contextmanager
def journal_reader(path: Path) -> Iterator[sqlite3.Connection]:
    """A ledger's file for reading only, of one moment; a run that writes it goes on.

    Raises:
        JournalError: not a ledger, or one of a newer quantroute.
    """
    with read_only(path, SCHEMA) as connection:
        yield connection


@contextlib.contextmanager
def openable_journal(path: Path) -> Iterator[Path]:
    """A ledger's file to open in place of `path`; a copy of it where that cannot be written.

    Raises:
        JournalError: as `journal_reader`.
    """
    with openable(path, SCHEMA) as found:
        yield found


@dataclass(slots=True)
class Timeline:
    """What the journal tells of all accounts together.

    `peak_pusd` is the most that was ever posted and pending at once. Order is the journal's: where
    the clock was set back, time goes on from where it was.
    """

    peak_pusd: int = field(default=0, init=False)
    _width_s: float = field(default=_FINEST_S, init=False)
    _last_s: float = field(default=-math.inf, init=False)
    _set_back_s: float = field(default=0.0, init=False)
    _moments: dict[int, Moment] = field(default_factory=dict, init=False)
    _open: dict[str, int] = field(default_factory=dict, init=False)
    _sequence: int = field(default=0, init=False)
    _posted_pusd: int = field(default=0, init=False)
    _pending_pusd: int = field(default=0, init=False)
    _cap_pusd: int | None = field(default=None, init=False)

    def read(self, connection: sqlite3.Connection) -> tuple[Moment, ...]:
        """All moments, oldest first, the latest records of `connection` included."""
        for sequence, at_s, kind, entry_id, account, amount_pusd in connection.execute(
            "SELECT seq, at_s, kind, entry_id, account, amount_pusd FROM journal "
            "WHERE seq > ? AND kind IN ('reserved', 'posted', 'voided', 'cap set') ORDER BY seq",
            (self._sequence,),
        ):
            self._sequence = sequence
            if kind == "cap set":
                if account:  # one below the root's
                    continue
                self._cap_pusd = amount_pusd
            else:
                self._move(kind, entry_id, amount_pusd or 0)
            self._keep(self._in_order(at_s))
        return tuple(self._moments[key] for key in sorted(self._moments))

    def _in_order(self, at_s: float) -> float:
        if at_s + self._set_back_s < self._last_s - _SET_BACK_S:
            self._set_back_s = self._last_s - at_s
        self._last_s = max(self._last_s, at_s + self._set_back_s)
        return self._last_s

    def _move(self, kind: str, entry_id: str, amount_pusd: int) -> None:
        if kind == "reserved":
            self._open[entry_id] = amount_pusd
            self._pending_pusd += amount_pusd
        else:
            self._pending_pusd -= self._open.pop(entry_id, 0)
            self._posted_pusd += amount_pusd
        self.peak_pusd = max(self.peak_pusd, self._posted_pusd + self._pending_pusd)

    def _keep(self, at_s: float) -> None:
        self._moments[int(at_s / self._width_s)] = Moment(
            at_s=at_s,
            posted_pusd=self._posted_pusd,
            pending_pusd=self._pending_pusd,
            cap_pusd=self._cap_pusd,
            in_flight=len(self._open),
        )
        if len(self._moments) > _MOST_MOMENTS:
            self._width_s *= 2
            self._moments = {
                int(moment.at_s / self._width_s): moment for moment in self._moments.values()
            }
