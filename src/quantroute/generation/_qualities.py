"""What came from each endpoint: answers by class and kind, tokens, money."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from quantroute.client import DELEGATED
from quantroute.generation._quality import RowClass

__all__ = ["EndpointQuality", "Stratum", "merged_qualities", "stratum_of", "with_spending"]


class Stratum(NamedTuple):
    """Answers that can be compared: of one dataset, asked for in about the same way.

    `limit_step` is the output limit in steps of a factor of 1.4.
    """

    dataset: str
    is_first_turn: bool
    is_redone: bool
    limit_step: int


def stratum_of(dataset: str, *, turn: int, revision: int, max_output_tokens: int) -> Stratum:
    """Where an answer belongs."""
    return Stratum(dataset, turn == 0, revision > 0, _limit_step(max_output_tokens))


@functools.lru_cache(maxsize=1_024)
def _limit_step(max_output_tokens: int) -> int:
    return round(2.0 * math.log2(max(1, max_output_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuality:
    """What came from one endpoint. Units: answers, tokens, pico-dollars.

    `answered_pusd` was billed for its answers, `spent_pusd` for everything there, attempts that
    gave nothing included (None if only answers are known).
    """

    endpoint: str
    by_stratum: Mapping[Stratum, Mapping[RowClass, int]]
    output_tokens: int
    accepted_tokens: int
    answered_pusd: int
    spent_pusd: int | None = None

    @property
    def classes(self) -> Counter[RowClass]:
        """Answers by class."""
        return _all_classes(self.by_stratum)

    @property
    def answers(self) -> int:
        """Answers of any class."""
        return self.classes.total()

    @property
    def accepted(self) -> int:
        """Good answers."""
        return self.classes[RowClass.GOOD]

    @property
    def cost_pusd(self) -> int:
        """Everything that is known to have been paid there."""
        return self.answered_pusd if self.spent_pusd is None else self.spent_pusd

    def rate(self, row_class: RowClass) -> float:
        """Share of the answers that are of a class."""
        classes = self.classes
        return classes[row_class] / classes.total() if classes else 0.0


def _all_classes(by_stratum: Mapping[Stratum, Mapping[RowClass, int]]) -> Counter[RowClass]:
    found: Counter[RowClass] = Counter()
    for classes in by_stratum.values():
        found.update(classes)
    return found


def merged_qualities(
    found: Sequence[tuple[EndpointQuality, ...]],
) -> tuple[EndpointQuality, ...]:
    """One line per endpoint out of those of several files."""
    merged: dict[str, EndpointQuality] = {}
    for quality in (quality for part in found for quality in part):
        before = merged.get(quality.endpoint)
        if before is not None:
            quality = EndpointQuality(
                endpoint=quality.endpoint,
                by_stratum=_merged(before.by_stratum, quality.by_stratum),
                output_tokens=before.output_tokens + quality.output_tokens,
                accepted_tokens=before.accepted_tokens + quality.accepted_tokens,
                answered_pusd=before.answered_pusd + quality.answered_pusd,
                spent_pusd=before.cost_pusd + quality.cost_pusd,
            )
        merged[quality.endpoint] = quality
    return tuple(merged.values())


def _merged(
    one: Mapping[Stratum, Mapping[RowClass, int]], other: Mapping[Stratum, Mapping[RowClass, int]]
) -> dict[Stratum, Counter[RowClass]]:
    return {
        stratum: Counter(one.get(stratum)) + Counter(other.get(stratum))
        for stratum in one.keys() | other.keys()
    }


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
    endpoint="", by_stratum={}, output_tokens=0, accepted_tokens=0, answered_pusd=0
)
