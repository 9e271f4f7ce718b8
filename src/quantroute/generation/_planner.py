"""The plan before spending: who may serve, what it costs, what the cap affords. Pure arithmetic.

    rows needed  = target / accepted tokens per row        accepted = output x accepted share
    cost         = rows needed x (input, output, fee)      at the cheapest .. dearest endpoint
    share        = the cap, water-filled over those costs  see `_allocation`
    affordable   = share / cost of the needed rows

Money is exact: token counts are rounded up to whole tokens, then priced in pico-dollars. Counts
rest on an `Expectation`, which says itself how sure it is. Discounts for cached input are left out:
nobody promises them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from quantroute.domain import Endpoint, EndpointKey
from quantroute.errors import ConfigurationError, NoEligibleEndpoint
from quantroute.generation._allocation import Allocation, Claim, allocate, share_out
from quantroute.generation._census import Census
from quantroute.generation._limits import LEAST_SEEN
from quantroute.generation._plan import DatasetPlan, Demand, Plan, PlannedEndpoint
from quantroute.money import cost_pusd

__all__ = ["make_plan"]

#: English text has four to five bytes a token in byte-level vocabularies of this size.
BYTES_PER_TOKEN: Final = 4
#: What a chat template adds to a request, about; the bound on input uses a generous figure instead.
TEMPLATE_TOKENS: Final = 8


def make_plan(
    demands: Sequence[Demand],
    *,
    model: str,
    cap_pusd: int,
    allocation: Allocation,
    max_in_flight: int,
    at: datetime,
    other_spent_pusd: int = 0,
) -> Plan:
    """The plan for these demands at the prices of `at` (UTC).

    Args:
        other_spent_pusd: spent or held in the same ledger, but not by these datasets.
    Raises:
        NoEligibleEndpoint: some dataset can be served by nobody; the error lists the reasons.
        ConfigurationError: no demand, or a concurrency below one.
    """
    if not demands or max_in_flight < 1:
        raise ConfigurationError("a plan needs a dataset and at least one request in flight")
    works = [_Work.of(demand, model=model, at=at) for demand in demands]
    claims = [work.claim() for work in works]
    spent_pusd = other_spent_pusd + sum(demand.spent_pusd for demand in demands)
    free_pusd = max(0, cap_pusd - spent_pusd)
    shares = allocate(free_pusd, claims, allocation)
    grants = share_out(free_pusd, claims, allocation)
    datasets = tuple(
        work.plan(share_pusd=shares[claim.name], grant_pusd=grants[claim.name])
        for work, claim in zip(works, claims, strict=True)
    )
    in_flight = min(max_in_flight, sum(item.admitted for item in datasets))
    return Plan(
        model=model,
        cap_pusd=cap_pusd,
        allocation=allocation,
        max_in_flight=max_in_flight,
        endpoints=_endpoints(works),
        datasets=datasets,
        other_spent_pusd=other_spent_pusd,
        in_flight=in_flight,
        time_s=_time_s(datasets, in_flight),
    )


def _time_s(datasets: Sequence[DatasetPlan], in_flight: int) -> float | None:
    """All slots busy until the work is done, then the last answers end."""
    busy_s, last_s = 0.0, 0.0
    for item in datasets:
        part = _ratio(item.share_pusd, item.cost_low_pusd)
        if item.requests and part:
            busy_s += part * item.requests * item.expectation.answer_s
            last_s = max(last_s, item.expectation.answer_s)
    if not busy_s:
        return 0.0 if not any(item.requests for item in datasets) else None
    return busy_s / in_flight + last_s if in_flight else None


def _endpoints(works: Sequence[_Work]) -> tuple[PlannedEndpoint, ...]:
    listed: dict[EndpointKey, Endpoint] = {}
    serves: dict[EndpointKey, list[str]] = {}
    reasons: dict[EndpointKey, dict[str, None]] = {}
    for work in works:
        useful = {endpoint.key for endpoint in work.endpoints}
        for verdict in work.demand.bound.verdicts:
            key = verdict.endpoint.key
            listed.setdefault(key, verdict.endpoint)
            why = [reason.text for reason in verdict.excluding]
            if key in useful:
                serves.setdefault(key, []).append(work.demand.spec.name)
            elif not why:
                why = [_why_not(verdict.endpoint, work.demand)]
            reasons.setdefault(key, {}).update(dict.fromkeys(why))
    return tuple(
        PlannedEndpoint(
            endpoint=endpoint,
            serves=tuple(serves.get(key, ())),
            reasons=tuple(reasons.get(key, ())),
        )
        for key, endpoint in listed.items()
    )


def _why_not(endpoint: Endpoint, demand: Demand) -> str:
    if not endpoint.pricing.is_bounded:
        return "its worst case cannot be computed"
    wanted = demand.spec.max_output_tokens
    if (endpoint.max_output_tokens or wanted) < wanted:
        return f"gives {endpoint.max_output_tokens:,} tokens, too few for {wanted:,} of output"
    return (
        f"has room for {endpoint.context_tokens or 0:,} tokens, too few for prompts of up to "
        f"{_bound_per_request(demand):,} in the mean and {wanted:,} of output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What remains of one dataset, before money is shared out."""

    demand: Demand
    at: datetime
    endpoints: tuple[Endpoint, ...]
    needed_rows: int
    planned_rows: int

    @classmethod
    def of(cls, demand: Demand, *, model: str, at: datetime) -> _Work:
        """The work of `demand`, with the endpoints that can take it."""
        endpoints = tuple(
            endpoint for endpoint in demand.bound.eligible if _can_serve(endpoint, demand)
        )
        if not endpoints:
            reasons = [
                *demand.bound.reasons(),
                *(f"{item.key}: {_why_not(item, demand)}" for item in demand.bound.eligible),
            ]
            raise NoEligibleEndpoint(
                model=model, reasons=[f"for {demand.spec.name}: {reason}" for reason in reasons]
            )
        left = max(0, demand.census.rows - demand.ended_rows)
        needed = _needed_rows(demand, left)
        return cls(
            demand=demand,
            at=at,
            endpoints=endpoints,
            needed_rows=needed,
            planned_rows=min(needed, left),
        )

    @property
    def requests(self) -> int:
        """Requests of the planned rows."""
        return math.ceil(self.planned_rows * _requests_per_row(self.demand.census))

    @property
    def output_tokens(self) -> int:
        """Output tokens that are bought, accepted or not."""
        return math.ceil(self.requests * self.demand.expectation.output_tokens)

    @property
    def accepted_tokens(self) -> int:
        """Output tokens that are accepted."""
        return math.floor(self.output_tokens * self.demand.expectation.accepted_share)

    @property
    def input_tokens(self) -> int:
        """Input tokens, as far as they can be estimated."""
        return math.ceil(self.requests * _input_per_request(self.demand))

    def claim(self) -> Claim:
        """What the dataset may ask of the cap."""
        spec = self.demand.spec
        limit = None if spec.cap_pusd is None else max(0, spec.cap_pusd - self.demand.spent_pusd)
        return Claim(
            name=spec.name,
            need_pusd=min(map(self._cost_pusd, self.endpoints)),
            limit_pusd=limit,
            weight=spec.weight,
            priority=spec.priority,
        )

    def plan(self, *, share_pusd: int, grant_pusd: int) -> DatasetPlan:
        """The plan of the dataset with this much money."""
        demand, census = self.demand, self.demand.census
        cheapest, dearest = self._extreme(min), self._extreme(max)
        low_pusd, high_pusd = self._cost_pusd(cheapest), self._cost_pusd(dearest)
        bound = _bound_per_request(demand)
        hold_pusd = min(
            endpoint.pricing.worst_case_pusd(
                input_tokens=bound, output_tokens=demand.spec.max_output_tokens
            )
            for endpoint in self.endpoints
        )
        can_begin = (
            not self.requests or grant_pusd >= hold_pusd or demand.expectation.answers >= LEAST_SEEN
        )
        part = _ratio(share_pusd, low_pusd) if can_begin else 0.0
        part_at_dearest = _ratio(share_pusd, high_pusd) if can_begin else 0.0
        price = min(_output_price(endpoint) for endpoint in self.endpoints)
        earlier = demand.accepted
        total_tokens = demand.spec.target_output_tokens or (
            earlier.output_tokens + self.accepted_tokens
        )
        good_rows = self.planned_rows * _good_per_row(demand)
        return DatasetPlan(
            spec=demand.spec,
            census=census,
            expectation=demand.expectation,
            ended_rows=demand.ended_rows,
            accepted=earlier,
            spent_pusd=demand.spent_pusd,
            needed_rows=self.needed_rows,
            planned_rows=self.planned_rows,
            rollouts_needed=_rollouts_needed(demand, self.needed_rows),
            requests=self.requests,
            input_tokens=self.input_tokens,
            input_bound_tokens=self.requests * bound,
            output_tokens=self.output_tokens,
            accepted_tokens=self.accepted_tokens,
            cheapest=cheapest.key,
            dearest=dearest.key,
            lowest_output_usd_per_token=price,
            floor_pusd=cost_pusd(total_tokens, price),
            cost_low_pusd=low_pusd,
            cost_high_pusd=high_pusd,
            costs_pusd={
                item.key: self._cost_pusd(item)
                for item in (*self.endpoints, *demand.own)
                if _can_serve(item, demand)
            },
            share_pusd=share_pusd,
            cap_pusd=demand.spent_pusd + grant_pusd,
            affordable_tokens=earlier.output_tokens + math.floor(part * self.accepted_tokens),
            affordable_tokens_at_dearest=earlier.output_tokens
            + math.floor(part_at_dearest * self.accepted_tokens),
            affordable_rows=earlier.rows + math.floor(part * good_rows),
            affordable_ends=demand.ended_rows + math.floor(part * self.planned_rows),
            hold_pusd=hold_pusd,
            admitted=grant_pusd // hold_pusd if hold_pusd else self.requests,
            can_begin=can_begin,
        )

    def _extreme(self, choose: Callable[..., Endpoint]) -> Endpoint:
        return choose(self.endpoints, key=lambda item: (self._cost_pusd(item), str(item.key)))

    def _cost_pusd(self, endpoint: Endpoint) -> int:
        """What the planned rows cost there, at the prices for a prompt of mean length."""
        if not self.requests:
            return 0
        pricing = endpoint.pricing
        table = pricing.at(input_tokens=self.input_tokens // self.requests, when=self.at)

        def price(name: str, otherwise: Decimal = Decimal(0)) -> Decimal:
            found = table.get(name)
            return otherwise if found is None else found

        output = price("completion")
        reasoning = math.ceil(self.output_tokens * self.demand.expectation.reasoning_share)
        return (
            cost_pusd(self.input_tokens, price("prompt"))
            + cost_pusd(self.output_tokens - reasoning, output)
            + cost_pusd(reasoning, price("internal_reasoning", output))
            + cost_pusd(self.requests, price("request"))
        )


def _can_serve(endpoint: Endpoint, demand: Demand) -> bool:
    """Whether routing would send such requests there; an endpoint that would cut takes no part."""
    wanted = demand.spec.max_output_tokens
    if not endpoint.pricing.is_bounded or (endpoint.max_output_tokens or wanted) < wanted:
        return False
    room = endpoint.output_limit_tokens(
        input_tokens=_bound_per_request(demand), wanted_tokens=wanted
    )
    return room > 0


def _needed_rows(demand: Demand, left: int) -> int:
    spec = demand.spec
    if spec.target_rows is not None:
        missing = max(0, spec.target_rows - demand.accepted.rows)
        return math.ceil(missing / _good_per_row(demand))
    if spec.target_output_tokens is not None:
        missing = max(0, spec.target_output_tokens - demand.accepted.output_tokens)
        return math.ceil(missing / _accepted_per_row(demand))
    return left


def _requests_per_row(census: Census) -> float:
    return census.requests / census.rows if census.rows else 1.0


def _accepted_per_row(demand: Demand) -> float:
    expected = demand.expectation
    per_row = _requests_per_row(demand.census) * expected.output_tokens
    return per_row * expected.accepted_share


def _good_per_row(demand: Demand) -> float:
    """A conversation is good if each of its answers is."""
    return float(demand.expectation.good_share ** _requests_per_row(demand.census))


def _input_per_request(demand: Demand) -> float:
    expected, census = demand.expectation, demand.census
    if expected.input_tokens is not None:
        return expected.input_tokens
    if not census.requests:
        return float(TEMPLATE_TOKENS)
    seen_answer = expected.output_tokens * (1.0 - expected.reasoning_share)
    text = census.input_bytes / BYTES_PER_TOKEN + census.replayed_answers * seen_answer
    return TEMPLATE_TOKENS + text / census.requests


def _bound_per_request(demand: Demand) -> int:
    census = demand.census
    if not census.requests:
        return census.longest_bound_tokens
    answers = census.replayed_answers * demand.spec.max_output_tokens
    return math.ceil((census.input_bound_tokens + answers) / census.requests)


def _rollouts_needed(demand: Demand, needed_rows: int) -> int:
    rows = demand.census.rows
    if not rows:
        return demand.spec.rollouts
    wanted = demand.ended_rows + needed_rows
    return max(demand.spec.rollouts, math.ceil(demand.spec.rollouts * wanted / rows))


def _output_price(endpoint: Endpoint) -> Decimal:
    """The lowest price of an output token there: reasoning may be priced apart."""
    pricing = endpoint.pricing
    tables = (pricing.prices, *(item.prices for item in pricing.overrides))
    found = [
        price
        for table in tables
        for name in ("completion", "internal_reasoning")
        if (price := table.get(name)) is not None
    ]
    return min(found, default=Decimal(0))


def _ratio(part_pusd: int, whole_pusd: int) -> float:
    return 1.0 if part_pusd >= whole_pusd else part_pusd / whole_pusd
