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
from quantroute.ledger import ROOT, BudgetLedger
from quantroute.money import PicoUSD, format_usd

__all__ = ["StatisticalReserve", "worst_request_pusd"]

_LEAST_SEEN: Final = 64
_KEPT: Final = 2_048
_REFRESH_EVERY: Final = 64


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
    """Mean and spread of what a request *under way* will cost, from what answers cost.

    Long answers are under way for longer, so at any moment they are over-represented among those
    under way, in proportion to their length: the moments are weighted with the cost itself. Without
    that, two thousand answers of the usual spread would be expected 40% too cheap.
    """

    _seen: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _since: int = 0
    _moments: tuple[float, float, int] | None = None

    def add(self, cost_pusd: int) -> None:
        self._seen.append(cost_pusd)
        self._since += 1

    def moments(self) -> tuple[float, float, int] | None:
        """(mean, standard deviation, dearest) in pico-dollars; None until enough were seen."""
        if len(self._seen) < _LEAST_SEEN:
            return None
        if self._moments is None or self._since >= _REFRESH_EVERY:
            total = sum(self._seen)
            if not total:
                return None
            mean = sum(cost**2 for cost in self._seen) / total
            square = sum(cost**3 for cost in self._seen) / total
            deviation = math.sqrt(max(0.0, square - mean**2))
            self._moments = (mean, deviation, max(self._seen))
            self._since = 0
        return self._moments


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
    _under_way: int = field(default=0, init=False)
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque, init=False)

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

    def note(self, cost_pusd: int) -> None:
        """An answer cost so much."""
        self._costs.add(cost_pusd)

    def bound_pusd(self, requests: int) -> int:
        """A high quantile of what so many requests under way will cost together."""
        moments = self._costs.moments()
        if moments is None or not requests:
            return requests * self.worst_pusd
        mean, deviation, dearest = moments
        quantiles = NormalDist().inv_cdf(self.probability)
        together = requests * mean + quantiles * deviation * math.sqrt(requests)
        # The normal approximation is for many; of few, one may be as dear as any seen.
        return math.ceil(max(together, (requests - 1) * mean + dearest))

    @asynccontextmanager
    async def place(self, ledger: BudgetLedger) -> AsyncIterator[None]:
        """Holds a request's place in the sum while it is under way; waits for it, in line.

        Raises:
            BudgetExceeded: it does not fit, and nothing is under way that could make room.
        """
        if self._waiting or not self._fits(ledger):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._serve(ledger)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave(ledger)  # let through and cancelled in the same instant
                raise
        else:
            self._under_way += 1
        try:
            yield
        finally:
            self._leave(ledger)

    def _leave(self, ledger: BudgetLedger) -> None:
        self._under_way -= 1
        self._serve(ledger)

    def _serve(self, ledger: BudgetLedger) -> None:
        while self._waiting and self._fits(ledger):
            turn = self._waiting.popleft()
            if not turn.done():
                self._under_way += 1
                turn.set_result(None)
        if self._waiting and not self._under_way:
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.done():
                    turn.set_exception(self._shortage(ledger))

    def _fits(self, ledger: BudgetLedger) -> bool:
        balance = ledger.balance()
        requests = self._under_way + balance.held_entries + 1  # lost answers count like others
        return balance.posted_pusd + self.bound_pusd(requests) <= self.target_pusd

    def _shortage(self, ledger: BudgetLedger) -> BudgetExceeded:
        balance = ledger.balance()
        pending_pusd = self.bound_pusd(balance.held_entries)
        return BudgetExceeded(
            account=ROOT,
            requested_pusd=self.bound_pusd(balance.held_entries + 1) - pending_pusd,
            cap_pusd=self.target_pusd,
            posted_pusd=balance.posted_pusd,
            pending_pusd=pending_pusd,
        )
