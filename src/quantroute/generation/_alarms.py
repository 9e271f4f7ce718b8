"""Is one endpoint worse than the others? Rates per class, and an alarm that may look all the time.

For an endpoint with k1 bad answers of n1, and the others together with k2 of n2, the evidence that
the two rates differ is

    E = BB(k1, n1) x BB(k2, n2) / max over p of p^k (1-p)^(n-k),      k = k1 + k2, n = n1 + n2

with BB(k, n) = B(k + 1/2, n - k + 1/2) / B(1/2, 1/2): how well two rates, each learnt as it goes,
have predicted the answers, against the best single rate in hindsight. If there is one rate for all,
the numerator over the *true* likelihood is a martingale that starts at 1, and the denominator is at
least the true likelihood; so (Ville) E ever exceeds 1/a with probability a at most: however often
one looks, whenever one stops, and also when routing shifts the traffic according to what came so
far. A test for a fixed sample (Fisher's, say) promises nothing of the kind. The price is patience:
see docs/design/0008-routing.md.

Classes and endpoints share the error: E must exceed their number over `FALSE_ALARMS`. A difference
too small to act upon is none: see `LEAST_RATIO` and `LEAST_DIFFERENCE`.

Pure. What it assumes: prompts reach endpoints without regard to their difficulty, as they do here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from quantroute.client import DELEGATED
from quantroute.generation._quality import RowClass
from quantroute.generation._records import TurnRecord

__all__ = [
    "EndpointQuality",
    "QualityAlarm",
    "QualityBook",
    "log_evidence",
    "quality_alarms",
    "with_spending",
]

#: Probability that a run with no difference between its endpoints raises any alarm at all.
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

    `hits` of its `answers` are of `row_class`; `other_hits` of the `other_answers` elsewhere.
    """

    endpoint: str
    row_class: RowClass
    answers: int
    hits: int
    other_answers: int
    other_hits: int

    def __str__(self) -> str:
        return (
            f"{self.endpoint}: {self.hits / self.answers:.1%} of {self.answers:,} answers are "
            f"{self.row_class.value.replace('_', ' ')}, elsewhere "
            f"{self.other_hits / self.other_answers:.1%} of {self.other_answers:,}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuality:
    """What came from one endpoint. Units: answers, tokens, pico-dollars.

    `answered_pusd` was billed for its answers, `spent_pusd` for everything there, attempts that
    gave nothing included (None if only answers are known).
    """

    endpoint: str
    classes: Mapping[RowClass, int]
    output_tokens: int
    accepted_tokens: int
    answered_pusd: int
    spent_pusd: int | None = None

    @property
    def answers(self) -> int:
        """Answers of any class."""
        return sum(self.classes.values())

    @property
    def accepted(self) -> int:
        """Good answers."""
        return self.classes.get(RowClass.GOOD, 0)

    @property
    def cost_pusd(self) -> int:
        """Everything that is known to have been paid there."""
        return self.answered_pusd if self.spent_pusd is None else self.spent_pusd

    def rate(self, row_class: RowClass) -> float:
        """Share of the answers that are of a class."""
        return self.classes.get(row_class, 0) / self.answers if self.answers else 0.0


def log_evidence(hits: int, answers: int, other_hits: int, other_answers: int) -> float:
    """The natural logarithm of E above."""
    both_hits, both = hits + other_hits, answers + other_answers
    one_rate = sum(
        count * math.log(count / both) for count in (both_hits, both - both_hits) if count
    )
    return _log_bb(hits, answers) + _log_bb(other_hits, other_answers) - one_rate


def _log_bb(hits: int, answers: int) -> float:
    misses = answers - hits
    return (
        math.lgamma(hits + 0.5)
        + math.lgamma(misses + 0.5)
        - math.lgamma(answers + 1.0)
        - _LOG_B_HALF_HALF
    )


@dataclass(slots=True)
class _Page:
    classes: Counter[RowClass] = field(default_factory=Counter)
    answers: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    answered_pusd: int = 0


@dataclass(slots=True)
class QualityBook:
    """Counts answers per endpoint and class, and notices who is worse. About a microsecond each."""

    alarms: list[QualityAlarm] = field(default_factory=list, init=False)
    _pages: dict[str, _Page] = field(default_factory=dict, init=False)
    _classes: Counter[RowClass] = field(default_factory=Counter, init=False)
    _answers: int = field(default=0, init=False)
    _raised: set[tuple[str, RowClass]] = field(default_factory=set, init=False)

    def count(self, record: TurnRecord) -> tuple[QualityAlarm, ...]:
        """Take an answer in; alarms that it raised, each endpoint and class once."""
        page = self._pages.get(record.endpoint)
        if page is None:
            page = self._pages[record.endpoint] = _Page()
        row_class, tokens = record.row_class, record.output_tokens or 0
        page.classes[row_class] += 1
        page.answers += 1
        page.output_tokens += tokens
        page.answered_pusd += record.cost_pusd or 0
        if row_class is RowClass.GOOD:
            page.accepted_tokens += tokens
        self._classes[row_class] += 1
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
                classes=dict(page.classes),
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
                endpoint,
                page.classes,
                page.answers,
                whole=self._classes,
                whole_answers=self._answers,
                endpoints=len(self._pages),
            )
            if (endpoint, alarm.row_class) not in self._raised
        )
        self._raised.update((endpoint, alarm.row_class) for alarm in found)
        self.alarms.extend(found)
        return found


def quality_alarms(qualities: Iterable[EndpointQuality]) -> tuple[QualityAlarm, ...]:
    """The alarms that counts give as they stand, for runs that nobody watched."""
    rows = [item for item in qualities if item.answers]
    whole: Counter[RowClass] = Counter()
    for item in rows:
        whole.update(item.classes)
    return tuple(
        alarm
        for item in rows
        for alarm in _alarms_at(
            item.endpoint,
            item.classes,
            item.answers,
            whole=whole,
            whole_answers=whole.total(),
            endpoints=len(rows),
        )
    )


def _alarms_at(
    endpoint: str,
    classes: Mapping[RowClass, int],
    answers: int,
    *,
    whole: Mapping[RowClass, int],
    whole_answers: int,
    endpoints: int,
) -> Iterator[QualityAlarm]:
    others = whole_answers - answers
    bar = math.log(len(_BAD) * endpoints / FALSE_ALARMS)
    for row_class, hits in classes.items():
        if row_class is RowClass.GOOD or not others or not hits:
            continue
        other_hits = whole[row_class] - hits
        if not _is_worth_acting(hits / answers, other_hits / others):
            continue
        if log_evidence(hits, answers, other_hits, others) > bar:
            yield QualityAlarm(
                endpoint=endpoint,
                row_class=row_class,
                answers=answers,
                hits=hits,
                other_answers=others,
                other_hits=other_hits,
            )


def _is_worth_acting(rate: float, other_rate: float) -> bool:
    return rate >= LEAST_RATIO * other_rate and rate - other_rate >= LEAST_DIFFERENCE


def with_spending(
    qualities: Iterable[EndpointQuality], spent_pusd: Mapping[str, int]
) -> tuple[EndpointQuality, ...]:
    """The same with what was paid at each endpoint in all, and a row for those that gave nothing.

    Args:
        spent_pusd: posted per endpoint, attempts without an answer included (pico-dollars).
    """
    by_name = {item.endpoint: item for item in qualities}
    spent = dict(spent_pusd)
    if DELEGATED in spent:  # entries are written before anybody serves: rows say who it was
        explained = sum(
            max(0, item.answered_pusd - spent.get(name, 0)) for name, item in by_name.items()
        )
        spent[DELEGATED] = max(0, spent[DELEGATED] - explained)
    rows = []
    for endpoint in sorted(by_name.keys() | {name for name, amount in spent.items() if amount}):
        known = by_name.get(endpoint) or _NOTHING
        rows.append(
            replace(
                known,
                endpoint=endpoint,
                spent_pusd=max(spent.get(endpoint, 0), known.answered_pusd),
            )
        )
    return tuple(rows)


_NOTHING: Final = EndpointQuality(
    endpoint="", classes={}, output_tokens=0, accepted_tokens=0, answered_pusd=0
)
