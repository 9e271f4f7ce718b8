"""Listed prices that cannot be meant: far off what the others ask for the same model.

A slip of the unit (per thousand, per million) makes an endpoint look a thousand times cheaper or
dearer than it is. A price list is believed all the same, since it is what the service bills by and
what requests are pinned to; but somebody should look before spending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from statistics import median
from typing import Final

from quantroute.domain import Endpoint, EndpointKey
from quantroute.money import usd_per_million

__all__ = ["implausible_prices"]

#: Honest prices of one model lie within a factor of ten or so of each other.
_FACTOR: Final = 20
#: With fewer others nobody can tell which one is wrong.
_FEWEST_OTHERS: Final = 2


def implausible_prices(endpoints: Iterable[Endpoint]) -> Mapping[EndpointKey, str]:
    """What is odd about the prices of some of `endpoints`, in words; in the order given."""
    by_model: defaultdict[str, list[Endpoint]] = defaultdict(list)
    for endpoint in endpoints:
        by_model[endpoint.model].append(endpoint)
    return {
        endpoint.key: problem
        for listed in by_model.values()
        for endpoint in listed
        if (problem := _problem(endpoint, listed))
    }


def _problem(endpoint: Endpoint, listed: Iterable[Endpoint]) -> str:
    others = [item.pricing for item in listed if item is not endpoint]
    found = (
        _oddity(
            "output",
            endpoint.pricing.output_usd_per_token,
            [item.output_usd_per_token for item in others],
        ),
        _oddity(
            "input",
            endpoint.pricing.input_usd_per_token,
            [item.input_usd_per_token for item in others],
        ),
    )
    return "; ".join(text for text in found if text)


def _oddity(what: str, price: Decimal | None, others: Iterable[Decimal | None]) -> str:
    known = [other for other in others if other is not None]
    if price is None or len(known) < _FEWEST_OTHERS:
        return ""
    usual = median(known)
    low, high = sorted((price, usual))
    if high == 0 or low * _FACTOR >= high:
        return ""
    side = "below" if price < usual else "above"
    times = f"{high / low:,.0f} times" if low else "far"
    return (
        f"{what} listed at ${usd_per_million(price):f} per million tokens, {times} {side} what the "
        f"others ask (${usd_per_million(usual):f}): a slip of the unit?"
    )
