"""Own servers, the service, or both: hours and dollars of each way to do a plan's work. Pure.

    own time     = output tokens / tokens a second of all own servers together
    hosted time  = requests x seconds an answer / requests in flight
    both at once : each takes what it does in the same time
    until a deadline: own servers do what they can, the service the rest

Rates of own servers are what their owner says (`output_tokens_per_s`), else what their slots give
at the seconds an answer takes. Nothing here spends or promises: a run routes by what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

from quantroute.client import LocalEndpoint
from quantroute.domain import EndpointKey
from quantroute.generation._plan import DatasetPlan, Plan

__all__ = ["Way", "compare_ways"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to do what the plan needs.

    `own_share` is of the output tokens, `cost_pusd` in pico-dollars. `in_time`: whether the
    deadline holds, None without one. `is_declared`: every own server's rate was given.
    """

    name: str
    own_share: Fraction
    time_s: float
    cost_pusd: int
    in_time: bool | None
    is_declared: bool


@dataclass(frozen=True, slots=True)
class _Side:
    """All the work on one side. Money as an exact fraction until it is told."""

    time_s: float
    cost_pusd: Fraction


def compare_ways(
    plan: Plan, servers: Sequence[LocalEndpoint], *, deadline_s: float | None = None
) -> tuple[Way, ...]:
    """All on own servers, all hosted, and mixes. Empty if one side cannot do all of the work."""
    work = [item for item in plan.datasets if item.requests]
    able = [
        server for server in servers if all(server.endpoint.key in item.costs_pusd for item in work)
    ]
    hosted = _hosted(plan, work, {server.endpoint.key for server in servers})
    if not (work and able) or hosted is None:
        return ()
    own = _own(work, able)
    is_declared = all(server.output_tokens_per_s is not None for server in able)
    named = {"all on own servers": Fraction(1), "all hosted": Fraction(0)}
    named["both, as fast as can be"] = _even_share(own, hosted)
    if deadline_s is not None and deadline_s < own.time_s:
        named["own servers, the rest hosted by the deadline"] = Fraction(deadline_s / own.time_s)
    return tuple(
        _way(name, share, own, hosted, deadline_s=deadline_s, is_declared=is_declared)
        for name, share in named.items()
    )


def _way(
    name: str,
    share: Fraction,
    own: _Side,
    hosted: _Side,
    *,
    deadline_s: float | None,
    is_declared: bool,
) -> Way:
    part = float(share)
    time_s = max(part * own.time_s, (1 - part) * hosted.time_s)
    return Way(
        name=name,
        own_share=share,
        time_s=time_s,
        cost_pusd=math.ceil(share * own.cost_pusd + (1 - share) * hosted.cost_pusd),
        in_time=None if deadline_s is None else time_s <= deadline_s * (1 + 1e-9),
        is_declared=is_declared,
    )


def _even_share(own: _Side, hosted: _Side) -> Fraction:
    """The share with which both sides end together."""
    whole_s = own.time_s + hosted.time_s
    return Fraction(hosted.time_s / whole_s) if whole_s else Fraction(1)


def _own(work: Sequence[DatasetPlan], servers: Sequence[LocalEndpoint]) -> _Side:
    """Each server takes work by its speed; so their cost is the mean by speed."""
    times_s = [sum(_server_s(server, item) for item in work) for server in servers]
    speeds = [Fraction(1 / time_s) for time_s in times_s]
    costs = [sum(item.costs_pusd[server.endpoint.key] for item in work) for server in servers]
    whole = sum(speeds)
    return _Side(
        time_s=float(1 / whole),
        cost_pusd=sum(
            (speed / whole * cost for speed, cost in zip(speeds, costs, strict=True)), Fraction(0)
        ),
    )


def _server_s(server: LocalEndpoint, item: DatasetPlan) -> float:
    if server.output_tokens_per_s is not None:
        return item.output_tokens / server.output_tokens_per_s
    return item.requests * item.expectation.answer_s / server.max_in_flight


def _hosted(plan: Plan, work: Sequence[DatasetPlan], own: Set[EndpointKey]) -> _Side | None:
    """At the cheapest hosted endpoints, with all requests of the run in flight there."""
    cost = 0
    for item in work:
        costs = [cost_pusd for key, cost_pusd in item.costs_pusd.items() if key not in own]
        if not costs:
            return None
        cost += min(costs)
    busy_s = sum(item.requests * item.expectation.answer_s for item in work)
    return _Side(time_s=busy_s / plan.max_in_flight, cost_pusd=Fraction(cost))
