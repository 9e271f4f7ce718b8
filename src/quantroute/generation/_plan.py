"""What a plan says, as frozen values; `_planner` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from quantroute._html import notebook_table
from quantroute.domain import Endpoint, EndpointKey
from quantroute.generation._allocation import Allocation
from quantroute.generation._census import Census
from quantroute.generation._expect import Expectation
from quantroute.generation._measure import NOTHING_ACCEPTED, Accepted
from quantroute.generation._spec import DatasetSpec
from quantroute.money import format_usd
from quantroute.policy import BoundPolicy

__all__ = ["DatasetPlan", "Demand", "Plan", "PlannedEndpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One dataset, as far as anything is known about it.

    Args:
        bound: the policy's verdicts for requests with the dataset's sampling parameters.
        own: eligible servers of one's own; what they cost is told apart.
        ended_rows, accepted, spent_pusd: what earlier starts of the run have done (pico-dollars).
    """

    spec: DatasetSpec
    census: Census
    expectation: Expectation
    bound: BoundPolicy
    own: tuple[Endpoint, ...] = ()
    ended_rows: int = 0
    accepted: Accepted = NOTHING_ACCEPTED
    spent_pusd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEndpoint:
    """A listed endpoint: the datasets it may serve, or why it serves none."""

    endpoint: Endpoint
    serves: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlan:
    """What one dataset will ask, cost and get. Units: pico-dollars, tokens, rows.

    Attributes:
        needed_rows: rows that must still be asked to reach the target; `planned_rows` are those
            that the prompts can give.
        rollouts_needed: rollouts with which the prompts would suffice.
        input_tokens, input_bound_tokens, output_tokens, accepted_tokens: of the planned rows.
        floor_pusd: output alone, nothing wasted, at the lowest output price: nothing is cheaper.
        cost_low_pusd, cost_high_pusd: the planned rows at the cheapest and the dearest endpoint.
        costs_pusd: of the planned rows at each endpoint that may serve them, own servers too.
        share_pusd: what the cap gives them; `cap_pusd` is the cap of the dataset's account, what is
            spent already and money beyond its need included.
        affordable_tokens, affordable_rows: accepted ones at the cheapest endpoint, earlier ones
            included; `..._at_dearest` if all went to the dearest. `affordable_ends` are rows of any
            class.
        hold_pusd: set aside for one request until its bill is known: the worst case at the
            cheapest endpoint, for a prompt of mean length. `admitted` requests fit at once;
            `can_begin` whether one does, now or with the lower limits of a run with many answers.
    """

    spec: DatasetSpec
    census: Census
    expectation: Expectation
    ended_rows: int
    accepted: Accepted
    spent_pusd: int
    needed_rows: int
    planned_rows: int
    rollouts_needed: int
    requests: int
    input_tokens: int
    input_bound_tokens: int
    output_tokens: int
    accepted_tokens: int
    cheapest: EndpointKey
    dearest: EndpointKey
    lowest_output_usd_per_token: Decimal
    floor_pusd: int
    cost_low_pusd: int
    cost_high_pusd: int
    costs_pusd: Mapping[EndpointKey, int]
    share_pusd: int
    cap_pusd: int
    affordable_tokens: int
    affordable_tokens_at_dearest: int
    affordable_rows: int
    affordable_ends: int
    hold_pusd: int
    admitted: int
    can_begin: bool

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self.spec.name

    @property
    def target_tokens(self) -> int:
        """Accepted output tokens that are wanted; expected ones where rows are the target."""
        return self.spec.target_output_tokens or (
            self.accepted.output_tokens + self.accepted_tokens
        )

    @property
    def is_supplied(self) -> bool:
        """Whether the prompts suffice for the target."""
        return self.needed_rows <= self.planned_rows

    @property
    def is_afforded(self) -> bool:
        """Whether the cap covers the planned rows at the cheapest endpoint, and the first hold."""
        return self.share_pusd >= self.cost_low_pusd and self.can_begin

    @property
    def least_pusd(self) -> int:
        """What it takes to have the planned rows: their cost, and no less than one hold."""
        return self.cost_low_pusd if self.can_begin else max(self.cost_low_pusd, self.hold_pusd)

    @property
    def reached(self) -> float:
        """Share of the target that prompts and cap allow, 0 to 1."""
        if self.spec.target_output_tokens is not None:
            return min(1.0, self.affordable_tokens / self.spec.target_output_tokens)
        if self.spec.target_rows is not None:
            return min(1.0, self.affordable_rows / self.spec.target_rows)
        return min(1.0, self.affordable_ends / self.census.rows) if self.census.rows else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run before it spends. Units: pico-dollars, seconds.

    `in_flight` is what the asked concurrency and the holds admit together. `time_s` is for what the
    cap affords, without outages and rate limits that nobody has measured; None if nothing fits.
    """

    model: str
    cap_pusd: int
    allocation: Allocation
    max_in_flight: int
    endpoints: tuple[PlannedEndpoint, ...]
    datasets: tuple[DatasetPlan, ...]
    other_spent_pusd: int
    in_flight: int
    time_s: float | None

    @property
    def spent_pusd(self) -> int:
        """What is spent or held already, other use of the same ledger included."""
        return self.other_spent_pusd + sum(item.spent_pusd for item in self.datasets)

    @property
    def floor_pusd(self) -> int:
        """Output alone at the lowest price; no plan can be cheaper."""
        return sum(item.floor_pusd for item in self.datasets)

    @property
    def cost_low_pusd(self) -> int:
        """Everything at the cheapest endpoints, what is spent included."""
        return self.spent_pusd + sum(item.cost_low_pusd for item in self.datasets)

    @property
    def least_cap_pusd(self) -> int:
        """The least cap that covers all planned rows, what is spent included."""
        return self.spent_pusd + sum(item.least_pusd for item in self.datasets)

    @property
    def cost_high_pusd(self) -> int:
        """Everything at the dearest endpoints, what is spent included."""
        return self.spent_pusd + sum(item.cost_high_pusd for item in self.datasets)

    @property
    def affordable_tokens(self) -> int:
        """Accepted output tokens that the cap affords at the cheapest endpoints."""
        return sum(item.affordable_tokens for item in self.datasets)

    @property
    def target_tokens(self) -> int:
        """Accepted output tokens that are wanted."""
        return sum(item.target_tokens for item in self.datasets)

    @property
    def is_supplied(self) -> bool:
        """Whether every dataset has prompts enough for its target."""
        return all(item.is_supplied for item in self.datasets)

    @property
    def fits(self) -> bool:
        """Whether the caps cover all planned rows at the cheapest endpoints."""
        return all(item.is_afforded for item in self.datasets)

    def _repr_html_(self) -> str:
        """A table for notebooks: what each dataset wants, costs and gets; every text escaped."""
        return notebook_table(
            ("dataset", "rows", "target tokens", "cost", "affords", "cap", "reached"),
            map(_cells, self.datasets),
            caption=f"{self.model}: a cap of {format_usd(self.cap_pusd, places=2)} "
            + ("suffices" if self.fits else "does not suffice"),
            numeric=range(1, 7),
            footer=(
                "total",
                f"{sum(item.planned_rows for item in self.datasets):,}",
                f"{self.target_tokens:,}",
                _cost(self.cost_low_pusd - self.spent_pusd, self.cost_high_pusd - self.spent_pusd),
                f"{self.affordable_tokens:,}",
                format_usd(sum(item.cap_pusd for item in self.datasets), places=2),
                "",
            ),
        )


def _cells(item: DatasetPlan) -> tuple[str, ...]:
    return (
        item.name,
        f"{item.planned_rows:,}",
        f"{item.target_tokens:,}",
        _cost(item.cost_low_pusd, item.cost_high_pusd),
        f"{item.affordable_tokens:,}",
        format_usd(item.cap_pusd, places=2),
        f"{item.reached:.0%}",
    )


def _cost(low_pusd: int, high_pusd: int) -> str:
    return f"{format_usd(low_pusd, places=2)} to {format_usd(high_pusd, places=2)}"
