"""Endpoints that share a tag: the service cannot be asked for one of them by name.

A request pinned to tag `together` may be served by either of two endpoints called so. If the policy
excludes one of them for what it is (its precision, or by name), the other may serve only if another
filter of the pinned request keeps the excluded one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from quantroute.domain import Endpoint
from quantroute.policy._precision import COVERS
from quantroute.policy._preferences import label_filter
from quantroute.policy._verdict import Reason, Verdict

__all__ = ["is_unwanted", "without_inseparable_twins"]

_UNWANTED = ("precision_", "native_unknown", "excluded_by_name", "not_in_only")
"""Codes that make an endpoint's answers unwanted, not just unlikely, dear or short."""


def is_unwanted(verdict: Verdict) -> bool:
    """Whether answers of this endpoint must not enter a data set, however they come about."""
    return any(reason.code.startswith(_UNWANTED) for reason in verdict.excluding)


def without_inseparable_twins(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts, with those also excluded whose pinned requests an unwanted twin could serve."""
    unwanted: dict[str, list[Endpoint]] = {}
    for verdict in verdicts:
        if is_unwanted(verdict):
            unwanted.setdefault(verdict.endpoint.tag, []).append(verdict.endpoint)
    return tuple(
        _excluded(verdict)
        if verdict.eligible
        and any(
            not _is_separable(verdict.endpoint, twin)
            for twin in unwanted.get(verdict.endpoint.tag, ())
        )
        else verdict
        for verdict in verdicts
    )


def _is_separable(wanted: Endpoint, unwanted: Endpoint) -> bool:
    """Whether the label or the prices that a pinned request carries keep `unwanted` out."""
    if label_filter(wanted) and unwanted.quantization is not wanted.quantization:
        # The service's filter for a generic label lets the formats it covers pass.
        return unwanted.quantization not in COVERS.get(wanted.quantization, ())
    if not wanted.pricing.is_bounded or not unwanted.pricing.is_bounded:
        return False
    return any(
        _cheapest(unwanted, dimension) > wanted.pricing.ceiling_usd(dimension)
        for dimension in ("prompt", "completion")
    )


def _cheapest(endpoint: Endpoint, dimension: str) -> Decimal:
    """The least price it may ask, overrides included; its prices must be known."""
    pricing = endpoint.pricing
    tables = (pricing.prices, *(override.prices for override in pricing.overrides))
    return min(price for table in tables if (price := table.get(dimension)) is not None)


def _excluded(verdict: Verdict) -> Verdict:
    reason = Reason(
        "inseparable_twin",
        f"another endpoint tagged {verdict.endpoint.tag!r} is excluded, and requests cannot "
        "choose between the two",
    )
    return Verdict.of(verdict.endpoint, (*verdict.reasons, reason), verdict.precision)
