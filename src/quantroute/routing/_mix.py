"""The cheapest endpoints that are together fast enough. Pure.

By Little's law an endpoint that takes `slots` requests at once and needs `answer_s` for each gives
`slots / answer_s` answers a second. Filled in the order of cost, as the router does, the first
endpoints whose rates add up to what is needed are the cheapest mix. The cheapest of them has all
its slots, since being early costs nothing there; the last only as many as it takes.

This fails in one case: all slots of the run are used up by cheap but slow endpoints. Then the
cheapest ones are left out, one after the other, until those that remain are fast enough with the
slots there are; of the mixes that are, the cheapest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from quantroute.domain import EndpointKey

#: Rates are sums of quotients; a difference in the last digit is none.
_HAIR: Final = 1e-9

__all__ = ["Mix", "Supply", "cheapest_mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What one endpoint can give: `slots` requests at once, `answer_s` seconds each.

    `cost` is of one accepted row, in any unit that is the same for all.
    """

    key: EndpointKey
    cost: float
    slots: int
    answer_s: float

    @property
    def slot_rate_per_s(self) -> float:
        """Answers a second of one slot."""
        return 1.0 / self.answer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How many requests each endpoint may have in flight; the others get none.

    Rates in answers per second. Not `is_enough`: everything is used, and it still will not do.
    """

    quotas: Mapping[EndpointKey, int]
    rate_per_s: float
    needed_per_s: float
    is_enough: bool


@dataclass(frozen=True, slots=True)
class _Filled:
    quotas: dict[EndpointKey, int]
    rate_per_s: float
    cost_per_s: float


def cheapest_mix(supplies: Sequence[Supply], *, needed_per_s: float, max_in_flight: int) -> Mix:
    """The cheapest mix that gives `needed_per_s` answers; everything, if none does.

    Args:
        supplies: the endpoints that may serve, in any order; those without slots are left out.
        max_in_flight: slots that may be used in all.
    """
    usable = sorted(
        (item for item in supplies if item.slots > 0), key=lambda item: (item.cost, item.key)
    )
    enough = []
    for first in range(len(usable)):
        filled = _fill(usable[first:], needed_per_s, max_in_flight)
        if filled.rate_per_s >= needed_per_s - _HAIR:
            enough.append(filled)
            if first == 0:
                break  # nothing is cheaper than the cheapest first
    if not enough:
        whole = _fill(usable, math.inf, max_in_flight)
        return Mix(
            quotas={item.key: item.slots for item in usable},
            rate_per_s=whole.rate_per_s,
            needed_per_s=needed_per_s,
            is_enough=False,
        )
    best = min(enough, key=lambda item: item.cost_per_s)
    return Mix(
        quotas=best.quotas,
        rate_per_s=best.rate_per_s,
        needed_per_s=needed_per_s,
        is_enough=True,
    )


def _fill(usable: Sequence[Supply], needed_per_s: float, max_in_flight: int) -> _Filled:
    quotas: dict[EndpointKey, int] = {}
    rate = cost = 0.0
    left = max_in_flight
    for item in usable:
        if left <= 0 or (quotas and rate >= needed_per_s - _HAIR):
            break
        slots = min(item.slots, left)
        if quotas and not math.isinf(needed_per_s):
            missing = (needed_per_s - rate) * item.answer_s
            slots = min(slots, max(1, math.ceil(missing - _HAIR)))
        quotas[item.key] = slots
        left -= slots
        rate += slots * item.slot_rate_per_s
        cost += slots * item.slot_rate_per_s * item.cost
    return _Filled(quotas, rate, cost)
