"""Request bodies, and the bound on input tokens that a reservation rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from quantroute.client._local import LocalEndpoint
from quantroute.client._outcome import ChatRequest
from quantroute.client._replay import ReplayForm, replayed
from quantroute.domain import Message

__all__ = ["encode_body", "input_bound_tokens"]

#: Tokens a chat template may add around one message, and around the whole (a default system
#: prompt included). Source: Kimi's template adds 3-4 control tokens and role text to a message and
#: about 30 tokens of default system prompt; the figures here leave room for others.
_TEMPLATE_TOKENS_PER_MESSAGE: Final = 12
_TEMPLATE_TOKENS_PER_REQUEST: Final = 128


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=dict).encode


def input_bound_tokens(messages: Sequence[Message]) -> int:
    """More tokens than any byte-level tokenizer can make of `messages`.

    A token of a byte-level vocabulary stands for at least one byte of UTF-8, so the number of bytes
    bounds the number of tokens; English text has four to five bytes a token, so the bound is loose
    where it costs little (input) and certain where certainty is promised.
    """
    text_bytes = 0
    for message in messages:
        for name, part in message.items():
            if name != "role":
                text_bytes += _text_bytes(part)
    return text_bytes + _TEMPLATE_TOKENS_PER_MESSAGE * len(messages) + _TEMPLATE_TOKENS_PER_REQUEST


def _text_bytes(part: object) -> int:
    """Bytes of one field of a message; replayed reasoning is read by the model like content."""
    text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
    return len(text) if text.isascii() else len(text.encode())


def encode_body(
    request: ChatRequest,
    *,
    max_tokens: int,
    preferences: Mapping[str, Any],
    local: LocalEndpoint | None = None,
    replay: ReplayForm = ReplayForm.REASONING,
) -> bytes:
    """The JSON body of one attempt, pinned by `preferences` (OpenRouter's `provider` object).

    Earlier reasoning goes out in the form of `replay`, or in the local server's own.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "messages": replayed(request.messages, replay if local is None else local.replay_form),
        "max_tokens": max_tokens,
        "provider": dict(preferences),
        **request.sampling.parameters(),
    }
    if request.is_streamed:
        body["stream"] = True
    if local is not None:
        body = local.body(body, is_streamed=request.is_streamed)
    try:
        return orjson.dumps(body, default=dict)  # `dict` for mappings of another kind
    except TypeError:  # what JSON allows and orjson does not: a seed beyond 64 bits, say
        return _encode(body).encode()
