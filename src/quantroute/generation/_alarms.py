"""Is one endpoint worse than the others? Rates per class, and an alarm that may look all the time.

Answers are compared with answers of their kind only (`Stratum`: the same dataset, first turns with
first turns, about the same output limit): a provider that takes the long prompts, or came when
limits were low, is not worse for that. Of one kind, with k1 bad answers among an endpoint's n1 and
k2 among the n2 of all others,

    B = BB(k1, n1) x BB(k2, n2) / BB(k1 + k2, n1 + n2)
    BB(k, n) = B(k + 1/2, n - k + 1/2) / B(1/2, 1/2)

says how much better two rates, each learnt as it goes, have predicted the answers than one for
both. Without a difference B tends to 0 as answers come in; it is 1 where there is nothing to
compare. The product over all kinds is the evidence. An alarm is raised once it exceeds

    classes x endpoints x kinds / FALSE_ALARMS

so rarely, if there is no difference, that one may look after every answer, stop at any time, and
shift traffic by what came so far. A test for a fixed sample (Fisher's, say) promises nothing of
the kind. The price is patience: docs/design/0008-routing.md has it, and how rare false alarms are.

A difference too small to act upon is none: see `LEAST_RATIO` and `LEAST_DIFFERENCE`.

Pure. What it assumes: within a kind, prompts reach endpoints without regard to their difficulty.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quantroute.generation._qualities import EndpointQuality, Stratum, stratum_of
from quantroute.generation._quality import RowClass
from quantroute.generation._records import TurnRecord

__all__ = ["QualityAlarm", "QualityBook", "log_evidence", "quality_alarms"]

#: Share at most of runs with no difference between their endpoints that raise any alarm at all.
FALSE_ALARMS: Final = 0.01
LEAST_RATIO: Final = 1.5
LEAST_DIFFERENCE: Final = 0.01
#: Looking is free of charge for the error, but takes time.
_LOOK_EVERY: Final = 64
_LOG_B_HALF_HALF: Final = math.log(math.pi)
_BAD: Final = tuple(item for item in RowClass if item is not RowClass.GOOD)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityAlarm:
    """An endpoint whose answers are of a bad class credibly more often than those of the others.

    `hits` of its `answers` are of `row_class`; at the rates of `other_answers` of the same kinds
    elsewhere there would be `expected_hits`. Answers without their like elsewhere are left out.
    """

    endpoint: str
    row_class: RowClass
    answers: int
    hits: int
    other_answers: int
    expected_hits: float

    def __str__(self) -> str:
        return (
            f"{self.endpoint}: {self.hits / self.answers:.1%} of {self.answers:,} answers are "
            f"{self.row_class.value.replace('_', ' ')}, elsewhere "
            f"{self.expected_hits / self.answers:.1%} of {self.other_answers:,} of the same kinds"
        )


def log_evidence(hits: int, answers: int, other_hits: int, other_answers: int) -> float:
    """The natural logarithm of B above."""
    return (
        _log_bb(hits, answers)
        + _log_bb(other_hits, other_answers)
        - _log_bb(hits + other_hits, answers + other_answers)
    )


def _log_bb(hits: int, answers: int) -> float:
    misses = answers - hits
    return (
        math.lgamma(hits + 0.5)
        + math.lgamma(misses + 0.5)
        - math.lgamma(answers + 1.0)
        - _LOG_B_HALF_HALF
    )


_Kinds = defaultdict[Stratum, Counter[RowClass]]


def _no_answers() -> _Kinds:
    return defaultdict(Counter)


@dataclass(slots=True)
class _Page:
    kinds: _Kinds = field(default_factory=_no_answers)
    output_tokens: int = 0
    accepted_tokens: int = 0
    answered_pusd: int = 0


@dataclass(slots=True)
class QualityBook:
    """Counts answers per endpoint and class, and notices who is worse. Two microseconds each."""

    alarms: list[QualityAlarm] = field(default_factory=list, init=False)
    _pages: dict[str, _Page] = field(default_factory=dict, init=False)
    _whole: _Kinds = field(default_factory=_no_answers, init=False)
    _answers: int = field(default=0, init=False)
    _raised: set[tuple[str, RowClass]] = field(default_factory=set, init=False)

    def count(self, dataset: str, record: TurnRecord) -> tuple[QualityAlarm, ...]:
        """Take an answer in; alarms that it raised, each endpoint and class once."""
        page = self._pages.get(record.endpoint)
        if page is None:
            page = self._pages[record.endpoint] = _Page()
        row_class, tokens = record.row_class, record.output_tokens or 0
        stratum = stratum_of(
            dataset,
            turn=record.turn,
            revision=record.revision,
            max_output_tokens=record.max_output_tokens,
        )
        page.kinds[stratum][row_class] += 1
        page.output_tokens += tokens
        page.answered_pusd += record.cost_pusd or 0
        if row_class is RowClass.GOOD:
            page.accepted_tokens += tokens
        self._whole[stratum][row_class] += 1
        self._answers += 1
        if self._answers % _LOOK_EVERY or len(self._pages) < 2:
            return ()
        # At all of them: one that lost its traffic is judged by what the others show meanwhile.
        return tuple(
            alarm for name, found in self._pages.items() for alarm in self._look(name, found)
        )

    def qualities(self) -> tuple[EndpointQuality, ...]:
        """One frozen row per endpoint."""
        return tuple(
            EndpointQuality(
                endpoint=endpoint,
                by_stratum={stratum: dict(classes) for stratum, classes in page.kinds.items()},
                output_tokens=page.output_tokens,
                accepted_tokens=page.accepted_tokens,
                answered_pusd=page.answered_pusd,
            )
            for endpoint, page in sorted(self._pages.items())
        )

    def _look(self, endpoint: str, page: _Page) -> tuple[QualityAlarm, ...]:
        found = tuple(
            alarm
            for alarm in _alarms_at(
                endpoint, page.kinds, whole=self._whole, endpoints=len(self._pages)
            )
            if (endpoint, alarm.row_class) not in self._raised
        )
        self._raised.update((endpoint, alarm.row_class) for alarm in found)
        self.alarms.extend(found)
        return found


def quality_alarms(qualities: Iterable[EndpointQuality]) -> tuple[QualityAlarm, ...]:
    """The alarms that counts give as they stand, for runs that nobody watched."""
    rows = [item for item in qualities if item.by_stratum]
    whole = _no_answers()
    for item in rows:
        for stratum, classes in item.by_stratum.items():
            whole[stratum].update(classes)
    return tuple(
        alarm
        for item in rows
        for alarm in _alarms_at(item.endpoint, item.by_stratum, whole=whole, endpoints=len(rows))
    )


class _Pair(NamedTuple):
    """Answers of one kind, here and elsewhere, neither of them none."""

    here: Mapping[RowClass, int]
    both: Counter[RowClass]
    answers: int
    other_answers: int


def _alarms_at(
    endpoint: str,
    kinds: Mapping[Stratum, Mapping[RowClass, int]],
    *,
    whole: Mapping[Stratum, Counter[RowClass]],
    endpoints: int,
) -> Iterator[QualityAlarm]:
    pairs = [
        _Pair(here, whole[stratum], answers, others)
        for stratum, here in kinds.items()
        if (answers := sum(here.values())) and (others := whole[stratum].total() - answers)
    ]
    bar = math.log(len(_BAD) * endpoints * max(1, len(pairs)) / FALSE_ALARMS)
    for row_class in _BAD:
        alarm = _compared(endpoint, row_class, pairs)
        if alarm is not None and _log_evidence_of(row_class, pairs) > bar:
            yield alarm


def _compared(endpoint: str, row_class: RowClass, pairs: Iterable[_Pair]) -> QualityAlarm | None:
    """An endpoint's rate beside that of the others; None if it is no worse by what matters."""
    answers = hits = other_answers = 0
    expected_hits = 0.0
    for pair in pairs:
        here = pair.here.get(row_class, 0)
        answers += pair.answers
        hits += here
        other_answers += pair.other_answers
        expected_hits += pair.answers * (pair.both[row_class] - here) / pair.other_answers
    if not hits or not _is_worth_acting(hits / answers, expected_hits / answers):
        return None
    return QualityAlarm(
        endpoint=endpoint,
        row_class=row_class,
        answers=answers,
        hits=hits,
        other_answers=other_answers,
        expected_hits=expected_hits,
    )


def _log_evidence_of(row_class: RowClass, pairs: Iterable[_Pair]) -> float:
    return sum(
        log_evidence(
            hits := pair.here.get(row_class, 0),
            pair.answers,
            pair.both[row_class] - hits,
            pair.other_answers,
        )
        for pair in pairs
    )


def _is_worth_acting(rate: float, other_rate: float) -> bool:
    return rate >= LEAST_RATIO * other_rate and rate - other_rate >= LEAST_DIFFERENCE
