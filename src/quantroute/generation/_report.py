"""How a run stands and how it ended, as frozen values."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quantroute.client import Attendance
from quantroute.errors import (
    AccountError,
    BudgetExceeded,
    CreditsExhausted,
    KeyRejected,
    NoEligibleEndpoint,
    QuantrouteError,
    RegistryError,
)
from quantroute.generation._alarms import QualityAlarm
from quantroute.generation._deadline import Pace
from quantroute.generation._qualities import EndpointQuality
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowCounts, RowState, TurnRecord

__all__ = [
    "Interrupted",
    "Progress",
    "RunReport",
    "StopReason",
    "Tally",
    "stop_reason",
    "truncation_rates",
]


class StopReason(enum.Enum):
    """Why a run ended. Everything but DONE can be resumed by running it again."""

    DONE = "done"
    CAP_REACHED = "cap reached"
    OUT_OF_CREDITS = "out of credits"
    KEY_REJECTED = "key rejected"
    ACCOUNT = "account trouble"
    NO_ENDPOINT = "no endpoint"
    INTERRUPTED = "interrupted"


class Interrupted(QuantrouteError):
    """Somebody asked the run to stop."""


def stop_reason(error: QuantrouteError) -> StopReason | None:
    """The reason an error stands for; None if the error must reach the caller as it is."""
    match error:
        case BudgetExceeded():
            return StopReason.CAP_REACHED
        case CreditsExhausted():
            return StopReason.OUT_OF_CREDITS
        case KeyRejected():
            return StopReason.KEY_REJECTED
        case AccountError():
            return StopReason.ACCOUNT
        case NoEligibleEndpoint() | RegistryError():
            return StopReason.NO_ENDPOINT
        case Interrupted():
            return StopReason.INTERRUPTED
        case _:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run in one moment. Rows are counted since this start, `resumed` excepted.

    Attributes: `finished` rows with an end of their own, `resumed` rows that were
    done before, `duplicates` prompts that occurred before in this run, `live` rows under way,
    `classes` answers per class, `answers_by_endpoint` answers and the good ones among them,
    `alarms` endpoints that are worse than the others, `pace` how it stands with its deadline.
    """

    finished: int
    resumed: int
    duplicates: int
    refused: int
    gave_up: int
    live: int
    answers: int
    output_tokens: int
    classes: Mapping[RowClass, int]
    is_stopping: bool
    answers_by_endpoint: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    alarms: tuple[QualityAlarm, ...] = ()
    pace: Pace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """How a run ended.

    `counts` and `spent_pusd` (posted, pico-dollars) are of the whole run, all starts together;
    the other figures are of this start. `strays` are stored rows that no prompt of this start asked
    for (the prompt file was changed); None if not all prompts were read, or the run is a shard.
    `not_begun` prompts were passed over, since a redo begins no new rows.
    `cut_off` rows were still under way when the time to drain was over; what was in flight the
    ledger holds as unknown.
    `attendance` says what the key had spent before and after, and which charges were found out
    meanwhile.
    `endpoints` are of the whole run (left out if this start got no answer), `alarms` of this start.
    """

    run: str
    stop_reason: StopReason
    error: QuantrouteError | None
    finished: int
    resumed: int
    duplicates: int
    refused: int
    gave_up: int
    skipped: int
    cut_off: int
    strays: int | None
    counts: tuple[RowCounts, ...]
    spent_pusd: int
    elapsed_s: float
    attendance: Attendance = field(default_factory=Attendance)
    endpoints: tuple[EndpointQuality, ...] = ()
    alarms: tuple[QualityAlarm, ...] = ()
    deadline_s: float | None = None
    not_begun: int = 0

    @property
    def is_late(self) -> bool:
        """Whether it took longer than its deadline."""
        return self.deadline_s is not None and self.elapsed_s > self.deadline_s

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has its rows, refused ones aside."""
        return self.stop_reason is StopReason.DONE and not self.gave_up

    @property
    def truncation_rates(self) -> Mapping[str, float]:
        """Share of finished rows that the output limit cut, per dataset: raise it if this grows."""
        return truncation_rates(self.counts)


def truncation_rates(counts: Iterable[RowCounts]) -> dict[str, float]:
    """Share of finished rows that were cut by the output limit, per dataset."""
    finished: Counter[str] = Counter()
    truncated: Counter[str] = Counter()
    for count in counts:
        if count.state is RowState.FINISHED:
            finished[count.dataset] += count.rows
            if count.row_class is RowClass.TRUNCATED:
                truncated[count.dataset] += count.rows
    return {dataset: truncated[dataset] / rows for dataset, rows in finished.items()}


@dataclass(slots=True)
class Tally:
    """Running counts of one start."""

    ends: Counter[RowState] = field(default_factory=Counter)
    classes: Counter[RowClass] = field(default_factory=Counter)
    resumed: int = 0
    duplicates: int = 0
    skipped: int = 0
    cut_off: int = 0
    answers: int = 0
    output_tokens: int = 0
    by_endpoint: dict[str, tuple[int, int]] = field(default_factory=dict)
    answer_s: float = 0.0

    def count_answer(self, record: TurnRecord) -> None:
        """An answer came in."""
        self.answers += 1
        self.classes[record.row_class] += 1
        answers, good = self.by_endpoint.get(record.endpoint, (0, 0))
        is_good = record.row_class is RowClass.GOOD
        self.by_endpoint[record.endpoint] = (answers + 1, good + is_good)
        self.output_tokens += record.output_tokens or 0
        self.answer_s += record.total_s or 0.0

    def progress(
        self,
        *,
        live: int,
        is_stopping: bool,
        alarms: tuple[QualityAlarm, ...] = (),
        pace: Pace | None = None,
    ) -> Progress:
        """A frozen copy."""
        return Progress(
            finished=self.ends[RowState.FINISHED],
            resumed=self.resumed,
            duplicates=self.duplicates,
            refused=self.ends[RowState.REFUSED],
            gave_up=self.ends[RowState.GAVE_UP],
            live=live,
            answers=self.answers,
            output_tokens=self.output_tokens,
            classes=dict(self.classes),
            is_stopping=is_stopping,
            answers_by_endpoint=dict(self.by_endpoint),
            alarms=alarms,
            pace=pace,
        )
