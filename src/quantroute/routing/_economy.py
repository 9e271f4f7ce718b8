"""What an accepted row really costs at each endpoint, learnt while the run goes on. Pure.

A price list says what an attempt costs. What a run wants to know is

    cost of one accepted row = expected price of an attempt x spend / acceptance

where *spend* is what was billed per dollar that the price list makes us expect (longer answers,
attempts that cost money and gave nothing) and *acceptance* the share of answers that were taken.
What to expect is reckoned with the mean length of all answers so far, old evidence too: were each
answer compared with what one expected when it was sent, an endpoint that was asked while the guess
was too long would look cheap for a thousand answers.
Both are shrunk towards what all endpoints together show, by as much as `PRIOR_ANSWERS` answers
weigh: a new endpoint counts as average, one bad row does not condemn it, and a fault of the prompts
(every endpoint truncates alike) moves the prior instead of punishing whoever was asked first.

Old evidence fades: an answer weighs half after `HALF_LIFE_ANSWERS` further ones at its endpoint.
An endpoint that fell behind gets none, so it would stay behind for ever; every `PROBE_EVERY`-th
request goes to one that is cheaper by its list, and shows whether it has recovered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from quantroute.domain import EndpointKey
from quantroute.routing._router import Candidate, in_order

__all__ = ["HALF_LIFE_ANSWERS", "PRIOR_ANSWERS", "PROBE_EVERY", "EndpointCost", "EndpointEconomy"]

#: Twenty: with fewer, a fair endpoint (90 % accepted) that starts with two bad rows would be taken
#: for one half as good; with many more, a bad one is paid for a hundred rows before it is left.
PRIOR_ANSWERS: Final = 20.0
#: Before anything was judged. Only its equality for all endpoints matters.
PRIOR_ACCEPTANCE: Final = 0.9
HALF_LIFE_ANSWERS: Final = 500.0
#: Two per cent of the requests.
PROBE_EVERY: Final = 50
#: The mean length of answers follows so many of the last ones.
_LENGTHS: Final = 200
#: The pool moves slowly: it is looked at again after so many observations.
_POOL_EVERY: Final = 64
_LEAST_ACCEPTANCE: Final = 0.01
_KEPT_PER_ANSWER: Final = 0.5 ** (1.0 / HALF_LIFE_ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCost:
    """What one endpoint has shown, faded: counts are weights, not whole numbers.

    Attributes: `spend` billed per expected dollar, `acceptance` a probability, `factor` the two
    together, all shrunk; `failures` paid attempts without an answer, per answer.
    """

    key: EndpointKey
    answers: float
    judged: float
    spend: float
    acceptance: float
    failures: float
    factor: float


@dataclass(slots=True)
class _Sums:
    """Faded sums; of answers, of verdicts, of pico-dollars."""

    answers: float = 0.0
    input_pusd: float = 0.0
    pusd_per_output_token: float = 0.0
    billed_pusd: float = 0.0
    failures: float = 0.0
    judged: float = 0.0
    accepted: float = 0.0
    factor: float = 1.0
    is_stale: bool = True

    def expected_pusd(self, output_tokens: float) -> float:
        """What the price list lets one expect of these answers, were each so long."""
        return self.input_pusd + output_tokens * self.pusd_per_output_token


@dataclass(slots=True)
class _Length:
    """The mean length of the answers of one model; the last `_LENGTHS` count."""

    answers: int = 0
    mean_tokens: float = 0.0

    def learn(self, tokens: int) -> None:
        self.answers = min(self.answers + 1, _LENGTHS)
        self.mean_tokens += (tokens - self.mean_tokens) / self.answers


@dataclass(slots=True)
class EndpointEconomy:
    """Learns per endpoint and orders candidates by the expected cost of one accepted row."""

    observations: int = field(default=0, init=False)
    """Grows with everything that is learnt: factors are the same while it is."""
    _sums: dict[EndpointKey, _Sums] = field(default_factory=dict, init=False)
    _lengths: dict[str, _Length] = field(default_factory=dict, init=False)
    _pooled_spend: float = field(default=1.0, init=False)
    _pooled_acceptance: float = field(default=PRIOR_ACCEPTANCE, init=False)
    _mean_expected_pusd: float = field(default=0.0, init=False)
    _until_pool: int = field(default=_POOL_EVERY, init=False)
    _asked: int = field(default=0, init=False)

    # -- what came of attempts --------------------------------------------------------------------

    def answered(
        self,
        key: EndpointKey,
        *,
        input_pusd: int,
        pusd_per_output_token: float,
        output_tokens: int,
        billed_pusd: int,
    ) -> None:
        """An answer was paid for.

        Args:
            input_pusd: what its prompt costs there by the price list, fees included.
            pusd_per_output_token: the list price of what it wrote.
        """
        self._length_of(key.model).learn(output_tokens)
        sums = self._of(key)
        sums.answers = sums.answers * _KEPT_PER_ANSWER + 1.0
        sums.input_pusd = sums.input_pusd * _KEPT_PER_ANSWER + input_pusd
        sums.pusd_per_output_token = (
            sums.pusd_per_output_token * _KEPT_PER_ANSWER + pusd_per_output_token
        )
        sums.billed_pusd = sums.billed_pusd * _KEPT_PER_ANSWER + billed_pusd
        sums.failures *= _KEPT_PER_ANSWER
        self._learnt(sums)

    def wasted(self, key: EndpointKey, *, billed_pusd: int) -> None:
        """An attempt cost money, or may have, and gave nothing."""
        sums = self._of(key)
        sums.billed_pusd += billed_pusd
        sums.failures += 1.0
        self._learnt(sums)

    def judged(self, key: EndpointKey, *, accepted: bool) -> None:
        """An answer was looked at, and taken or not."""
        sums = self._of(key)
        sums.judged = sums.judged * _KEPT_PER_ANSWER + 1.0
        sums.accepted = sums.accepted * _KEPT_PER_ANSWER + accepted
        self._learnt(sums)

    # -- what follows from it ---------------------------------------------------------------------

    def usual_output_tokens(self, model: str) -> int | None:
        """Tokens of an answer of this model, in the mean; None before the first."""
        length = self._lengths.get(model)
        return int(length.mean_tokens) if length is not None and length.answers else None

    def factor(self, key: EndpointKey) -> float:
        """Cost of one accepted row there, per expected cost of one attempt."""
        sums = self._of(key)
        if sums.is_stale:
            sums.factor = self._spend(key, sums) / self._acceptance(sums)
            sums.is_stale = False
        return sums.factor

    def acceptance(self, key: EndpointKey) -> float:
        """Probability that the next answer from there is accepted."""
        return self._acceptance(self._of(key))

    def ordered(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """By preference; now and then with one to probe in front."""
        found = in_order(candidates)
        self._asked += 1
        if self._asked % PROBE_EVERY == 0 and len(found) > 1:
            return self._probing(found)
        return found

    def costs(self) -> tuple[EndpointCost, ...]:
        """One frozen row per endpoint that has shown anything."""
        return tuple(
            EndpointCost(
                key=key,
                answers=sums.answers,
                judged=sums.judged,
                spend=self._spend(key, sums),
                acceptance=self._acceptance(sums),
                failures=sums.failures / sums.answers if sums.answers else sums.failures,
                factor=self.factor(key),
            )
            for key, sums in sorted(self._sums.items())
            if sums.answers or sums.judged or sums.failures
        )

    def _probing(self, found: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Those that would come first by the list alone, taken in turn, before the rest."""
        best = found[0]
        behind = [
            item
            for item in found[1:]
            if item.attempt_pusd < best.attempt_pusd
            and item.endpoint.is_degraded <= best.endpoint.is_degraded
        ]
        if not behind:
            return tuple(found)
        chosen = behind[(self._asked // PROBE_EVERY) % len(behind)]
        return (chosen, *(item for item in found if item is not chosen))

    def _spend(self, key: EndpointKey, sums: _Sums) -> float:
        prior_pusd = PRIOR_ANSWERS * (self._mean_expected_pusd or 1.0)
        billed = sums.billed_pusd + prior_pusd * self._pooled_spend
        return billed / (self._expected_pusd(key, sums) + prior_pusd)

    def _expected_pusd(self, key: EndpointKey, sums: _Sums) -> float:
        return sums.expected_pusd(self._length_of(key.model).mean_tokens)

    def _acceptance(self, sums: _Sums) -> float:
        accepted = sums.accepted + PRIOR_ANSWERS * self._pooled_acceptance
        return max(_LEAST_ACCEPTANCE, accepted / (sums.judged + PRIOR_ANSWERS))

    def _of(self, key: EndpointKey) -> _Sums:
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums()
        return sums

    def _length_of(self, model: str) -> _Length:
        length = self._lengths.get(model)
        if length is None:
            length = self._lengths[model] = _Length()
        return length

    def _learnt(self, sums: _Sums) -> None:
        sums.is_stale = True
        self.observations += 1
        self._until_pool -= 1
        if self._until_pool <= 0 or not self._mean_expected_pusd:
            self._pool()

    def _pool(self) -> None:
        """The priors anew: the mean over endpoints that have shown something, each weighing the
        same beyond `PRIOR_ANSWERS`, so that one with most of the traffic is not its own yardstick.
        """
        self._until_pool = _POOL_EVERY
        spend = acceptance = PRIOR_ANSWERS
        acceptance *= PRIOR_ACCEPTANCE
        spend_weight = acceptance_weight = PRIOR_ANSWERS
        expected = answers = 0.0
        for key, sums in self._sums.items():
            sums.is_stale = True
            expected_there = self._expected_pusd(key, sums)
            expected += expected_there
            answers += sums.answers
            if expected_there:
                weight = min(sums.answers, PRIOR_ANSWERS)
                spend += weight * sums.billed_pusd / expected_there
                spend_weight += weight
            if sums.judged:
                weight = min(sums.judged, PRIOR_ANSWERS)
                acceptance += weight * sums.accepted / sums.judged
                acceptance_weight += weight
        self._pooled_spend = spend / spend_weight
        self._pooled_acceptance = acceptance / acceptance_weight
        self._mean_expected_pusd = expected / answers if answers else 0.0
