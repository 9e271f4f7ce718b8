"""What an accepted row really costs at each endpoint, learnt while the run goes on. Pure.

A price list says what an attempt costs. What a run wants to know is

    cost of one accepted row = expected price of an attempt x spend / acceptance

where *spend* is what was billed per dollar that the price list makes us expect (longer answers,
attempts that cost money and gave nothing) and *acceptance* the share of answers that were taken.
What to expect is reckoned per kind of work (the account that pays: a dataset), with the mean length
and the acceptance of its answers so far, wherever they came from and old evidence too. Were all
answers in one heap, an endpoint that was given the short dataset would look cheap, and one with the
hard dataset bad; were each answer compared with what one expected when it was sent, an endpoint
that was asked while the guess was too long would look cheap for a thousand answers.
Both are shrunk towards what all endpoints together show, by as much as `PRIOR_ANSWERS` answers
weigh: a new endpoint counts as average, one bad row does not condemn it, and a fault of the prompts
(every endpoint truncates alike) moves the prior instead of punishing whoever was asked first.

Old evidence fades: an answer weighs half after `HALF_LIFE_ANSWERS` further ones at its endpoint.
An endpoint that fell behind gets none, so it would stay behind for ever; every `PROBE_EVERY`-th
request goes to one that is cheaper by its list, and shows whether it has recovered.
"""

from __future__ import annotations

from collections import defaultdict
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
#: Kinds of work that are told apart; for all further ones one mean serves.
_MOST_KINDS: Final = 64
_FURTHER_KINDS: Final = ""
#: The pool moves slowly: it is looked at again after so many observations.
_POOL_EVERY: Final = 64
#: Of a kind of work hardly anything is assumed: all that did it are measured by it alike.
_PRIOR_OF_KIND: Final = 1.0
_LEAST_ACCEPTANCE: Final = 0.01
#: Instead of making all old evidence weigh less, each new answer weighs so much more.
_GROWTH_PER_ANSWER: Final = 2.0 ** (1.0 / HALF_LIFE_ANSWERS)
_HEAVIEST: Final = 2.0**40


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
class _Length:
    """The mean length of answers; the last `_LENGTHS` count."""

    answers: int = 0
    mean_tokens: float = 0.0

    def learn(self, tokens: int) -> None:
        self.answers = min(self.answers + 1, _LENGTHS)
        self.mean_tokens += (tokens - self.mean_tokens) / self.answers


@dataclass(slots=True)
class _Kinds:
    """What is usual for one model: in all, and of each kind of work.

    Attributes: `ease` is the acceptance of a kind beside that of all the model's answers.
    """

    overall: _Length = field(default_factory=_Length)
    lengths: dict[str, _Length] = field(default_factory=dict)
    ease: dict[str, float] = field(default_factory=dict)

    def name_of(self, account: str) -> str:
        """The kind under which the work of an account is kept."""
        if account in self.lengths or len(self.lengths) < _MOST_KINDS:
            return account
        return _FURTHER_KINDS

    def length_of(self, kind: str) -> _Length:
        return self.lengths.setdefault(kind, _Length())

    def mean_tokens(self, account: str) -> float | None:
        """Of the account's own answers, else of all; None before the first."""
        length = self.lengths.get(account)
        if length is None or not length.answers:
            length = self.overall
        return length.mean_tokens if length.answers else None


@dataclass(slots=True)
class _Share:
    """What one endpoint did of one kind of work; weighted sums."""

    length: _Length  # of all answers of this kind, from everywhere
    input_pusd: float = 0.0
    pusd_per_output_token: float = 0.0
    judged: float = 0.0
    accepted: float = 0.0


@dataclass(slots=True)
class _Sums:
    """What one endpoint did: weighted sums of answers, of verdicts, of pico-dollars."""

    kinds: _Kinds  # of its model
    weight: float = 1.0  # of the next answer
    answers: float = 0.0
    billed_pusd: float = 0.0
    failures: float = 0.0
    judged: float = 0.0
    accepted: float = 0.0
    shares: dict[str, _Share] = field(default_factory=dict)
    factor: float = 1.0
    is_stale: bool = True

    def share(self, account: str) -> _Share:
        found = self.shares.get(account)
        if found is None:
            kind = self.kinds.name_of(account)
            found = self.shares.get(kind)
            if found is None:
                found = self.shares[kind] = _Share(self.kinds.length_of(kind))
        return found

    def expected_pusd(self) -> float:
        """What the price list lets one expect, each answer as long as is usual for its kind."""
        return sum(
            share.input_pusd + share.pusd_per_output_token * share.length.mean_tokens
            for share in self.shares.values()
        )

    def eased(self) -> float:
        """Its answers, each counted by how easily its kind is accepted."""
        ease = self.kinds.ease
        return sum(share.judged * ease.get(kind, 1.0) for kind, share in self.shares.items())

    def age(self) -> None:
        """Another answer is in: all that came before weighs a little less, beside the next."""
        self.weight *= _GROWTH_PER_ANSWER
        if self.weight < _HEAVIEST:
            return
        scale = 1.0 / self.weight
        self.weight = 1.0
        self.answers *= scale
        self.billed_pusd *= scale
        self.failures *= scale
        self.judged *= scale
        self.accepted *= scale
        for share in self.shares.values():
            share.input_pusd *= scale
            share.pusd_per_output_token *= scale
            share.judged *= scale
            share.accepted *= scale


@dataclass(slots=True)
class EndpointEconomy:
    """Learns per endpoint and orders candidates by the expected cost of one accepted row."""

    observations: int = field(default=0, init=False)
    """Grows with everything that is learnt: factors are the same while it is."""
    _sums: dict[EndpointKey, _Sums] = field(default_factory=dict, init=False)
    _kinds: dict[str, _Kinds] = field(default_factory=dict, init=False)
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
        account: str,
        input_pusd: int,
        pusd_per_output_token: float,
        output_tokens: int,
        billed_pusd: int,
    ) -> None:
        """An answer was paid for.

        Args:
            account: who pays; answers to one account are alike, wherever they come from.
            input_pusd: what its prompt costs there by the price list, fees included.
            pusd_per_output_token: the list price of what it wrote.
        """
        sums = self._of(key)
        share = sums.share(account)
        share.length.learn(output_tokens)
        sums.kinds.overall.learn(output_tokens)
        sums.age()
        weight = sums.weight
        share.input_pusd += weight * input_pusd
        share.pusd_per_output_token += weight * pusd_per_output_token
        sums.answers += weight
        sums.billed_pusd += weight * billed_pusd
        is_first = not self._mean_expected_pusd and bool(input_pusd or pusd_per_output_token)
        self._learnt(sums, pools_now=is_first)

    def wasted(self, key: EndpointKey, *, billed_pusd: int) -> None:
        """An attempt cost money, or may have, and gave nothing."""
        sums = self._of(key)
        sums.billed_pusd += sums.weight * billed_pusd
        sums.failures += sums.weight
        self._learnt(sums)

    def judged(self, key: EndpointKey, *, account: str, accepted: bool) -> None:
        """An answer was looked at, and taken or not."""
        sums = self._of(key)
        share = sums.share(account)
        weight, taken = sums.weight, sums.weight * accepted
        share.judged += weight
        share.accepted += taken
        sums.judged += weight
        sums.accepted += taken
        self._learnt(sums)

    # -- what follows from it ---------------------------------------------------------------------

    def usual_output_tokens(self, model: str, account: str) -> int | None:
        """Tokens of an answer to this account, in the mean; of any while it has none; or None."""
        kinds = self._kinds.get(model)
        tokens = kinds.mean_tokens(account) if kinds is not None else None
        return None if tokens is None else int(tokens)

    def factor(self, key: EndpointKey) -> float:
        """Cost of one accepted row there, per expected cost of one attempt."""
        sums = self._of(key)
        if sums.is_stale:
            sums.factor = self._spend(sums) / self._acceptance(sums)
            sums.is_stale = False
        return sums.factor

    def acceptance(self, key: EndpointKey) -> float:
        """Probability that an answer from there to usual work is accepted."""
        return min(1.0, self._acceptance(self._of(key)))

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
                answers=sums.answers / sums.weight,
                judged=sums.judged / sums.weight,
                spend=self._spend(sums),
                acceptance=self.acceptance(key),
                failures=sums.failures / (sums.answers or sums.weight),
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

    def _spend(self, sums: _Sums) -> float:
        if not self._mean_expected_pusd:  # no answer anywhere: a failure cost about an attempt
            return self._pooled_spend + sums.failures / (sums.weight * PRIOR_ANSWERS)
        prior_pusd = sums.weight * PRIOR_ANSWERS * self._mean_expected_pusd
        billed = sums.billed_pusd + prior_pusd * self._pooled_spend
        return billed / (sums.expected_pusd() + prior_pusd)

    def _acceptance(self, sums: _Sums) -> float:
        """Accepted per answer, of work as easy as all of the model's; above one if it got harder
        work and all of that was accepted.
        """
        prior = sums.weight * PRIOR_ANSWERS
        accepted = sums.accepted + prior * self._pooled_acceptance
        return max(_LEAST_ACCEPTANCE, accepted / (sums.eased() + prior))

    def _of(self, key: EndpointKey) -> _Sums:
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums(self._kinds_of(key.model))
        return sums

    def _kinds_of(self, model: str) -> _Kinds:
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = _Kinds()
        return kinds

    def _learnt(self, sums: _Sums, *, pools_now: bool = False) -> None:
        sums.is_stale = True
        self.observations += 1
        self._until_pool -= 1
        if self._until_pool <= 0 or pools_now:
            self._pool()

    def _pool(self) -> None:
        """The priors anew: the mean over endpoints that have shown something, each weighing the
        same beyond `PRIOR_ANSWERS`, so that one with most of the traffic is not its own yardstick.
        """
        self._until_pool = _POOL_EVERY
        spend = _Pool(1.0, answers=PRIOR_ANSWERS)
        overall = _Pool(PRIOR_ACCEPTANCE, answers=PRIOR_ANSWERS)
        expected = answers = 0.0
        for sums in self._sums.values():
            sums.is_stale = True
            expected_there, answers_there = sums.expected_pusd(), sums.answers
            expected += expected_there / sums.weight
            answers += answers_there / sums.weight
            if expected_there:
                spend.add(sums.billed_pusd / expected_there, answers_there / sums.weight)
            if sums.judged:
                overall.add(sums.accepted / sums.judged, sums.judged / sums.weight)
        self._pooled_spend, self._pooled_acceptance = spend.mean, overall.mean
        self._mean_expected_pusd = expected / answers if answers else 0.0
        for model, kinds in self._kinds.items():
            kinds.ease = self._ease(model)

    def _ease(self, model: str) -> dict[str, float]:
        pools: defaultdict[str, _Pool] = defaultdict(
            lambda: _Pool(self._pooled_acceptance, answers=_PRIOR_OF_KIND)
        )
        answers: defaultdict[str, float] = defaultdict(float)
        for key, sums in self._sums.items():
            if key.model != model:
                continue
            for kind, share in sums.shares.items():
                if share.judged:
                    judged = share.judged / sums.weight
                    pools[kind].add(share.accepted / share.judged, judged)
                    answers[kind] += judged
        accepted = sum(answers[kind] * pool.mean for kind, pool in pools.items())
        usual = accepted / sum(answers.values()) if accepted else 1.0
        return {kind: pool.mean / usual for kind, pool in pools.items()}


class _Pool:
    """A mean over endpoints, beginning with some answers of what is assumed."""

    __slots__ = ("_sum", "_weight")

    def __init__(self, assumed: float, *, answers: float) -> None:
        self._sum, self._weight = answers * assumed, answers

    def add(self, rate: float, answers: float) -> None:
        weight = min(answers, PRIOR_ANSWERS)
        self._sum += weight * rate
        self._weight += weight

    @property
    def mean(self) -> float:
        return self._sum / self._weight
