"""Fifty days of real endpoint lists: who would have been chosen, and what it would have cost.

    .venv/bin/python benchmarks/replay.py [--model moonshotai/kimi-k2.6] [--limit 800]

For each recorded reading the policy judges the list as of that day, and the cheapest eligible
endpoint takes the next request. The price of a basket (1M input and 10M output tokens) there is set
beside: the mix that keeps `--in-flight` requests going if each endpoint grants `--limit` (nobody
publishes such a limit); the service's default balancing over all endpoints; the cheapest of all,
whatever it serves; and the model author's own endpoint. Prices are those listed, caches unused;
what was down (status -5) is left out for everybody. Needs the recordings beside the repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from decimal import Decimal

from _recorded import SERIES, readings
from _replay import (
    WAYS,
    Basket,
    Moment,
    Spread,
    days_first,
    look,
    periods,
    spread,
    tally,
    timeline,
)

from quantroute.policy import ExclusionPolicy
from quantroute.registry import EndpointList
from quantroute.registry._endpoints import parse_endpoints


def read(args: argparse.Namespace) -> tuple[list[EndpointList], list[Moment]]:
    """Every reading, parsed and judged."""
    lists, moments = [], []
    policy, basket = ExclusionPolicy(), Basket()
    for at, body in readings(args.model):
        listing = parse_endpoints(
            args.model, body, fetched_at_s=at.timestamp(), source="recorded list"
        )
        lists.append(listing)
        moments.append(
            look(
                listing,
                at,
                policy=policy,
                basket=basket,
                author=args.model.split("/")[0],
                in_flight=args.in_flight,
                limit=args.limit,
            )
        )
    return lists, moments


def usd(cost: Decimal | None) -> str:
    return "-" if cost is None else f"${cost:.2f}"


def show_periods(moments: Sequence[Moment], shortest_days: float) -> None:
    """The periods; short ones are counted, not listed."""
    found = periods(moments)
    short = [period for period in found if period.days < shortest_days]
    print(f"{'from':12}{'to':12}{'days':>6}  {'first choice':24}{'basket':>9}")
    for period in found:
        if period.days >= shortest_days:
            print(
                f"{period.begin:%m-%d %H:%M} {period.end:%m-%d %H:%M} {period.days:6.1f}"
                f"  {period.choice or '(nobody)':24}{usd(period.cost_usd):>9}"
            )
    if short:
        total = sum(period.days for period in short)
        print(f"and {len(short)} periods below {shortest_days:g} days, {total:.1f} days together")


def show_costs(moments: Sequence[Moment], args: argparse.Namespace) -> None:
    """The basket, each way."""
    print(f"\n{'basket':34}{'mean':>9}{'least':>9}{'median':>9}{'most':>9}{'days':>7}")
    names = dict(zip(WAYS, WAYS, strict=True))
    names["quantroute"] = "quantroute, first choice"
    names["mix"] = f"quantroute, {args.in_flight:,} at {args.limit} each"
    for way in WAYS:
        found: Spread | None = spread(moments, way)
        if found is not None:
            row = "".join(
                f"{usd(c):>9}" for c in (found.mean, found.least, found.median, found.most)
            )
            print(f"{names[way]:34}{row}{found.days:7.1f}")
    count = len(moments)
    below = sum(moment.below_native for moment in moments) / count
    unlabelled = sum(moment.unlabelled for moment in moments) / count
    print(
        f"the default balancing would have sent {below:.0%} of requests to endpoints below native "
        f"precision\nand {unlabelled:.0%} to endpoints about which nothing is known"
    )


def show_changes(lists: Sequence[EndpointList], moments: Sequence[Moment]) -> None:
    """How restless the lists were."""
    found = tally(lists, moments)
    kinds = ", ".join(f"{kind.value} {count}" for kind, count in found.kinds.most_common())
    print(
        f"\n{len(lists) - 1} readings compared with the one before: {found.changed_readings} differ"
    )
    print(f"changes: {kinds}")
    print(
        f"the choice moved {found.moved} times, its price changed {found.repriced} times; "
        f"a pin by tag would have lost its endpoint {found.pin_lost} times"
    )
    print(f"labels changed {len(found.labels)} times")
    for at, change in found.labels:
        print(f"  {at:%Y-%m-%d %H:%M} {change}")


def main() -> int:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="moonshotai/kimi-k2.5")
    parser.add_argument("--in-flight", type=int, default=2_000)
    parser.add_argument("--limit", type=int, default=800, help="requests one endpoint grants")
    parser.add_argument("--shortest", type=float, default=0.5, help="days; shorter are summed up")
    args = parser.parse_args()
    if not SERIES.is_file():
        print(f"skipped: no recordings at {SERIES} (they are not part of the repository)")
        return 0
    lists, moments = read(args)
    if not moments:
        print(f"no reading of {args.model} in {SERIES.name}", file=sys.stderr)
        return 2
    begin, end = moments[0].at, moments[-1].at
    print(f"{args.model}, {len(moments)} readings, {begin:%Y-%m-%d} to {end:%m-%d}\n")
    show_periods(moments, args.shortest)
    print(
        "\ndays as first choice: "
        + ", ".join(f"{t} {d:.1f}" for t, d in days_first(moments).items())
    )
    show_costs(moments, args)
    show_changes(lists, moments)
    print("\n█ first choice   ▒ may serve   · listed, not eligible")
    print("\n".join(timeline(moments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
