"""One small function per kind of rule; each yields what speaks against an endpoint, or notes."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from quantroute.domain import Endpoint
from quantroute.money import usd_per_million
from quantroute.policy._names import Directory, Name
from quantroute.policy._verdict import Reason

if TYPE_CHECKING:
    from quantroute.policy._policy import ExclusionPolicy

__all__ = ["availability", "limits", "named", "parameters", "prices"]

#: Newer endpoints list the output limit under its new name only; the service accepts both.
#: Source: 55 of the 57 endpoints without `max_tokens` in the catalogue of 2026-08-22.
_ALSO_CALLED: Final = {"max_tokens": "max_completion_tokens"}


def named(
    endpoint: Endpoint, only: tuple[Name, ...], exclude: tuple[Name, ...], directory: Directory
) -> Iterator[Reason]:
    """Allow and deny lists; denial wins."""
    for name in exclude:
        if directory.means(name, endpoint):
            yield Reason("excluded_by_name", f"excluded by your list ({name.text!r})")
            return
    if only and not any(directory.means(name, endpoint) for name in only):
        yield Reason("not_in_only", "not among those you allow (only=...)")


def availability(endpoint: Endpoint, policy: ExclusionPolicy) -> Iterator[Reason]:
    """Status and uptime, as last listed."""
    if endpoint.is_down:
        meaning = (
            "under 80 % of the last half hour's requests succeeded"
            if endpoint.status == -5
            else "a status of unpublished meaning"
        )
        yield Reason("down", f"down: {meaning} (status {endpoint.status})")
    elif endpoint.is_degraded:
        text = "degraded: 80-95 % of the last half hour's requests succeeded (status -2)"
        yield Reason("degraded", text, excludes=not policy.allow_degraded)
    elif endpoint.status != 0:
        text = f"status {endpoint.status} has no published meaning"
        yield Reason("status_unknown", text, excludes=False)
    wanted, uptime = policy.min_uptime_percent, endpoint.uptime_30m_percent
    if wanted is None:
        return
    if uptime is None:
        yield Reason("uptime_unknown", "no 30-minute uptime: too little traffic", excludes=False)
    elif not uptime >= wanted:  # written so that NaN excludes
        yield Reason("uptime", f"30-minute uptime {uptime:.1f} % is below your {wanted:g} %")


def prices(endpoint: Endpoint, policy: ExclusionPolicy) -> Iterator[Reason]:
    """A bound must exist under a cap, and the user's ceilings hold at the dearest override."""
    pricing = endpoint.pricing
    if policy.requires_bounded_price:
        if pricing.unknown:
            names = ", ".join(pricing.unknown)
            yield Reason("price_unknown", f"no usable price for {names}: a cap cannot hold")
        if pricing.unmetered:
            names = ", ".join(pricing.unmetered)
            yield Reason("price_unmetered", f"charges for {names}, which is not metered here")
    yield from _ceiling(endpoint, "input", ("prompt",), policy.max_input_usd_per_million)
    yield from _ceiling(
        endpoint,
        "output",
        ("completion", "internal_reasoning"),
        policy.max_output_usd_per_million,
    )


def _ceiling(
    endpoint: Endpoint, side: str, dimensions: tuple[str, ...], wanted: Decimal | str | None
) -> Iterator[Reason]:
    if wanted is None:
        return
    limit = Decimal(wanted)
    if set(dimensions) & set(endpoint.pricing.unknown):
        yield Reason(f"{side}_price_unknown", f"{side} price unknown, against your ceiling")
        return
    dearest = usd_per_million(max(map(endpoint.pricing.ceiling_usd, dimensions)))
    if dearest > limit:
        text = f"{side} at up to ${dearest:f}/M is above your ${limit:f}/M"
        yield Reason(f"{side}_price", text)


def limits(endpoint: Endpoint, policy: ExclusionPolicy) -> Iterator[Reason]:
    """Context and output limits; an endpoint without a limit of its own is not held against it."""
    context, output = endpoint.context_tokens, endpoint.max_output_tokens
    wanted = policy.min_context_tokens
    if wanted is not None and context is not None and context < wanted:
        yield Reason("context", f"context of {context:,} tokens is below your {wanted:,}")
    wanted = policy.min_output_tokens
    if wanted is None:
        return
    # Without an output limit of its own an endpoint can still give no more than its context.
    most = min((limit for limit in (output, context) if limit is not None), default=None)
    if most is not None and most < wanted:
        yield Reason("output_limit", f"gives at most {most:,} output tokens, below your {wanted:,}")


def parameters(endpoint: Endpoint, policy: ExclusionPolicy) -> Iterator[Reason]:
    """Sampling parameters that the endpoint would drop without a word."""
    supported = endpoint.supported_parameters
    missing = sorted(
        name
        for name in policy.required_parameters
        if name not in supported and _ALSO_CALLED.get(name) not in supported
    )
    if missing:
        yield Reason("parameters", f"would silently drop {', '.join(missing)}")
