"""Statistical reserve: a soft cap by what answers cost so far, under a hard cap that is higher.

Off unless asked for. Usually a request waits until its whole worst case fits under the cap. Here it
waits until what is spent, plus a high quantile of what everything under way will cost together,
fits under the *target*. The sum of many answers is known far better than any one of them, so no
output limit is lowered and the last money is spent at full speed; but it is no bound. The bound is
the ledger's own cap, which is the target plus the overrun that the user has accepted: the ledger
reserves every worst case against that one, as always. See docs/design/0007-tight-cap.md.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

from quantroute.client import input_bound_tokens
from quantroute.domain import Endpoint
from quantroute.errors import BudgetExceeded, ConfigurationError
from quantroute.generation._prompts import Prompt
from quantroute.ledger import ROOT, Ledger
from quantroute.money import PicoUSD, format_usd

__all__ = ["StatisticalReserve", "worst_request_pusd"]

_LEAST_SEEN: Final = 64
_KEPT: Final = 2_048
_REFRESH_EVERY: Final = 64
#: Even the oldest request is judged by so many answers, those that took longest.
_LEAST_OLDER: Final = 16
_FEW: Final = 64
_ESTIMATE_EVERY_S: Final = 0.05


def worst_request_pusd(
    endpoints: Iterable[Endpoint], prompts: Iterable[Prompt], max_output_tokens: int
) -> PicoUSD:
    """The worst case of one request, at the dearest of these endpoints, for the longest prompt.

    Later turns read the answers before them: those count at their limit.
    """
    input_tokens = max(
        (
            input_bound_tokens([{"role": "user", "content": text} for text in prompt.turns])
            + len((prompt.system or "").encode())
            + (len(prompt.turns) - 1) * max_output_tokens
            for prompt in prompts
        ),
        default=0,
    )
    return max(
        endpoint.pricing.worst_case_pusd(input_tokens=input_tokens, output_tokens=max_output_tokens)
        for endpoint in endpoints
        if endpoint.pricing.is_bounded
    )


@dataclass(slots=True)
class _Costs:
    """What a request costs, given for how long it has been under way.

    Long answers stay longest: those under way at one moment are dearer than answers are on average,
    and the last ones of a run are the dearest. So an estimate looks at seen answers that took at
    least as long as this one already has.
    """

    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _since: int = 0
    _durations_s: list[float] = field(default_factory=list)
    _moments: list[tuple[float, float]] = field(default_factory=list)
    dearest_pusd: int = 0

    def add(self, duration_s: float, cost_pusd: int) -> None:
        self._seen.append((duration_s, cost_pusd))
        self._since += 1

    @property
    def is_ready(self) -> bool:
        """Whether enough were seen."""
        return len(self._seen) >= _LEAST_SEEN

    def moments(self, age_s: float) -> tuple[float, float]:
        """(mean, variance) of the whole cost of a request that is under way for `age_s` seconds."""
        if not self._moments or self._since >= _REFRESH_EVERY:
            self._prepare()
        older = bisect_left(self._durations_s, age_s)
        return self._moments[min(older, len(self._moments) - _LEAST_OLDER)]

    def _prepare(self) -> None:
        """Moments of each tail of the answers, sorted by how long they took."""
        ordered = sorted(self._seen)
        count, total, squares = 0, 0, 0
        moments: list[tuple[float, float]] = []
        for _, cost_pusd in reversed(ordered):
            count, total, squares = count + 1, total + cost_pusd, squares + cost_pusd**2
            mean = total / count
            moments.append((mean, max(0.0, squares / count - mean**2)))
        moments.reverse()
        self._durations_s = [duration_s for duration_s, _ in ordered]
        self._moments = moments
        self.dearest_pusd = max(cost_pusd for _, cost_pusd in ordered)
        self._since = 0


@dataclass(slots=True, eq=False)
class Place:
    """One request under way; whoever holds it says what it cost, if that is known."""

    began_s: float
    cost_pusd: int | None = None


@dataclass(slots=True, kw_only=True)
class StatisticalReserve:
    """Lets a request through while the expected end stays below a target; used from one loop.

    Args:
        target_pusd: what shall be spent in all; may be exceeded, with probability
            1 - `probability` by the normal approximation, and never beyond the ledger's cap.
        worst_pusd: the worst case of one request, counted until answers have shown their cost.
        probability: of staying below the target; between 0.5 and 1.
    Raises:
        ConfigurationError: an impossible probability or amount.
    """

    target_pusd: PicoUSD
    worst_pusd: PicoUSD
    probability: float = 0.999
    _costs: _Costs = field(default_factory=_Costs, init=False)
    _under_way: set[Place] = field(default_factory=set, init=False)
    _waiting: deque[asyncio.Future[Place]] = field(default_factory=deque, init=False)
    _estimate: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    _estimated_at_s: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        if not 0.5 <= self.probability < 1:
            raise ConfigurationError(
                f"the statistical reserve's probability lies in [0.5, 1), not {self.probability}"
            )
        if self.target_pusd < 0 or self.worst_pusd < 0:
            raise ConfigurationError("a statistical reserve needs a target and a worst case")

    def worst_overrun_pusd(self, requests: int) -> int:
        """What could be spent beyond the target at most, if every answer hit its limit."""
        return requests * self.worst_pusd

    def check_accepted(self, *, accepted_pusd: int, requests: int) -> None:
        """Refuse to go on unless the user has accepted the worst case.

        Raises:
            ConfigurationError: too little was accepted; the message says what could happen.
        """
        worst = self.worst_overrun_pusd(requests)
        if accepted_pusd < worst:
            raise ConfigurationError(
                f"with a statistical reserve up to {format_usd(worst)} more than the cap could be "
                f"spent, if every one of {requests:,} answers in flight hit its limit of "
                f"{format_usd(self.worst_pusd)}; accept that "
                f"(--accept-overrun-usd {math.ceil(worst / 10**10) / 100:.2f}), lower "
                "--max-output-tokens or --max-in-flight, or do without"
            )

    def learn(self, *, duration_s: float, cost_pusd: int) -> None:
        """A request was under way for so long and cost so much."""
        self._costs.add(duration_s, cost_pusd)

    def bound_pusd(self, *, more: int, now_s: float) -> int:
        """A high quantile of what those under way and `more` new ones will cost together."""
        requests = len(self._under_way) + more
        if not self._costs.is_ready or not requests:
            return requests * self.worst_pusd
        mean, variance = self._of_those_under_way(now_s)
        new_mean, new_variance = self._costs.moments(0.0)
        mean, variance = mean + more * new_mean, variance + more * new_variance
        quantiles = NormalDist().inv_cdf(self.probability)
        together = mean + quantiles * math.sqrt(variance)
        # The normal approximation is for many; of few, one may be as dear as any seen.
        return math.ceil(max(together, mean - new_mean + self._costs.dearest_pusd))

    def _of_those_under_way(self, now_s: float) -> tuple[float, float]:
        """Mean and variance of their sum; of many it is looked up anew twenty times a second.

        In between those that came are added, and those that left still count: a little too much.
        """
        if len(self._under_way) <= _FEW or now_s >= self._estimated_at_s + _ESTIMATE_EVERY_S:
            found = [self._costs.moments(now_s - place.began_s) for place in self._under_way]
            self._estimate = sum(mean for mean, _ in found), sum(var for _, var in found)
            self._estimated_at_s = now_s
        return self._estimate

    @asynccontextmanager
    async def place(self, ledger: Ledger) -> AsyncIterator[Place]:
        """Holds a request's place in the sum while it is under way; waits for it, in line.

        Raises:
            BudgetExceeded: it does not fit, and nothing is under way that could make room.
        """
        place = await self._wait(ledger)
        try:
            yield place
        finally:
            self._leave(place, ledger)

    async def _wait(self, ledger: Ledger) -> Place:
        if not self._waiting and self._fits(ledger):
            return self._enter()
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._serve(ledger)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(turn.result(), ledger)  # let through and cancelled in one instant
            raise

    def _enter(self) -> Place:
        place = Place(_now_s())
        self._under_way.add(place)
        if self._costs.is_ready:
            mean, variance = self._costs.moments(0.0)
            self._estimate = self._estimate[0] + mean, self._estimate[1] + variance
        return place

    def _leave(self, place: Place, ledger: Ledger) -> None:
        self._under_way.discard(place)
        if place.cost_pusd is not None:
            self.learn(duration_s=_now_s() - place.began_s, cost_pusd=place.cost_pusd)
        self._serve(ledger)

    def _serve(self, ledger: Ledger) -> None:
        while self._waiting and self._fits(ledger):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._enter())
        if not self._under_way:
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.done():
                    turn.set_exception(self._shortage(ledger))

    def _fits(self, ledger: Ledger) -> bool:
        balance = ledger.balance()
        more = balance.held_entries + 1  # lost answers count like others
        return balance.posted_pusd + self.bound_pusd(more=more, now_s=_now_s()) <= self.target_pusd

    def _shortage(self, ledger: Ledger) -> BudgetExceeded:
        balance, now_s = ledger.balance(), _now_s()
        pending_pusd = self.bound_pusd(more=balance.held_entries, now_s=now_s)
        with_one_pusd = self.bound_pusd(more=balance.held_entries + 1, now_s=now_s)
        return BudgetExceeded(
            account=ROOT,
            requested_pusd=with_one_pusd - pending_pusd,
            cap_pusd=self.target_pusd,
            posted_pusd=balance.posted_pusd,
            pending_pusd=pending_pusd,
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
