"""From a request to the endpoint that takes it: edge refusals, attempts in order, failover."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from email.utils import formatdate
from typing import Final

from quantroute.simulator._answers import Ask, Served, answer
from quantroute.simulator._catalogue import LiveEndpoint, LiveModel
from quantroute.simulator._faults import FaultTables, draw
from quantroute.simulator._pricing import worst_case_usd
from quantroute.simulator._refusal import Refusal, html_page, upstream
from quantroute.simulator._request import ChatRequest
from quantroute.simulator._routing import attempt_order, candidates, output_limit
from quantroute.simulator._state import ServiceState

__all__ = ["finish", "refuse_at_edge", "serve_chat"]

_ZERO: Final = Decimal(0)


def refuse_at_edge(state: ServiceState, rng: random.Random) -> None:
    """Draw the faults that need no provider.

    Raises:
        Refusal: one of them happened.
    """
    tables = state.edge_tables
    traffic = state.platform_traffic
    if traffic is not None and not state.platform_gate.admits(traffic, now_s=state.clock.now_s()):
        raise _platform_429(state, tables, rng)
    match draw(tables.edge, rng):
        case "":
            return
        case "platform_429":
            raise _platform_429(state, tables, rng)
        case "html_429":
            raise Refusal(429, "rate limited", html=html_page(429))
        case "html_502":
            raise Refusal(502, "bad gateway", html=html_page(502))
        case "edge_408":
            raise Refusal(408, "Request timed out")
        case "edge_524":
            raise Refusal(524, "A timeout occurred", html=html_page(524))
        case "edge_500":
            raise Refusal(500, "Internal Server Error")
        case "key_401":
            raise Refusal(401, "User not found.")
        case "region_403":
            raise Refusal(403, "This service is not available in your region.")
        case _:
            raise Refusal(
                403,
                "Your input was flagged by moderation",
                metadata={
                    "reasons": ["violence"],
                    "flagged_input": "...",
                    "error_type": "permission_denied",
                },
            )


def _platform_429(state: ServiceState, tables: FaultTables, rng: random.Random) -> Refusal:
    reset_ms = round(1000 * (state.clock.time_s() + tables.retry_after_s))
    headers = {
        "X-RateLimit-Limit": "1000",
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": str(reset_ms),
    }
    return Refusal(
        429,
        "Rate limit exceeded",
        metadata={"headers": headers, "error_type": "rate_limit_exceeded"},
        headers=headers | _retry_after(state, tables, rng),
    )


def _retry_after(state: ServiceState, tables: FaultTables, rng: random.Random) -> dict[str, str]:
    form = tables.retry_after
    if form == "mixed":
        form = rng.choice(("none", "seconds", "date"))
    if form == "none":
        return {}
    if form == "seconds":
        return {"Retry-After": f"{tables.retry_after_s:g}"}
    when_s = math.ceil(state.clock.time_s() + tables.retry_after_s)
    return {"Retry-After": formatdate(when_s, usegmt=True)}


# -- attempts --------------------------------------------------------------------------------------


async def serve_chat(
    state: ServiceState, request: ChatRequest, rng: random.Random, sample: int
) -> Served:
    """The answer to a request from the first endpoint that gives one.

    Raises:
        Refusal: every model and endpoint refused; the last refusal, with the others inside.
    """
    refusal: Refusal | None = None
    for name in request.models:
        model = state.catalogue.find(name)
        if model is None:
            refusal = Refusal(
                400, f"{name} is not a valid model ID", metadata={"error_type": "model_not_found"}
            )
            continue
        ask = Ask(request=request, model=model, rng=rng, sample=sample)
        try:
            endpoint, held_usd = await _first_willing(state, ask)
        except Refusal as error:
            refusal = error
            continue
        slug = endpoint.slug  # a relabelling may change it while the backend works
        try:
            return await answer(state, ask, endpoint=endpoint, held_usd=held_usd)
        except BaseException:
            finish(state, slug, held_usd)  # the attempt was admitted; nobody else will end it
            raise
    raise refusal or Refusal(400, "No models provided")


async def _first_willing(state: ServiceState, ask: Ask) -> tuple[LiveEndpoint, Decimal]:
    """The endpoint that takes the request, entered at its gate, and the money held for it."""
    _check_thinking(ask.model, ask.request)
    allowed = candidates(ask.model, ask.request, at_s=state.clock.time_s())
    order = attempt_order(
        allowed,
        ask.request,
        rng=ask.rng,
        now_s=state.clock.now_s(),
        traffic=state.provider_traffic,
        default_traffic=state.traffic,
    )
    failures: list[tuple[LiveEndpoint, Refusal]] = []
    for endpoint in order:
        try:
            return endpoint, _admit(state, ask, endpoint)
        except Refusal as refusal:
            failures.append((endpoint, refusal))
            if refusal.code == 400:
                break  # the request's own fault: no other provider is bothered with it
            if state.time_scale and refusal.code != 402:
                await state.clock.sleep(_refusal_s(state, endpoint))
    raise _all_failed(failures)


def _check_thinking(model: LiveModel, request: ChatRequest) -> None:
    if request.wants_thinking is False and model.reasoning and model.reasoning.get("mandatory"):
        raise Refusal(400, "Reasoning is mandatory for this endpoint and cannot be disabled.")


def _refusal_s(state: ServiceState, endpoint: LiveEndpoint) -> float:
    """A refusal takes a quarter of the time to the first token."""
    return state.traffic_of(endpoint.slug).first_token_s * state.time_scale / 4


def _admit(state: ServiceState, ask: Ask, endpoint: LiveEndpoint) -> Decimal:
    """Enter an endpoint's gate; returns the worst case in USD that is now held.

    Raises:
        Refusal: it is full, out, failing by draw, or the account cannot afford it.
    """
    state.stats.attempts_by_tag[endpoint.tag] += 1
    held_usd = _check_funds(state, endpoint, ask.request)
    tables = state.tables(endpoint.slug)
    now_s = state.clock.now_s()
    gate = state.gates[endpoint.slug]
    code = 0
    if not gate.admits(state.traffic_of(endpoint.slug), now_s=now_s):
        code = 429
    elif endpoint.is_out:
        code = 502
    elif fault := draw(tables.upstream, ask.rng):
        code = int(fault.removeprefix("upstream_"))
    if code:
        if code >= 500:
            endpoint.failures_in_a_row += 1
            endpoint.failed_at_s = now_s
        headers = _retry_after(state, tables, ask.rng) if code in (429, 503) else {}
        raise upstream(
            code,
            provider_name=endpoint.provider_name,
            model=ask.model.model_id,
            headers=headers,
        )
    endpoint.failures_in_a_row = 0
    gate.in_flight += 1
    state.account.hold(held_usd)
    return held_usd


def finish(state: ServiceState, slug: str, held_usd: Decimal) -> None:
    """Leave a provider's gate and let go of the held money."""
    state.gates[slug].in_flight -= 1
    state.account.release(held_usd)


def _all_failed(failures: list[tuple[LiveEndpoint, Refusal]]) -> Refusal:
    """The last failure, telling about the earlier ones.

    A Retry-After only stands if every endpoint tried gave one.
    """
    # A provider that failed says more than one that was not affordable.
    real = [failure for failure in failures if failure[1].code != 402] or failures
    _, last = real[-1]
    if last.code == 402:
        last.metadata = {
            "provider_name": None,
            "previous_errors": [
                {"code": 402, "message": refusal.message} for _, refusal in failures
            ],
        }
        return last
    if len(failures) > 1 and last.code != 500:
        last.metadata["previous_errors"] = [
            {"provider": endpoint.provider_name, "code": refusal.code, "status": refusal.code}
            for endpoint, refusal in failures
            if refusal is not last
        ]
    if not all("Retry-After" in refusal.headers for _, refusal in failures):
        last.headers.pop("Retry-After", None)
    return last


def _check_funds(state: ServiceState, endpoint: LiveEndpoint, request: ChatRequest) -> Decimal:
    """The worst case of an attempt in USD, if the account can afford it."""
    account = state.account
    if not account.is_limited:
        return _ZERO
    limit = output_limit(endpoint, request)
    whole, fixed, per_output = worst_case_usd(
        endpoint.pricing,
        input_tokens=request.prompt_tokens,
        output_tokens=limit,
        at_s=state.clock.time_s(),
    )
    found = account.available_usd()
    if found is None or (whole <= found[0] and found[0] >= 0):
        return whole
    available, limiter = found
    remedy = (
        "visit https://openrouter.ai/settings/credits and add more credits"
        if limiter == "credits"
        else "visit https://openrouter.ai/settings/keys and create a key with a higher limit"
    )
    if available <= 0:
        raise Refusal(402, f"Insufficient credits. To continue, {remedy}")
    if fixed >= available or not per_output:
        per_input = fixed / request.prompt_tokens
        affordable = int(available / per_input) if per_input else 0
        raise Refusal(
            402,
            f"Prompt tokens limit exceeded: {request.prompt_tokens} > {affordable}. "
            f"To increase, {remedy}",
        )
    affordable = int((available - fixed) / per_output)
    raise Refusal(
        402,
        "This request requires more credits, or fewer max_tokens. You requested up to "
        f"{limit} tokens, but can only afford {affordable}. To increase, {remedy}",
    )
