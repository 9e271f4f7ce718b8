"""Endpoints that answer to one name: the service cannot be asked for one of them alone.

A request pinned to tag `together` may be served by either of two endpoints called so, and by
`together/turbo` as well, since a bare slug means all endpoints of its company. If the policy
excludes one of them for what it is (its precision, what was found out about it, or by name), the
other may serve only if another filter of the pinned request keeps the excluded one out.

Source: OpenRouter's provider-selection guide, read 2026-11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final

from quantroute.domain import Endpoint
from quantroute.policy._precision import COVERS
from quantroute.policy._preferences import label_filter
from quantroute.policy._verdict import Reason, Verdict

__all__ = ["answers_to", "unwanted_among", "without_inseparable_twins"]

_UNWANTED: Final = (
    *("precision_", "native_unknown", "evidence_failed"),
    *("excluded_by_name", "not_in_only"),
)
"""Codes that make an endpoint's answers unwanted, not just unlikely, dear or short."""
_SERVICE_TIERS: Final = frozenset({"flex", "priority", "ultrafast"})
"""Last words of tags that a bare slug does not reach."""


def unwanted_among(verdicts: Iterable[Verdict]) -> tuple[Endpoint, ...]:
    """Endpoints whose answers must not enter a data set, however they come about."""
    return tuple(
        verdict.endpoint
        for verdict in verdicts
        if any(reason.code.startswith(_UNWANTED) for reason in verdict.excluding)
    )


def answers_to(tag: str, endpoint: Endpoint) -> bool:
    """Whether `endpoint` may serve a request for `tag`: its own, or its company's bare slug."""
    if tag == endpoint.tag:
        return True
    is_tier = endpoint.tag.rpartition("/")[2] in _SERVICE_TIERS
    return tag == endpoint.provider_slug and not is_tier


def without_inseparable_twins(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts, with those also excluded whose pinned requests an unwanted twin could serve."""
    unwanted = unwanted_among(verdicts)
    return tuple(_against(verdict, unwanted) for verdict in verdicts)


def _against(verdict: Verdict, unwanted: Sequence[Endpoint]) -> Verdict:
    if not verdict.eligible:
        return verdict
    wanted = verdict.endpoint
    for other in unwanted:
        if answers_to(wanted.tag, other) and not _is_separable(wanted, other):
            reason = Reason(
                "inseparable_twin",
                f"a request for {wanted.tag!r} may be served by {other.tag!r} of "
                f"{other.provider_name}, which is excluded",
            )
            return Verdict.of(wanted, (*verdict.reasons, reason), verdict.precision)
    return verdict


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
