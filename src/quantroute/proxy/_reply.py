"""What goes out: completions, streams and errors as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from quantroute.client import Answer
from quantroute.errors import (
    AccountError,
    BudgetError,
    BudgetExceeded,
    ConfigurationError,
    NoEligibleEndpoint,
    QuantrouteError,
    RateLimited,
    RegistryError,
    RequestRefused,
    TransportError,
)
from quantroute.money import plain_usd, to_usd
from quantroute.registry import ModelNotListed

__all__ = ["NotAllowed", "completion", "error_body", "headers_of", "status_of", "stream"]


class NotAllowed(QuantrouteError):
    """The caller may not use this proxy."""


#: The status each error has, most special class first. 402 and 4xx are not retried by clients;
#: 429 and 5xx are, and should be.
_STATUS: Final[tuple[tuple[type[QuantrouteError], int, str], ...]] = (
    (NotAllowed, 403, "not_allowed"),
    (BudgetExceeded, 402, "budget_exceeded"),
    (BudgetError, 500, "ledger_error"),
    (NoEligibleEndpoint, 404, "no_eligible_endpoint"),
    (AccountError, 403, "account_error"),
    (RateLimited, 429, "rate_limited"),
    (TransportError, 504, "transport_error"),
    (ConfigurationError, 400, "invalid_request_error"),
    (RequestRefused, 400, "request_refused"),
    (ModelNotListed, 404, "model_not_found"),
    (RegistryError, 503, "registry_error"),
)


def completion(answer: Answer, *, model: str, request_id: str, created_s: int) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning"] = answer.reasoning
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    body = _head(model, request_id, created_s, "chat.completion") | {"choices": [choice]}
    if answer.usage is not None:
        body["usage"] = _usage(answer)
    body["quantroute"] = _facts(answer)
    return body


def stream(
    answer: Answer, *, model: str, request_id: str, created_s: int, wants_usage: bool
) -> Iterator[bytes]:
    """The events of a streamed answer, `[DONE]` last."""
    head = _head(model, request_id, created_s, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return _event(head | {"choices": [choice]} | more)

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning": answer.reasoning})
    if answer.content:
        yield chunk({"content": answer.content})
    yield chunk({}, answer.finish_reason, quantroute=_facts(answer))
    if wants_usage and answer.usage is not None:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def status_of(error: QuantrouteError) -> int:
    """The HTTP status that tells a client what to do."""
    if isinstance(error, RequestRefused):
        return error.status if 400 <= error.status < 500 else 400
    return next((status for kind, status, _ in _STATUS if isinstance(error, kind)), 502)


def error_body(error: QuantrouteError) -> dict[str, Any]:
    """OpenAI's error object. The message is ours; it never holds a key."""
    code = next((code for kind, _, code in _STATUS if isinstance(error, kind)), "upstream_error")
    return {"error": {"message": str(error), "type": code, "code": code, "param": None}}


def headers_of(answer: Answer) -> dict[str, str]:
    """The same facts for clients that hide unknown fields."""
    facts = _facts(answer)
    names = ("cost_usd", "endpoint", "provider", "precision", "attempts")
    return {
        f"x-quantroute-{name.replace('_', '-')}": str(facts[name])
        for name in names
        if facts[name] is not None
    }


def _head(model: str, request_id: str, created_s: int, kind: str) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": created_s, "model": model}


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    assert usage is not None
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "cost": None if answer.cost_pusd is None else float(to_usd(answer.cost_pusd)),
    }


def _facts(answer: Answer) -> dict[str, Any]:
    """Where the answer came from; `cost_usd` is exact text, None until the bill is known."""
    provenance = answer.provenance
    return {
        "cost_usd": None if answer.cost_pusd is None else plain_usd(to_usd(answer.cost_pusd)),
        "endpoint": str(provenance.endpoint.key),
        "provider": provenance.served_provider or provenance.endpoint.provider_name,
        "precision": provenance.precision.quantization.value,
        "generation_id": provenance.generation_id,
        "attempts": answer.attempt,
        "flags": list(answer.flags),
    }


def _event(body: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
