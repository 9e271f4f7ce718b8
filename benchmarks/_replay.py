"""The pure part of `replay.py`: readings of an endpoint list in, choices and costs out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import TypeVar

from quantroute.domain import Endpoint
from quantroute.policy import ExclusionPolicy, Verdict
from quantroute.registry import Change, ChangeKind, EndpointList, compare

K = TypeVar("K")
DAY_S = 86_400.0
#: A request of ordinary length: which override of a price list is in force depends on it.
PROMPT_TOKENS = 1_000
WAYS = ("quantroute", "mix", "default balancing", "cheapest of all", "model's author")


@dataclass(frozen=True, slots=True)
class Basket:
    """What is bought, in tokens."""

    input_tokens: int = 1_000_000
    output_tokens: int = 10_000_000

    def cost_usd(self, endpoint: Endpoint, at: datetime) -> Decimal | None:
        """At the listed prices of that moment; None if one is unknown."""
        prices = endpoint.pricing.at(input_tokens=PROMPT_TOKENS, when=at)
        plain, output = prices.get("prompt"), prices.get("completion")
        if plain is None or output is None:
            return None
        return plain * self.input_tokens + output * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One reading: who would have been chosen, and what the basket cost each way.

    `choice` is the tag of the endpoint that takes the next request, None if nobody may serve;
    `mix` the shares of the requests in flight; `below_native` and `unlabelled` the shares of the
    service's default balancing that would have gone to such endpoints.
    """

    at: datetime
    choice: str | None
    mix: Mapping[str, float]
    cost_usd: Mapping[str, Decimal | None]
    below_native: float
    unlabelled: float
    eligible: frozenset[str]
    listed: frozenset[str]


def look(
    listing: EndpointList,
    at: datetime,
    *,
    policy: ExclusionPolicy,
    basket: Basket,
    author: str,
    in_flight: int,
    limit: int,
) -> Moment:
    """What one reading means. `limit` is how many requests one endpoint is taken to grant."""
    costs = {
        endpoint.key: cost
        for endpoint in listing
        if (cost := basket.cost_usd(endpoint, at)) is not None
    }
    verdicts = policy.bind(listing.endpoints, at=at, must_match=False).verdicts
    eligible = sorted(
        (v.endpoint for v in verdicts if v.eligible and v.endpoint.key in costs),
        key=lambda e: (e.is_degraded, costs[e.key], e.key),
    )
    up = [e for e in listing if e.key in costs and not e.is_down] or [
        e for e in listing if e.key in costs
    ]
    mix = filled([e.tag for e in eligible], in_flight=in_flight, limit=limit)
    weights = balancing(up, at)
    kinds = {verdict.endpoint.key: verdict for verdict in verdicts}
    by_tag = {endpoint.tag: costs[endpoint.key] for endpoint in reversed(eligible)}
    authors = [costs[e.key] for e in listing if e.provider_slug == author and e.key in costs]
    return Moment(
        at=at,
        choice=eligible[0].tag if eligible else None,
        mix=mix,
        cost_usd={
            "quantroute": costs[eligible[0].key] if eligible else None,
            "mix": _mean({tag: Decimal(share) for tag, share in mix.items()}, by_tag),
            "default balancing": _mean(
                {e.key: weight for e, weight in weights}, {e.key: costs[e.key] for e in up}
            ),
            "cheapest of all": min((costs[e.key] for e in up), default=None),
            "model's author": min(authors, default=None),
        },
        below_native=float(sum(w for e, w in weights if _kind(kinds[e.key]) == "below")),
        unlabelled=float(sum(w for e, w in weights if _kind(kinds[e.key]) == "unknown")),
        eligible=frozenset(e.tag for e in eligible),
        listed=frozenset(e.tag for e in listing),
    )


def filled(tags: Sequence[str], *, in_flight: int, limit: int) -> dict[str, float]:
    """Shares of the requests in flight when the cheapest is filled first; empty if none may."""
    counts: dict[str, int] = {}
    left = in_flight
    for tag in tags:
        counts[tag] = min(left, limit)
        left -= counts[tag]
        if not left:
            break
    total = sum(counts.values())
    return {tag: count / total for tag, count in counts.items()}


def balancing(endpoints: Sequence[Endpoint], at: datetime) -> list[tuple[Endpoint, Decimal]]:
    """The service's default: the inverse square of the price, over what is not degraded.

    Which price is squared is not published; as in the simulator it is the sum of input and output.
    """
    stable = [e for e in endpoints if not e.is_degraded] or list(endpoints)
    weights: list[tuple[Endpoint, Decimal]] = []
    for endpoint in stable:
        prices = endpoint.pricing.at(input_tokens=PROMPT_TOKENS, when=at)
        price = (prices.get("prompt") or Decimal(0)) + (prices.get("completion") or Decimal(0))
        weights.append((endpoint, 1 / max(price, Decimal("1e-12")) ** 2))
    total = sum(weight for _, weight in weights)
    return [(endpoint, weight / total) for endpoint, weight in weights]


def _mean(weights: Mapping[K, Decimal], costs: Mapping[K, Decimal]) -> Decimal | None:
    return sum((w * costs[key] for key, w in weights.items()), Decimal(0)) if weights else None


def _kind(verdict: Verdict) -> str:
    if verdict.precision.is_native:
        return "native"
    return "unknown" if verdict.precision.source in ("none", "user") else "below"


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A time in which the choice and its cost stayed the same."""

    begin: datetime
    end: datetime
    choice: str | None
    cost_usd: Decimal | None

    @property
    def days(self) -> float:
        return (self.end - self.begin).total_seconds() / DAY_S


def periods(moments: Sequence[Moment]) -> list[Period]:
    """Runs of equal choice and cost; each reading counts until the next."""
    found: list[Period] = []
    for here, after in pairwise(moments):
        cost = here.cost_usd["quantroute"]
        if found and (found[-1].choice, found[-1].cost_usd) == (here.choice, cost):
            begin = found.pop().begin
        else:
            begin = here.at
        found.append(Period(begin=begin, end=after.at, choice=here.choice, cost_usd=cost))
    return found


@dataclass(slots=True)
class Tally:
    """Changes of the list from reading to reading, and how many of those moved the choice."""

    kinds: Counter[ChangeKind] = field(default_factory=Counter)
    labels: list[tuple[datetime, str]] = field(default_factory=list)
    changed_readings: int = 0
    moved: int = 0
    repriced: int = 0
    pin_lost: int = 0


def tally(lists: Sequence[EndpointList], moments: Sequence[Moment]) -> Tally:
    """Compare each list with the one before."""
    result = Tally()
    for (before, after), (then, now) in zip(pairwise(lists), pairwise(moments), strict=True):
        changes = compare(before, after)
        result.kinds.update(change.kind for change in changes)
        result.labels.extend((now.at, str(change)) for change in changes if _is_label(change))
        result.changed_readings += bool(changes)
        result.moved += then.choice != now.choice
        costs = then.cost_usd["quantroute"], now.cost_usd["quantroute"]
        result.repriced += then.choice == now.choice and costs[0] != costs[1]
        result.pin_lost += then.choice is not None and then.choice not in now.listed
    return result


def _is_label(change: Change) -> bool:
    return change.kind in (ChangeKind.LABEL, ChangeKind.RELABELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One way's basket over time, in USD; the mean is weighted with time. Only where it had one."""

    days: float
    mean: Decimal
    least: Decimal
    median: Decimal
    most: Decimal


def spread(moments: Sequence[Moment], way: str) -> Spread | None:
    """None if that way never had an endpoint."""
    weighted = sorted(
        (cost, (after.at - here.at).total_seconds())
        for here, after in pairwise(moments)
        if (cost := here.cost_usd[way]) is not None
    )
    total_s = sum(seconds for _, seconds in weighted)
    if not total_s:
        return None
    passed_s, median = 0.0, weighted[-1][0]
    for cost, seconds in weighted:
        passed_s += seconds
        if passed_s >= total_s / 2:
            median = cost
            break
    return Spread(
        days=total_s / DAY_S,
        mean=sum((cost * Decimal(seconds / total_s) for cost, seconds in weighted), Decimal(0)),
        least=weighted[0][0],
        median=median,
        most=weighted[-1][0],
    )


def days_first(moments: Sequence[Moment]) -> dict[str, float]:
    """Days for which each endpoint would have been the first choice, most first."""
    days: defaultdict[str, float] = defaultdict(float)
    for period in periods(moments):
        days[period.choice or "(nobody)"] += period.days
    return dict(sorted(days.items(), key=lambda item: -item[1]))


def timeline(moments: Sequence[Moment], *, width: int = 72) -> Iterator[str]:
    """One line per endpoint that was ever eligible, with a mark per moment."""
    begin, end = moments[0].at, moments[-1].at
    columns: list[Moment] = []
    for column in range(width):
        at = begin + (end - begin) * (column / width)
        columns.append(max((m for m in moments if m.at <= at), key=lambda m: m.at))
    for tag in sorted(set().union(*(moment.eligible for moment in moments))):
        marks = (
            "█"
            if tag == m.choice
            else "▒"
            if tag in m.eligible
            else "·"
            if tag in m.listed
            else " "
            for m in columns
        )
        yield f"{tag:22} {''.join(marks)}"
