"""The policy in the service's own words: the `provider` object of a chat request.

What we decided from a listing may be out of date when the request arrives, so every request also
carries the listed price and label as filters: an endpoint that became dearer, or that was
relabelled under the same tag, is refused by the service instead of serving.

Source: OpenRouter's provider-selection guide and schema, read 2026-11. Names must be slugs or full
tags; prices are in USD per million tokens (`request`: per request), sent as text because a JSON
number would pass through binary floating point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from quantroute.domain import Endpoint, Quantization
from quantroute.money import usd_per_million

if TYPE_CHECKING:
    from quantroute.policy._policy import ExclusionPolicy

__all__ = ["delegated_preferences", "label_filter", "pinned_preferences"]


def pinned_preferences(endpoint: Endpoint, policy: ExclusionPolicy) -> dict[str, Any]:
    """The `provider` object that lets this endpoint serve and no other.

    `max_price` is the endpoint's own listed ceiling, overrides included, which never exceeds the
    policy's; a free endpoint is pinned to 0.
    """
    return {
        "only": [endpoint.tag],
        "allow_fallbacks": False,
        **_filters((endpoint,), policy),
    }


def delegated_preferences(
    endpoints: Sequence[Endpoint], policy: ExclusionPolicy, *, ignore: Sequence[str]
) -> dict[str, Any]:
    """The `provider` object that leaves the choice among `endpoints` to the service."""
    preferences: dict[str, Any] = {
        "only": list(dict.fromkeys(endpoint.tag for endpoint in endpoints)),
        "allow_fallbacks": True,
        **_filters(endpoints, policy),
    }
    if ignore:
        preferences["ignore"] = list(ignore)
    return preferences


def label_filter(endpoint: Endpoint) -> tuple[str, ...]:
    """The endpoint's label as a `quantizations` entry; empty if the service may not know it.

    "unknown" is such an entry: a list without it keeps unlabelled endpoints out.
    """
    label, parsed = endpoint.quantization_label, endpoint.quantization
    if label is None:
        return () if parsed is Quantization.UNKNOWN else (parsed.value,)
    return (label,) if label == parsed.value else ()


def _filters(endpoints: Sequence[Endpoint], policy: ExclusionPolicy) -> dict[str, Any]:
    filters: dict[str, Any] = {"require_parameters": True}
    labels = [label_filter(endpoint) for endpoint in endpoints]
    if all(labels):
        filters["quantizations"] = sorted({label for found in labels for label in found})
    ceilings = _max_price(endpoints, policy)
    if ceilings:
        filters["max_price"] = ceilings
    if policy.data_collection is not None:
        filters["data_collection"] = policy.data_collection
    if policy.zdr:
        filters["zdr"] = True
    if policy.enforce_distillable_text:
        filters["enforce_distillable_text"] = True
    return filters


def _max_price(endpoints: Iterable[Endpoint], policy: ExclusionPolicy) -> dict[str, str]:
    known = [endpoint.pricing for endpoint in endpoints]
    given = {
        "prompt": policy.max_input_usd_per_million,
        "completion": policy.max_output_usd_per_million,
    }
    ceilings: dict[str, str] = {}
    for dimension, ceiling in given.items():
        if not any(dimension in pricing.unknown for pricing in known):
            dearest = max(pricing.ceiling_usd(dimension) for pricing in known)
            ceilings[dimension] = f"{usd_per_million(dearest):f}"
        elif ceiling is not None:
            ceilings[dimension] = f"{Decimal(ceiling):f}"
    if not any("request" in pricing.unknown for pricing in known):
        fee = max(pricing.ceiling_usd("request") for pricing in known)
        if fee:
            ceilings["request"] = f"{fee:f}"
    return ceilings
