"""Delegated routing: the service balances among the allowed endpoints, and we check who served.

One candidate stands for all of them. What it costs at most is the dearest of each price dimension,
which is also the `max_price` that is sent; what it really was, the answer tells as far as it can:
the company, never the tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct

from quantroute.domain import Endpoint, EndpointKey, Quantization, slugify
from quantroute.policy import BoundPolicy, Precision, served_among
from quantroute.pricing import METERED_DIMENSIONS, Pricing, Quote

__all__ = ["DELEGATED", "Pauses", "Pool", "Served", "served_of"]

#: Stands for the endpoint in the ledger, since the entry is written before anybody serves.
DELEGATED: Final = "delegated"
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Endpoints among which the service may choose, as one. `preferences` is what is sent."""

    endpoint: Endpoint
    members: tuple[Endpoint, ...]
    quote: Quote
    preferences: Mapping[str, Any]

    @classmethod
    def of(cls, bound: BoundPolicy, members: Sequence[Endpoint]) -> Pool:
        """The pool of some eligible endpoints.

        Raises:
            NoEligibleEndpoint: none of them can be asked for without letting in an unwanted one.
        """
        endpoint = _merged(members, tag=DELEGATED, name=DELEGATED, pricing=_ceilings(members))
        return cls(
            endpoint=endpoint,
            members=tuple(members),
            quote=endpoint.pricing.quote(),
            preferences=bound.preferences(among={item.key for item in members}),
        )


class Served(Struct, frozen=True, kw_only=True):
    """Who served, as far as the answer tells. `pricing` settles an answer without a cost."""

    endpoint: Endpoint
    precision: Precision
    pricing: Pricing
    flags: tuple[str, ...]


def served_of(
    pool: Pool,
    precisions: Mapping[EndpointKey, Precision],
    *,
    provider_name: str | None,
    model: str | None,
) -> Served:
    """The member that served; where a company has several, what they have in common.

    `flags` are those of `policy.served_among`. Nobody of the pool: the pool itself, whose prices
    are ceilings and whose precision nobody knows.
    """
    members, flags = served_among(pool.members, provider_name=provider_name, model=model)
    if len(members) == 1:
        only = members[0]
        return Served(
            endpoint=only, precision=precisions[only.key], pricing=only.pricing, flags=flags
        )
    known = members or pool.members
    precision = _common_precision([precisions[item.key] for item in known])
    if not members:
        return Served(
            endpoint=pool.endpoint, precision=precision, pricing=pool.endpoint.pricing, flags=flags
        )
    first = members[0]
    is_one_price = all(item.pricing == first.pricing for item in members)
    endpoint = _merged(
        members,
        tag=f"{first.provider_slug}/?",
        name=first.provider_name,
        pricing=first.pricing if is_one_price else _UNKNOWN_PRICE,
    )
    return Served(endpoint=endpoint, precision=precision, pricing=_ceilings(members), flags=flags)


@dataclass(slots=True)
class Pauses:
    """Companies that asked for a rest: they take no part in the pool until it is over.

    A 429 that names a provider says nothing about the others, so it must not slow the account
    down. Times are monotonic seconds. One longer pause per episode, as in the adaptive limit.
    """

    _until_s: dict[str, float] = field(default_factory=dict, init=False)
    _noted_at_s: dict[str, float] = field(default_factory=dict, init=False)
    _streak: dict[str, int] = field(default_factory=dict, init=False)

    def note(
        self, provider_name: str, *, sent_at_s: float, now_s: float, retry_after_s: float | None
    ) -> None:
        """A company refused a request that was sent at `sent_at_s`."""
        name = slugify(provider_name)
        own_s = 0.0
        if sent_at_s > self._noted_at_s.get(name, float("-inf")):
            streak = self._streak.get(name, 0)
            own_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**streak)
            self._streak[name] = min(streak + 1, 30)
            self._noted_at_s[name] = now_s
        until_s = now_s + (own_s if retry_after_s is None else retry_after_s)
        self._until_s[name] = max(self._until_s.get(name, 0.0), until_s)

    def answered(self, endpoint: Endpoint) -> None:
        """A company served: its next pause is a short one again."""
        if self._streak:
            for name in _names(endpoint):
                self._streak.pop(name, None)

    def rested(self, endpoints: Sequence[Endpoint], now_s: float) -> Sequence[Endpoint]:
        """Those that may be asked now; empty if all of them rest."""
        if not self._until_s:
            return endpoints
        resting = {name for name, until_s in self._until_s.items() if until_s > now_s}
        if not resting:
            self._until_s.clear()
            return endpoints
        return [item for item in endpoints if resting.isdisjoint(_names(item))]


def _names(endpoint: Endpoint) -> tuple[str, str]:
    return slugify(endpoint.provider_name), slugify(endpoint.provider_slug)


_UNKNOWN_PRICE: Final = Pricing(prices={"prompt": None, "completion": None})


def _ceilings(endpoints: Iterable[Endpoint]) -> Pricing:
    """The dearest price of each dimension over all of them, overrides included."""
    found = [item.pricing for item in endpoints]
    tables = [table for pricing in found for table in (pricing.prices, *_overrides(pricing))]
    dimensions = {name for table in tables for name in table if name in METERED_DIMENSIONS}
    prices: dict[str, Decimal | None] = {
        name: max(pricing.ceiling_usd(name) for pricing in found)
        for name in sorted(dimensions | {"prompt", "completion"})
    }
    return Pricing(prices=prices)


def _overrides(pricing: Pricing) -> Iterable[Mapping[str, Decimal | None]]:
    return (override.prices for override in pricing.overrides)


def _merged(members: Sequence[Endpoint], *, tag: str, name: str, pricing: Pricing) -> Endpoint:
    """One endpoint with what its members have in common; what differs is not known."""
    first = members[0]
    formats = {item.quantization for item in members}
    labels = {item.quantization_label for item in members}
    return Endpoint(
        model=first.model,
        tag=tag,
        provider_name=name,
        quantization=first.quantization if len(formats) == 1 else Quantization.UNKNOWN,
        quantization_label=first.quantization_label if len(labels) == 1 else None,
        pricing=pricing,
        served_name=first.served_name,
    )


def _common_precision(precisions: Sequence[Precision]) -> Precision:
    first = precisions[0]
    if all(item == first for item in precisions):
        return first
    if all(item.quantization is first.quantization for item in precisions):
        return replace(first, evidence=None)
    return Precision(quantization=Quantization.UNKNOWN, source="none", native=first.native)
