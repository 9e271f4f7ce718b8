"""How an answer looks on the wire: whole or in chunks, in its plain or in an odd shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from quantroute.pricing import TokenUsage
from quantroute.simulator._backend import BYTES_PER_TOKEN
from quantroute.simulator._pricing import Charge
from quantroute.simulator._refusal import refusal_body

__all__ = ["Chunk", "Reply", "ending", "stream_chunks", "usage_json", "whole_body"]

COMMENT: Final = b": OPENROUTER PROCESSING\n\n"
PADDING: Final = b"\n         \n"
_DONE: Final = b"data: [DONE]\n\n"

Ending = Literal["close", "cut", "hang"]


@dataclass(slots=True, kw_only=True)
class Reply:
    """An answer ready to be spoken, together with everything odd about it.

    `model` and `provider` are what the answer claims; `usage` and the money are what is true.
    """

    generation_id: str
    created: int
    model: str
    provider: str | None
    content: str | None
    reasoning: str | None
    finish_reason: str | None
    usage: TokenUsage
    charge: Charge
    cost_usd: Decimal
    upstream_usd: Decimal | None
    is_byok: bool
    shape: str = ""
    usage_place: str = ""
    usage_body: str = ""
    reasoning_form: str = ""
    extras: frozenset[str] = frozenset()
    chunk_tokens: int = 16

    @property
    def native_finish_reason(self) -> str | None:
        """The provider's own word for why it stopped."""
        return "completed" if self.finish_reason == "stop" else self.finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream, and the output tokens that exist once it is sent."""

    payload: bytes
    reasoning_tokens: int
    content_tokens: int


def ending(reply: Reply) -> Ending:
    """What happens to the connection after the last byte of the answer."""
    if reply.shape in ("cut_content_length", "cut_chunked", "reset"):
        return "cut"
    return "hang" if reply.shape in ("hang", "stall") else "close"


# -- usage -----------------------------------------------------------------------------------------


def usage_json(reply: Reply) -> dict[str, Any] | None:
    """The usage object in the shape drawn for this answer; None for JSON null."""
    form = reply.usage_body
    if form == "usage_null":
        return None
    if form == "usage_empty":
        return {}
    usage = reply.usage
    reasoning = usage.reasoning_tokens or 0
    if "reasoning_overcount" in reply.extras:
        reasoning = usage.output_tokens + 1
    body: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "cost": _double(reply.cost_usd, is_noisy="cost_noise" in reply.extras),
        "is_byok": reply.is_byok,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": usage.cache_write_tokens or 0,
            "audio_tokens": 0,
            "video_tokens": 0,
        },
        "cost_details": _cost_details(reply),
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "image_tokens": 0,
            "audio_tokens": 0,
        },
    }
    return _bent(body, form) if form else body


def _cost_details(reply: Reply) -> dict[str, Any]:
    """Equal to the cost on ordinary requests; the provider's own charge under BYOK."""
    upstream = reply.upstream_usd if reply.is_byok else reply.cost_usd
    is_free = not reply.is_byok and not reply.cost_usd
    return {
        "upstream_inference_cost": float(upstream or 0),
        "upstream_inference_prompt_cost": 0.0 if is_free else float(reply.charge.prompt_usd),
        "upstream_inference_completions_cost": (
            0.0 if is_free else float(reply.charge.completion_usd)
        ),
    }


def _double(usd: Decimal, *, is_noisy: bool) -> float:
    """The amount as a JSON number; noisy ones carry the residue of binary sums (17 digits)."""
    number = float(usd)
    return math.nextafter(number, math.inf) if is_noisy and number else number


def _bent(body: dict[str, Any], form: str) -> dict[str, Any]:
    details = ("prompt_tokens_details", "completion_tokens_details", "cost_details")
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    match form:
        case "usage_details_null":
            body |= dict.fromkeys(details)
        case "usage_floats":
            body |= {name: float(body[name]) for name in counts}
        case "usage_strings":
            body |= {name: str(body[name]) for name in counts}
        case "cost_missing":
            del body["cost"], body["cost_details"]
        case "cost_zero":
            body["cost"] = 0
            del body["cost_details"]
        case _:
            pass
    return body


# -- whole answers ---------------------------------------------------------------------------------


def whole_body(reply: Reply) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    if reply.shape in ("error_in_200", "error_word_code"):
        code = "server_error" if reply.shape == "error_word_code" else 502
        message = f"Upstream error from {reply.provider}: overloaded"
        return {"id": reply.generation_id, "error": {"message": message, "code": code}}
    body: dict[str, Any] = {
        "id": reply.generation_id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "provider": reply.provider,
        "system_fingerprint": None,
    }
    match reply.shape:
        case "choices_null":
            return body | {"choices": None}
        case "choices_empty":
            return body | {"choices": []}
        case "choices_missing":
            return body
        case _:
            body["choices"] = [_choice(reply)]
    if reply.usage_place != "usage_missing":
        body["usage"] = usage_json(reply)
    return body


def _choice(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content,
        "refusal": None,
    }
    message |= _reasoning_json(reply, reply.reasoning)
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
        "native_finish_reason": reply.native_finish_reason,
        "message": message,
    }
    if reply.shape == "finish_missing":
        del choice["finish_reason"], choice["native_finish_reason"]
    if _fails_in_choice(reply):
        choice["error"] = {
            "code": 502,
            "message": "Provider returned error",
            "metadata": {"error_type": "provider_unavailable"},
        }
    return choice


def _fails_in_choice(reply: Reply) -> bool:
    """Mid-stream errors have no stream to break in a whole answer: they stand in the choice."""
    return reply.shape in ("error_in_choice", "error_mid_stream", "error_mid_stream_billed")


def _reasoning_json(reply: Reply, text: str | None) -> dict[str, Any]:
    """The reasoning fields of a message or delta; twice, as the service does, unless bent."""
    if text is None:
        return {} if reply.reasoning_form == "reasoning_content" else {"reasoning": None}
    if reply.reasoning_form == "reasoning_content":
        return {"reasoning_content": text}
    details = [{"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}]
    if reply.reasoning_form == "reasoning_details_only":
        return {"reasoning": None, "reasoning_details": details}
    if reply.reasoning_form == "reasoning_plain":
        return {"reasoning": text}
    return {"reasoning": text, "reasoning_details": details}


# -- streams ---------------------------------------------------------------------------------------


def stream_chunks(reply: Reply) -> list[Chunk]:
    """The whole stream, piece by piece, down to `[DONE]` where there is one."""
    pieces = list(_pieces(reply))
    match reply.shape:
        case "error_in_200" | "error_word_code":
            return [_error_chunk(reply, 0, 0), Chunk(_DONE, 0, 0)]
        case "choices_null" | "choices_empty" | "choices_missing":
            return [_without_choices(reply), Chunk(_DONE, 0, 0)]
        case "error_mid_stream" | "error_mid_stream_billed" | "error_in_choice":
            last = pieces[-1]
            return [*pieces, _error_chunk(reply, last.reasoning_tokens, last.content_tokens)]
        case "truncated_stream":
            return pieces
        case "cut_content_length" | "cut_chunked" | "stall":
            return pieces[: max(1, len(pieces) // 2)]
        case _:
            return _finished(reply, pieces)


def _finished(reply: Reply, pieces: list[Chunk]) -> list[Chunk]:
    """Text, finish reason, usage and sentinel, with usage where this answer has it."""
    reasoning = reply.usage.reasoning_tokens or 0
    spoken = reply.usage.output_tokens - reasoning
    place = reply.usage_place
    chunks = list(pieces)
    usage = [] if place == "usage_missing" else [_usage_chunk(reply, reasoning, spoken)]
    if place == "usage_twice":
        half = Chunk(_event(reply, {"choices": [], "usage": _half_usage(reply)}), reasoning, spoken)
        chunks.insert(max(1, len(chunks) // 2), half)
    if place == "usage_before_text":
        chunks[:0] = usage
    if reply.shape != "finish_missing":
        delta = {"role": "assistant", "content": ""}
        chunks.append(Chunk(_delta(reply, delta, reply.finish_reason), reasoning, spoken))
    if place != "usage_before_text":
        chunks += usage
    if reply.shape != "done_missing":
        chunks.append(Chunk(_DONE, reasoning, spoken))
    return chunks


def _pieces(reply: Reply) -> Iterator[Chunk]:
    """The text as deltas of about `chunk_tokens` tokens; reasoning first."""
    if "comments" in reply.extras:
        yield Chunk(COMMENT * 2, 0, 0)
    thought_tokens = reply.usage.reasoning_tokens or 0
    spoken_tokens = reply.usage.output_tokens - thought_tokens
    thoughts = _cut(reply.reasoning or "", reply.chunk_tokens)
    words = _cut(reply.content or "", reply.chunk_tokens)
    for number, text in enumerate(thoughts, start=1):
        delta = {"role": "assistant", "content": ""} | _reasoning_json(reply, text)
        yield Chunk(_delta(reply, delta, None), thought_tokens * number // len(thoughts), 0)
    for number, text in enumerate(words, start=1):
        payload = _delta(reply, {"role": "assistant", "content": text}, None)
        if "comments" in reply.extras and number % 4 == 1:
            payload = COMMENT + payload
        yield Chunk(payload, thought_tokens, spoken_tokens * number // len(words))
    if not thoughts and not words:
        yield Chunk(_delta(reply, {"role": "assistant", "content": ""}, None), 0, 0)


def _cut(text: str, chunk_tokens: int) -> list[str]:
    size = chunk_tokens * BYTES_PER_TOKEN
    return [text[start : start + size] for start in range(0, len(text), size)]


def _event(reply: Reply, fields: dict[str, Any]) -> bytes:
    head = {
        "id": reply.generation_id,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
        "provider": reply.provider,
    }
    return (
        b"data: "
        + json.dumps(head | fields, ensure_ascii=False).encode("utf-8", "replace")
        + b"\n\n"
    )


def _delta(reply: Reply, delta: dict[str, Any], finish_reason: str | None) -> bytes:
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": finish_reason,
        "native_finish_reason": reply.native_finish_reason if finish_reason else None,
        "logprobs": None,
    }
    return _event(reply, {"choices": [choice]})


def _usage_chunk(reply: Reply, reasoning: int, spoken: int) -> Chunk:
    """The usage in one of its three shapes: no choices, an empty delta, or finish said again."""
    choices: list[dict[str, Any]] = []
    if reply.usage_place in ("usage_with_empty_delta", "usage_with_finish"):
        is_repeated = reply.usage_place == "usage_with_finish"
        choices = [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "finish_reason": reply.finish_reason if is_repeated else None,
                "native_finish_reason": None,
                "logprobs": None,
            }
        ]
    payload = _event(reply, {"choices": choices, "usage": usage_json(reply)})
    return Chunk(payload, reasoning, spoken)


def _half_usage(reply: Reply) -> dict[str, Any] | None:
    """A running count as of the middle; the last one replaces it, they do not add up."""
    body = usage_json(reply)
    if body and isinstance(body.get("completion_tokens"), int):
        body["completion_tokens"] //= 2
        body["total_tokens"] = body["prompt_tokens"] + body["completion_tokens"]
        if "cost" in body:
            body["cost"] = body["cost"] / 2
    return body


def _error_chunk(reply: Reply, reasoning: int, spoken: int) -> Chunk:
    """An error after status 200, with `choices` empty or finished by "error"."""
    code: int | str = "server_error" if reply.shape == "error_word_code" else 502
    fields = refusal_body(
        code, "Provider disconnected unexpectedly", metadata={"error_type": "provider_unavailable"}
    )
    fields.pop("user_id")
    fields["choices"] = []
    if reply.shape == "error_in_choice":
        # The recorded form: an error, finish_reason "error", and what was there so far.
        fields["choices"] = [
            {"index": 0, "delta": {"content": ""}, "finish_reason": "error", "logprobs": None}
        ]
    if reply.shape == "error_mid_stream_billed":
        fields["usage"] = usage_json(reply)
    payload = _event(reply, fields)
    if reply.shape == "error_mid_stream_billed":
        payload += _DONE
    return Chunk(payload, reasoning, spoken)


def _without_choices(reply: Reply) -> Chunk:
    fields: dict[str, Any] = {}
    if reply.shape != "choices_missing":
        fields["choices"] = None if reply.shape == "choices_null" else []
    return Chunk(_event(reply, fields), 0, 0)
