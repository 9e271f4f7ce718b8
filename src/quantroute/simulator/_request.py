"""The chat request as the service reads it: validated, and nothing it does not know rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from quantroute.domain import Quantization
from quantroute.simulator._backend import count_prompt_tokens, prompt_id
from quantroute.simulator._refusal import Refusal

__all__ = ["ChatRequest", "Preferences", "parse_chat"]

#: Body fields an endpoint either lists as supported or never sees.
DROPPABLE: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_a",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "reasoning",
    "include_reasoning",
    "max_tokens",
    "tools",
    "response_format",
    "verbosity",
)
#: Left to the provider's goodwill even under `require_parameters`.
SOFT: Final = frozenset({"tools", "response_format", "verbosity", "include_reasoning"})
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_a": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
    "top_k": (0.0, math.inf),
}
#: Share of the output limit that each effort grants to reasoning.
#: Source: OpenRouter's reasoning guide, read 2026-08.
_EFFORT_SHARES: Final = {
    "max": 0.95,
    "xhigh": 0.95,
    "high": 0.8,
    "medium": 0.5,
    "low": 0.2,
    "minimal": 0.1,
}
_SORTS: Final = frozenset({"price", "throughput", "latency", "exacto"})
_TIER_ALIASES: Final = {":floor": ("price", "flex"), ":nitro": ("throughput", "priority")}
_LABELS: Final = frozenset(member.value for member in Quantization)
#: Documented: these labels as filters include their block-scaled relatives.
_INCLUDES: Final = {"fp4": ("mxfp4", "nvfp4"), "fp8": ("mxfp8",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The `provider` object. Ceilings are USD per million tokens, as on the wire."""

    order: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    allow_fallbacks: bool = True
    require_parameters: bool = False
    quantizations: frozenset[str] = frozenset()
    max_price: tuple[tuple[str, Decimal], ...] = ()
    sort: str | None = None
    denies_collection: bool = False
    needs_zdr: bool = False


NO_PREFERENCES: Final = Preferences()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One parsed request. `wants_thinking` None leaves it to the model."""

    models: tuple[str, ...]
    messages: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    max_tokens: int | None
    is_streamed: bool
    preferences: Preferences
    wants_thinking: bool | None
    thinking_limit_tokens: int | None
    thinking_share: float | None
    hides_reasoning: bool
    service_tier: str | None
    prompt_tokens: int
    prompt_id: str


def parse_chat(raw: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        Refusal: 400, as the service words it.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        raise Refusal(400, "Invalid JSON in request body") from None
    if not isinstance(body, dict):
        raise _invalid("body", "expected an object")
    messages = _messages(body)
    model, sort, tier = _model(body)
    max_tokens = _max_tokens(body)
    parameters = _parameters(body, max_tokens)
    thinking, budget, share, hides = _thinking(body)
    return ChatRequest(
        models=(model, *(name for name in body.get("models") or () if name != model)),
        messages=messages,
        parameters=parameters,
        max_tokens=max_tokens,
        is_streamed=bool(body.get("stream")),
        preferences=_preferences(body.get("provider"), sort),
        wants_thinking=thinking,
        thinking_limit_tokens=budget,
        thinking_share=share,
        hides_reasoning=hides,
        service_tier=body.get("service_tier") or tier,
        prompt_tokens=count_prompt_tokens(messages),
        prompt_id=prompt_id(messages),
    )


def _invalid(field: str, problem: str) -> Refusal:
    return Refusal(400, f"Invalid input: {field}: {problem}")


def _model(body: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """(id, sort, service tier): the suffixes :floor and :nitro are shorthands for the latter."""
    fallbacks = body.get("models") or ()
    model = body.get("model") or (fallbacks[0] if fallbacks else None)
    if not isinstance(model, str):
        raise Refusal(400, "No models provided")
    for suffix, (sort, tier) in _TIER_ALIASES.items():
        if model.endswith(suffix):
            return model.removesuffix(suffix), sort, tier
    return model, None, None


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "expected a non-empty array")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"messages[{position}].role", "expected a string")
        if not isinstance(message.get("content"), str | list | None):
            raise _invalid(f"messages[{position}].content", "expected a string or parts")
    return messages


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise _invalid("max_tokens", "expected an integer of at least 1")
    return limit


def _parameters(body: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    found = {name: body[name] for name in DROPPABLE if body.get(name) is not None}
    for name, (low, high) in _RANGES.items():
        if name in found:
            number = found[name]
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not low <= number <= high:
                raise _invalid(name, f"expected a number in [{low:g}, {high:g}]")
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    stop = found.get("stop")
    if isinstance(stop, str):
        found["stop"] = [stop]
    if len(found.get("stop", ())) > 4:
        raise _invalid("stop", "expected at most 4 strings")
    return found


class Thinking(NamedTuple):
    """What a request says about reasoning: on or off, how much, and whether it is shown."""

    is_wanted: bool | None
    limit_tokens: int | None
    share: float | None
    is_hidden: bool


def _thinking(body: Mapping[str, Any]) -> Thinking:
    reasoning = body.get("reasoning")
    if reasoning is None and (effort := body.get("reasoning_effort")) is not None:
        reasoning = {"effort": effort}
    hidden = body.get("include_reasoning") is False
    if reasoning is None:
        return Thinking(None, None, None, hidden)
    if not isinstance(reasoning, dict):
        raise _invalid("reasoning", "expected an object")
    effort, limit = reasoning.get("effort"), reasoning.get("max_tokens")
    if effort is not None and limit is not None:
        raise _invalid("reasoning", "only one of effort and max_tokens can be given")
    hidden = hidden or bool(reasoning.get("exclude"))
    if reasoning.get("enabled") is False or effort == "none":
        return Thinking(False, None, None, hidden)
    if effort is not None and effort not in _EFFORT_SHARES:
        raise _invalid("reasoning.effort", f"expected one of {', '.join(_EFFORT_SHARES)}")
    asked = True if (reasoning.get("enabled") or effort or limit) else None
    limit = limit if isinstance(limit, int) else None
    return Thinking(asked, limit, _EFFORT_SHARES.get(effort or ""), hidden)


def _preferences(wire: Any, sort: str | None) -> Preferences:
    if wire is None:
        return NO_PREFERENCES if sort is None else Preferences(sort=sort)
    if not isinstance(wire, dict):
        raise _invalid("provider", "expected an object")
    return Preferences(
        order=_names(wire, "order"),
        only=_names(wire, "only"),
        ignore=_names(wire, "ignore"),
        allow_fallbacks=wire.get("allow_fallbacks") is not False,
        require_parameters=bool(wire.get("require_parameters")),
        quantizations=_quantizations(wire.get("quantizations")),
        max_price=_max_price(wire.get("max_price")),
        sort=_sort(wire.get("sort")) or sort,
        denies_collection=wire.get("data_collection") == "deny",
        needs_zdr=bool(wire.get("zdr")),
    )


def _names(wire: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = wire.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _invalid(f"provider.{key}", "expected an array of strings")
    return tuple(names)


def _quantizations(labels: Any) -> frozenset[str]:
    if labels is None:
        return frozenset()
    if not isinstance(labels, list):
        raise _invalid("provider.quantizations", "expected an array of strings")
    for position, label in enumerate(labels):
        if label not in _LABELS:
            raise _invalid(f"provider.quantizations[{position}]", "unknown quantization level")
    return frozenset(labels).union(*(_INCLUDES.get(label, ()) for label in labels))


def _max_price(wire: Any) -> tuple[tuple[str, Decimal], ...]:
    if wire is None:
        return ()
    if not isinstance(wire, dict):
        raise _invalid("provider.max_price", "expected an object")
    ceilings = []
    for name, price in wire.items():
        try:
            # A JSON number counts as it is written: 2.25 means 2.25, not its nearest double.
            ceilings.append((name, Decimal(repr(price) if isinstance(price, float) else price)))
        except (InvalidOperation, TypeError, ValueError):
            raise _invalid(f"provider.max_price.{name}", "expected a number") from None
    return tuple(ceilings)


def _sort(wire: Any) -> str | None:
    by = wire.get("by") if isinstance(wire, dict) else wire
    if by is not None and by not in _SORTS:
        raise _invalid("provider.sort", f"expected one of {', '.join(sorted(_SORTS))}")
    return by
