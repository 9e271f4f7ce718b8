"""Everything the page shows, gathered from a run's folder by reading alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quantroute.errors import DatasetError
from quantroute.generation import Onlooker, QualityAlarm, RunLook, merged_looks, quality_alarms
from quantroute.report._eventlog import EventLog
from quantroute.report._extras import Extras, find_extras
from quantroute.report._facts import RunFacts, read_facts

__all__ = ["FACTS_FILE", "Picture", "RunWatcher"]

FACTS_FILE: Final = "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run at one moment. `absent` says in sentences what the page cannot show, and why."""

    look: RunLook
    events: EventLog
    facts: RunFacts | None
    extras: Extras
    alarms: tuple[QualityAlarm, ...]
    absent: tuple[str, ...]
    at: dt.datetime


@dataclass(slots=True)
class RunWatcher:
    """Takes pictures of a run; each costs what has changed since the last one.

    Args:
        folder: the run's, with its events and facts.
        stores: its store; of a run in shards those of all of them.
        name: the run's name in the store; None takes the only one.
        events: another file of events.
        find: reads the files of other stages; by default those at the usual places.
    """

    folder: Path
    stores: Sequence[Path]
    name: str | None = None
    events: Path | None = None
    find: Callable[[Path], Extras] = find_extras
    _onlookers: tuple[Onlooker, ...] = field(init=False)
    _log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self._onlookers = tuple(Onlooker(store, self.name) for store in self.stores)
        self._log = EventLog()

    def picture(self, *, at: dt.datetime) -> Picture:
        """How the run stands.

        Raises:
            JournalError, DatasetError: there is no run that could be read.
        """
        look = merged_looks([onlooker.look() for onlooker in self._onlookers])
        for path in _event_files(self.folder) if self.events is None else (self.events,):
            self._log.read(path)
        facts, problem = _facts(self.folder / FACTS_FILE)
        extras = self.find(self.folder)
        return Picture(
            look=look,
            events=self._log,
            facts=facts,
            extras=extras,
            alarms=quality_alarms(look.qualities),
            absent=tuple(_absent(self._log, problem, extras)),
            at=at,
        )


def _event_files(folder: Path) -> list[Path]:
    """The run's own, and those of workers that had a shard."""
    patterns = ("events.jsonl", "events-shard-*.jsonl", "shard-*-of-*/events.jsonl")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _facts(path: Path) -> tuple[RunFacts | None, str]:
    if not path.is_file():
        return None, f"there is no {path.name}"
    try:
        return read_facts(path), ""
    except DatasetError as error:
        return None, str(error)


def _absent(log: EventLog, facts_problem: str, extras: Extras) -> list[str]:
    said = []
    if facts_problem:
        said.append(
            f"Verdicts, evidence and targets: {facts_problem}. A start of "
            "`quantroute generate` writes it; endpoints below are those that served."
        )
    if not log.is_there:
        said.append(
            "Errors and warnings: there is no events.jsonl. It may have been written "
            "elsewhere with --log-json; name it with --events."
        )
    if log.unreadable_lines:
        said.append(f"{log.unreadable_lines:,} lines of the events could not be read.")
    for name, found, made_by in (
        ("Audit", extras.audit, "`quantroute audit`, --audit FILE"),
        ("Training", extras.training, "the trainer's metrics.jsonl, --training FILE"),
        ("Acceptance", extras.acceptance, "the evaluation's JSON, --acceptance FILE"),
    ):
        if found is None:
            said.append(f"{name}: no file ({made_by}).")
        elif found.problem:
            said.append(f"{name}: {found.path.name} {found.problem}.")
    return said
