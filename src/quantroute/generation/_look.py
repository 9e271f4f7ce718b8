"""A run looked at from outside: counts, standings, qualities and speeds, reading only.

For pages and programs that watch a run which another process is writing. `Onlooker` keeps samples
of how fast answers came; each look reads those that are new.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from quantroute.errors import DatasetError
from quantroute.generation._measure import (
    NOTHING_ACCEPTED,
    Accepted,
    accepted_of,
    qualities_of,
)
from quantroute.generation._qualities import EndpointQuality, merged_qualities
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowCounts, RowState, StoredRun
from quantroute.generation._row_sql import read_counts, read_runs
from quantroute.generation._run_lock import lock_files
from quantroute.ledger import (
    Moment,
    StatementLine,
    Timeline,
    journal_reader,
    read_statement,
    summed,
)
from quantroute.storage import is_locked

__all__ = ["Onlooker", "RunLook", "Speeds", "merged_looks"]

#: Samples per endpoint: quartiles are then within a hundredth or so of their rank.
_MOST_SAMPLES: Final = 4_096
_LIVE_BALANCE: Final = (
    "SELECT cap_pusd, posted_pusd, pending_pusd, held_pusd, held_entries FROM accounts "
    "WHERE path = ''"
)
#: While nothing is added to these, nothing that a look tells has changed: each attempt, and so each
#: end of a row, begins with a record in the journal; a row that fails without one is counted.
_MARK: Final = (
    "SELECT (SELECT max(seq) FROM journal), (SELECT max(rowid) FROM generation_turns), "
    "(SELECT max(changed_at_s) FROM generation_rows), "  # alone it would believe the clock
    "(SELECT count(*) FROM generation_rows WHERE state IN ('refused', 'gave_up'))"
)
_NEW_TURNS: Final = """
    SELECT t.rowid, t.endpoint, t.first_byte_s, t.total_s, t.output_tokens
    FROM generation_turns t JOIN generation_rows r USING (row_id)
    WHERE t.rowid > ? AND r.run_id = ? ORDER BY t.rowid
"""


@dataclass(slots=True)
class Speeds:
    """A sample of one endpoint's answers: seconds to the first byte, seconds in all, tokens/s."""

    answers: int = 0
    first_byte_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLook:
    """One look. Money is in pico-dollars; `cap_pusd` is None without a cap.

    `is_live` says that a process works on the run at this moment.
    """

    run: StoredRun
    is_live: bool
    cap_pusd: int | None
    posted_pusd: int
    pending_pusd: int
    held_pusd: int
    held_entries: int
    peak_pusd: int
    moments: tuple[Moment, ...]
    statement: tuple[StatementLine, ...]
    counts: tuple[RowCounts, ...]
    accepted: Mapping[str, Accepted]
    qualities: tuple[EndpointQuality, ...]
    speeds: Mapping[str, Speeds]


@dataclass(slots=True)
class Onlooker:
    """Looks at the run in `path` again and again; not safe for several threads at once.

    Args:
        path: the store's file.
        name: of the run; None takes the file's only one, or its last.
    """

    path: Path
    name: str | None = None
    _timeline: Timeline = field(default_factory=Timeline, init=False)
    _speeds: dict[str, Speeds] = field(default_factory=dict, init=False)
    _last_turn: int = field(default=0, init=False)
    _last: RunLook | None = field(default=None, init=False)
    _mark: tuple[int, ...] | None = field(default=None, init=False)
    _random: random.Random = field(default_factory=lambda: random.Random(0), init=False)

    def look(self) -> RunLook:
        """How the run stands now.

        Raises:
            JournalError: the file cannot be read as a run's.
            DatasetError: it holds no run, or none of that name.
        """
        with journal_reader(self.path) as connection:
            run = self._run(connection)
            is_live = self._is_live(run.name)
            mark = connection.execute(_MARK).fetchone()
            if self._last is not None and mark == self._mark and run == self._last.run:
                return replace(self._last, is_live=is_live)
            self._mark = mark
            cap, posted, pending, held, held_entries = connection.execute(
                _LIVE_BALANCE
            ).fetchone() or (None, 0, 0, 0, 0)
            statement = read_statement(connection)
            self._read_speeds(connection, run.run_id)
            self._last = RunLook(
                run=run,
                is_live=is_live,
                cap_pusd=cap,
                posted_pusd=posted,
                pending_pusd=pending,
                held_pusd=held,
                held_entries=held_entries,
                moments=self._timeline.read(connection),
                peak_pusd=self._timeline.peak_pusd,
                statement=statement,
                counts=read_counts(connection, run.run_id),
                accepted=accepted_of(connection, run.run_id),
                qualities=qualities_of(
                    connection, run=run.name, run_id=run.run_id, statement=statement
                ),
                speeds=dict(sorted(self._speeds.items())),
            )
            return self._last

    def _is_live(self, run: str) -> bool:
        """Whether anybody works on the run, or on a part of it, in this file."""
        return any(map(is_locked, lock_files(self.path, run)))

    def _run(self, connection: sqlite3.Connection) -> StoredRun:
        try:
            runs = read_runs(connection)
        except sqlite3.OperationalError:  # a ledger alone, or a run that has only just begun
            runs = ()
        named = [run for run in runs if run.name == self.name]
        if not named and self.name is not None and len(runs) != 1:
            known = ", ".join(run.name for run in runs) or "none"
            raise DatasetError(
                path=str(self.path), problem=f"no run is called {self.name!r}; known: {known}"
            )
        if not runs:
            raise DatasetError(path=str(self.path), problem="it holds no run yet")
        return named[0] if named else runs[-1]

    def _read_speeds(self, connection: sqlite3.Connection, run_id: int) -> None:
        for rowid, endpoint, first_byte_s, total_s, tokens in connection.execute(
            _NEW_TURNS, (self._last_turn, run_id)
        ):
            self._last_turn = rowid
            speeds = self._speeds.setdefault(endpoint, Speeds())
            speeds.answers += 1
            self._sample(speeds.first_byte_s, first_byte_s, speeds.answers)
            self._sample(speeds.total_s, total_s, speeds.answers)
            if total_s and tokens:
                self._sample(speeds.tokens_per_s, tokens / total_s, speeds.answers)

    def _sample(self, kept: list[float], value: float | None, seen: int) -> None:
        """Each of the values seen so far is kept with the same probability."""
        if value is None:
            return
        if len(kept) < _MOST_SAMPLES:
            kept.append(value)
        elif (place := self._random.randrange(seen)) < _MOST_SAMPLES:
            kept[place] = value


def merged_looks(looks: Sequence[RunLook]) -> RunLook:
    """One look out of those at the files of a run in shards.

    The cap is not known then: it is the shared ledger's.
    """
    if len(looks) == 1:
        return looks[0]
    moments = _merged_moments([look.moments for look in looks])
    counts = Counter[tuple[str, RowState, RowClass | None]]()
    for count in (count for look in looks for count in look.counts):
        counts[count.dataset, count.state, count.row_class] += count.rows
    accepted: dict[str, Accepted] = {}
    for dataset, found in (item for look in looks for item in look.accepted.items()):
        sofar = accepted.get(dataset, NOTHING_ACCEPTED)
        accepted[dataset] = Accepted(
            rows=sofar.rows + found.rows, output_tokens=sofar.output_tokens + found.output_tokens
        )
    return replace(
        looks[0],
        is_live=any(look.is_live for look in looks),
        cap_pusd=None,
        posted_pusd=sum(look.posted_pusd for look in looks),
        pending_pusd=sum(look.pending_pusd for look in looks),
        held_pusd=sum(look.held_pusd for look in looks),
        held_entries=sum(look.held_entries for look in looks),
        peak_pusd=max((item.posted_pusd + item.pending_pusd for item in moments), default=0),
        moments=moments,
        statement=summed(line for look in looks for line in look.statement),
        counts=tuple(
            RowCounts(dataset=dataset, state=state, row_class=row_class, rows=rows)
            for (dataset, state, row_class), rows in counts.items()
        ),
        accepted=accepted,
        qualities=merged_qualities([look.qualities for look in looks]),
        speeds=_merged_speeds(looks),
    )


def _merged_moments(parts: Sequence[Sequence[Moment]]) -> tuple[Moment, ...]:
    """The sum over the parts at each moment of any of them."""
    last: dict[int, Moment] = {}
    merged = []
    timed = ((moment, part) for part, moments in enumerate(parts) for moment in moments)
    for moment, part in sorted(timed, key=lambda item: item[0].at_s):
        last[part] = moment
        merged.append(
            Moment(
                at_s=moment.at_s,
                posted_pusd=sum(item.posted_pusd for item in last.values()),
                pending_pusd=sum(item.pending_pusd for item in last.values()),
                cap_pusd=None,
                in_flight=sum(item.in_flight for item in last.values()),
            )
        )
    return tuple(merged)


def _merged_speeds(looks: Sequence[RunLook]) -> dict[str, Speeds]:
    merged: dict[str, Speeds] = {}
    for name, part in (item for look in looks for item in look.speeds.items()):
        whole = merged.setdefault(name, Speeds())
        whole.answers += part.answers
        whole.first_byte_s += part.first_byte_s
        whole.total_s += part.total_s
        whole.tokens_per_s += part.tokens_per_s
    return dict(sorted(merged.items()))
