"""Which endpoints may take a request, and in which order the service tries them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from quantroute.simulator._catalogue import LiveEndpoint, LiveModel
from quantroute.simulator._pricing import table_in_force
from quantroute.simulator._refusal import Refusal, no_route
from quantroute.simulator._request import SOFT, ChatRequest
from quantroute.simulator._scenario import TrafficSpec

__all__ = ["Gate", "attempt_order", "candidates"]

_MILLION: Final = Decimal(1_000_000)
_OUTAGE_WINDOW_S: Final = 30.0
_OUTAGE_FAILURES: Final = 3
#: Slugs whose providers stop work and billing when a streamed connection closes.
#: Source: OpenRouter's streaming guide, read 2026-08; everybody else is assumed not to.
_CAN_CANCEL: Final = frozenset(
    {
        "openai",
        "azure",
        "anthropic",
        "fireworks",
        "novita",
        "deepinfra",
        "together",
        "cohere",
        "hyperbolic",
        "friendli",
        "chutes",
        "deepseek",
        "xai",
        "cloudflare",
        "sf-compute",
        "mancer",
        "avian",
    }
)

Keep = Callable[[LiveEndpoint], bool]


def matches(name: str, endpoint: LiveEndpoint) -> bool:
    """Whether an entry of `only`, `ignore` or `order` means this endpoint.

    A full tag means itself (and its twins); a base slug all of a provider's endpoints except
    those of a service tier. Display names and other spellings mean nothing, silently.
    """
    return name == endpoint.tag or (name == endpoint.slug and endpoint.tier is None)


def candidates(model: LiveModel, request: ChatRequest, *, at_s: float) -> list[LiveEndpoint]:
    """The endpoints that pass every filter of the request.

    Raises:
        Refusal: 404 with the filter that took the last one away, or 400 if the prompt is too long.
    """
    wanted = request.preferences
    named = set(wanted.only) | set(wanted.order)
    left = [
        endpoint
        for endpoint in model.endpoints
        if endpoint.tier is None or endpoint.tag in named or endpoint.tier == request.service_tier
    ]
    if not left:
        raise no_route(
            f"No endpoints found for {request.models[0]}.",
            reason="no_endpoints",
            model=model.model_id,
        )
    serving = left
    for name, keep in _filters(request, at_s):
        kept = [endpoint for endpoint in left if keep(endpoint)]
        if not kept:
            raise _emptied(name, model, request, serving, left)
        left = kept
    return left


def _filters(request: ChatRequest, at_s: float) -> list[tuple[str, Keep]]:
    """The filters this request needs, in the order in which they are reported."""
    wanted = request.preferences
    filters: list[tuple[str, Keep]] = []
    if wanted.only:
        filters.append(("allowed_providers", lambda e: any(matches(n, e) for n in wanted.only)))
    if wanted.ignore:
        filters.append(
            ("ignored_providers", lambda e: not any(matches(n, e) for n in wanted.ignore))
        )
    if wanted.denies_collection:
        filters.append(("data_policy:training", lambda e: not e.collects_data))
    if wanted.needs_zdr:
        filters.append(("data_policy:zdr", lambda e: e.is_zdr))
    if wanted.quantizations:
        filters.append(("quantization", lambda e: e.quantization in wanted.quantizations))
    if wanted.max_price:
        filters.append(("max_price", lambda e: _is_within_price(e, request, at_s)))
    if wanted.require_parameters:
        needed = frozenset(request.parameters) - SOFT
        filters.append(("require_parameters", lambda e: needed <= e.supported))
    if "tools" in request.parameters:
        filters.append(("tools", lambda e: "tools" in e.supported))
    filters.append(("max_tokens", lambda e: _has_room(e, request)))
    filters.append(("context_length", lambda e: _fits_context(e, request)))
    return filters


def _is_within_price(endpoint: LiveEndpoint, request: ChatRequest, at_s: float) -> bool:
    table = table_in_force(endpoint.pricing, input_tokens=request.prompt_tokens, at_s=at_s)
    for name, ceiling in request.preferences.max_price:
        price = table.get(name) or Decimal(0)
        # `request` is a fee per request; only token prices are given per million.
        if (price if name in ("request", "image") else price * _MILLION) > ceiling:
            return False
    return True


def _has_room(endpoint: LiveEndpoint, request: ChatRequest) -> bool:
    limit = endpoint.limit("max_completion_tokens")
    return limit is None or (request.max_tokens or 1) <= limit


def _fits_context(endpoint: LiveEndpoint, request: ChatRequest) -> bool:
    longest = endpoint.limit("max_prompt_tokens")
    if longest is not None and request.prompt_tokens > longest:
        return False
    context = endpoint.limit("context_length")
    return context is None or request.prompt_tokens + (request.max_tokens or 1) <= context


def _emptied(
    name: str,
    model: LiveModel,
    request: ChatRequest,
    serving: list[LiveEndpoint],
    left: list[LiveEndpoint],
) -> Refusal:
    if name == "context_length":
        longest = max(endpoint.limit("context_length") or 0 for endpoint in left)
        total = request.prompt_tokens + (request.max_tokens or 1)
        return Refusal(
            400,
            f"This endpoint's maximum context length is {longest} tokens. However, you requested "
            f"about {total} tokens ({request.prompt_tokens} of text input, "
            f"{request.max_tokens or 1} in the output).",
            metadata={"error_type": "context_length_exceeded"},
        )
    slugs = ", ".join(dict.fromkeys(endpoint.slug for endpoint in serving))
    message = {
        "allowed_providers": "No allowed providers are available for the selected model. "
        f"Providers serving {model.model_id}: {slugs}, but your request's provider.only "
        f"preference permits only: {', '.join(request.preferences.only)}.",
        "ignored_providers": "All providers have been ignored for the selected model.",
        "data_policy:training": "No endpoints found matching your data policy",
        "data_policy:zdr": "No endpoints found matching your data policy",
        "tools": "No endpoints found that support tool use.",
    }.get(name, "No endpoints found that can handle the requested parameters.")
    reason = "privacy_restricted" if name.startswith("data_policy") else "constraint_filtered"
    return no_route(message, reason=reason, model=model.model_id, excluded_by=[name])


def attempt_order(
    allowed: list[LiveEndpoint],
    request: ChatRequest,
    *,
    rng: random.Random,
    now_s: float,
    traffic: Mapping[str, TrafficSpec],
    default_traffic: TrafficSpec,
) -> list[LiveEndpoint]:
    """The endpoints in the order of attempts; one alone if fallbacks are off.

    The asked `order` first, then `sort`, else the balancing: endpoints without a fresh outage
    come first, the leader among them drawn by 1/price^2, the others by falling weight.
    """
    wanted = request.preferences
    if len(allowed) == 1:
        return allowed
    listed = [endpoint for name in wanted.order for endpoint in allowed if matches(name, endpoint)]
    listed = list(dict.fromkeys(listed))
    rest = [endpoint for endpoint in allowed if endpoint not in listed]

    def speed(endpoint: LiveEndpoint) -> TrafficSpec:
        return traffic.get(endpoint.slug, default_traffic)

    if wanted.sort == "price":
        rest.sort(key=lambda e: e.price_sum)
    elif wanted.sort == "throughput":
        rest.sort(key=lambda e: -speed(e).tokens_per_s)
    elif wanted.sort == "latency":
        rest.sort(key=lambda e: speed(e).first_token_s)
    elif wanted.sort == "exacto":
        rest.sort(key=lambda e: -(e.wire.get("uptime_last_1d") or 0.0))
    elif rest and not listed:
        rest = _balanced(rest, rng, now_s)
    if not wanted.allow_fallbacks:
        return listed or rest[:1]
    return listed + rest


def _balanced(
    endpoints: list[LiveEndpoint], rng: random.Random, now_s: float
) -> list[LiveEndpoint]:
    """Stable endpoints led by a draw, then degraded ones, then those with an outage or down."""

    def rank(endpoint: LiveEndpoint) -> int:
        is_failing = (
            endpoint.failures_in_a_row >= _OUTAGE_FAILURES
            and now_s - endpoint.failed_at_s < _OUTAGE_WINDOW_S
        )
        if endpoint.status <= -5 or endpoint.status in (-1, -3):
            return 2
        return 2 if is_failing else int(endpoint.status < 0)

    ordered = sorted(endpoints, key=lambda e: (rank(e), -e.weight))
    best = rank(ordered[0])
    leaders = [endpoint for endpoint in ordered if rank(endpoint) == best]
    leader = rng.choices(leaders, weights=[e.weight for e in leaders])[0]
    return [leader, *(endpoint for endpoint in ordered if endpoint is not leader)]


def output_limit(endpoint: LiveEndpoint, request: ChatRequest) -> int:
    """The most output tokens this endpoint can produce for the request."""
    context = endpoint.limit("context_length")
    room = max(1, context - request.prompt_tokens) if context is not None else 1 << 40
    if "max_tokens" in request.parameters and "max_tokens" in endpoint.supported:
        return min(room, int(request.parameters["max_tokens"]))
    limits = [endpoint.default_output_tokens, endpoint.limit("max_completion_tokens"), room]
    return min(next(limit for limit in limits if limit is not None), room)


@dataclass(slots=True)
class Gate:
    """One provider's own limits: requests at once, and requests per second as a bucket."""

    in_flight: int = 0
    allowance: float = 1.0
    refilled_at_s: float = 0.0

    def admits(self, traffic: TrafficSpec, *, now_s: float) -> bool:
        """Whether one more request may enter now; a yes uses up its share of the rate."""
        if traffic.max_concurrent is not None and self.in_flight >= traffic.max_concurrent:
            return False
        rate = traffic.requests_per_s
        if rate is None:
            return True
        burst = max(1.0, rate)  # one second's worth
        self.allowance = min(burst, self.allowance + (now_s - self.refilled_at_s) * rate)
        self.refilled_at_s = now_s
        if self.allowance < 1.0:
            return False
        self.allowance -= 1.0
        return True


def can_cancel(slug: str, traffic: TrafficSpec) -> bool:
    """Whether closing a streamed connection stops this provider's work and bill."""
    return slug in _CAN_CANCEL if traffic.can_cancel is None else traffic.can_cancel
