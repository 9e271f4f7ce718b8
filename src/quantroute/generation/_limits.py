"""Output limits that let the last part of the money be spent at full concurrency.

A request reserves the price of its whole output limit. With a limit eight times the mean, what is
reserved is eight times what will be spent, and once the remaining money no longer covers that for
every slot, slots stand empty: the nearer the cap, the emptier. So while money is short for the
asked concurrency a request gets the limit that its share of the money affords, but never less than
what nearly all answers of its dataset need, by the lengths seen so far. An answer that is cut by
such a limit is asked for again with twice the limit, up to the one the user set.

The hard cap is not touched by any of this: it only decides how much is reserved per request.
See docs/design/0007-tight-cap.md for the arithmetic, and for what it does to long answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quantroute.ledger import Balance
from quantroute.money import NO_CAP
from quantroute.pricing import Quote

__all__ = [
    "LEAST_SEEN",
    "LENGTHS_KEPT",
    "LengthModel",
    "OutputLimits",
    "Ordinary",
    "remaining_pusd",
]

#: Share of answers that a learned limit lets through. From the arithmetic in 0007: at 0.95 about
#: one percent of a cap of twenty waves goes into answers that are cut and asked for again.
_QUANTILE: Final = 0.95
_MARGIN: Final = 1.05
#: Before so many answers nothing is learnt, and the full limit is asked with.
LEAST_SEEN: Final = 64
#: Answers of a dataset that are looked at.
LENGTHS_KEPT: Final = 2_048
_REFRESH_EVERY: Final = 64
_GROWTH: Final = 2
#: Requests at most that go without a look at the money after one that found plenty. Far fewer than
#: the slots, for which plenty is reckoned, so what others spend meanwhile changes little.
_UNASKED: Final = 64


class Ordinary(NamedTuple):
    """Output tokens: what nearly all answers stay below, and their mean."""

    most_tokens: int
    mean_tokens: float


@dataclass(slots=True)
class LengthModel:
    """Output tokens of the last answers of one dataset.

    Answers that a limit has cut count as long as they got: left out, each estimate would be made of
    what the last one let through, and the limit would creep down.
    """

    _seen: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS_KEPT), init=False)
    _since_sorted: int = field(default=0, init=False)
    _ordinary: Ordinary | None = field(default=None, init=False)

    def add(self, output_tokens: int) -> None:
        """An answer had so many tokens."""
        self._seen.append(output_tokens)
        self._since_sorted += 1

    def ordinary(self) -> Ordinary | None:
        """What to expect of an answer; None until enough have been seen."""
        if len(self._seen) < LEAST_SEEN:
            return None
        if self._ordinary is None or self._since_sorted >= _REFRESH_EVERY:
            ordered = sorted(self._seen)
            most = _MARGIN * ordered[int(_QUANTILE * (len(ordered) - 1))]
            self._ordinary = Ordinary(math.ceil(most), sum(ordered) / len(ordered))
            self._since_sorted = 0
        return self._ordinary


@dataclass(slots=True, kw_only=True)
class OutputLimits:
    """The output limit for each request of one dataset.

    Args:
        full_tokens: the user's own limit; never exceeded.
        slots: requests that shall be in flight at once, of all datasets together.
        datasets: how many share those slots now.
        is_elastic: False always gives the full limit.
    """

    full_tokens: int
    slots: int
    datasets: Callable[[], int] = lambda: 1
    is_elastic: bool = True
    lengths: LengthModel = field(default_factory=LengthModel)
    _unasked: int = field(default=0, init=False)
    _unasked_input_tokens: int = field(default=0, init=False)

    def is_plenty_for(self, input_tokens: int) -> bool:
        """Whether the last `choose` left so much that this request gets the full limit unasked.

        It found money for this many more at their worst, beyond what it takes for plenty; each of
        them counts once.
        """
        if self._unasked <= 0 or input_tokens > self._unasked_input_tokens:
            return False
        self._unasked -= 1
        return True

    def look_again(self) -> None:
        """The next request is not to go unasked: a reservation was refused."""
        self._unasked = 0

    def choose(self, *, quote: Quote | None, input_tokens: int, remaining_pusd: int | None) -> int:
        """The limit for the next request.

        What the requests in flight are going to cost is taken off first: by the time the last of
        them is back, that much less is left, and what they have reserved was reserved in better
        times. Without that, slots stand empty while the limit comes down.

        Args:
            quote: ceilings of the cheapest endpoint, None if unknown.
            input_tokens: bound of the prompt.
            remaining_pusd: what is not spent for good yet, reserved or not; None without a cap.
        """
        self._unasked = 0
        if not self.is_elastic or remaining_pusd is None or quote is None:
            return self.full_tokens
        ordinary = self.lengths.ordinary()
        if ordinary is None:
            return self.full_tokens
        plenty_pusd = self.slots * quote.cost_pusd(
            input_tokens=input_tokens,
            output_tokens=self.full_tokens + math.ceil(ordinary.mean_tokens),
        )
        if remaining_pusd >= plenty_pusd or not quote.output_pusd:  # as for most of a run
            self._note_plenty(quote, input_tokens, spare_pusd=remaining_pusd - plenty_pusd)
            return self.full_tokens
        fixed_pusd = quote.cost_pusd(input_tokens=input_tokens, output_tokens=0)
        share_tokens = (remaining_pusd / self.slots - fixed_pusd) / quote.output_pusd
        affordable = math.floor(share_tokens - ordinary.mean_tokens)
        return min(self.full_tokens, max(affordable, ordinary.most_tokens, 1))

    def _note_plenty(self, quote: Quote, input_tokens: int, *, spare_pusd: int) -> None:
        worst_pusd = quote.cost_pusd(input_tokens=input_tokens, output_tokens=self.full_tokens)
        self._unasked = max(0, min(_UNASKED, spare_pusd // max(1, worst_pusd)))
        self._unasked_input_tokens = input_tokens

    def after_cut(self, limit_tokens: int) -> int | None:
        """The limit to ask with again after an answer was cut; None if it was the full one."""
        if limit_tokens >= self.full_tokens:
            return None
        return min(self.full_tokens, _GROWTH * limit_tokens)


def remaining_pusd(own: Balance, above: Iterable[Balance] = (), *, datasets: int = 1) -> int | None:
    """What the tightest of these accounts has not spent for good; None if none has a cap.

    Reservations of requests under way count as not spent: most of each comes back. `own` is the
    dataset's account, which pays for its share of the slots only, and so counts as if each of the
    `datasets` had as much.
    """
    found = [
        parts * (balance.cap - balance.posted_pusd - balance.held_pusd)
        for parts, balance in [(datasets, own), *((1, balance) for balance in above)]
        if balance.cap is not NO_CAP
    ]
    return max(0, min(found)) if found else None
