"""A row as plain values, for files: what an exported line holds, and how it is spelled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from quantroute.generation._records import StoredRow, TurnRecord
from quantroute.money import plain_usd, to_usd

__all__ = ["TURN_FIELDS", "encode_line", "row_data"]

#: Fields of a turn's provenance, in the order of the file. Texts are in `messages`.
TURN_FIELDS: Final = (
    "turn",
    "revision",
    "row_class",
    "details",
    "flags",
    "loop_score",
    "finish_reason",
    "native_finish_reason",
    "input_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "cost_pusd",
    "entry_id",
    "generation_id",
    "endpoint",
    "provider_name",
    "served_provider",
    "served_model",
    "quantization_label",
    "precision",
    "input_usd_per_token",
    "output_usd_per_token",
    "listed_at_s",
    "sampling",
    "max_output_tokens",
    "mode",
    "attempts",
    "first_byte_s",
    "total_s",
    "messages_sha256",
    "created_at_s",
)

#: Characters that some readers take for line ends. Inside JSON text they may be written as escapes,
#: and outside of strings they cannot occur. (U+000B, U+000C and U+001C-1E are escaped anyway.)
_LINE_ENDS: Final = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def row_data(row: StoredRow, turns: tuple[TurnRecord, ...], *, model: str) -> dict[str, Any]:
    """One conversation up to `turns`, as JSON values.

    `messages` is the conversation in the usual form; answers carry `reasoning` as a field of its
    own (null when there was none), never inside `content`. `turns` says of each answer where it
    came from. `cost_pusd` is None while the charge of a turn is unknown; `cost_usd` is exact text.
    """
    prompt = row.prompt
    messages: list[dict[str, Any]] = []
    if prompt.system is not None:
        messages.append(_message("system", prompt.system))
    for question, record in zip(prompt.turns, turns, strict=False):
        messages.append(_message("user", question))
        messages.append(_message("assistant", record.content, record.reasoning))
    costs = [record.cost_pusd for record in turns]
    known = None if None in costs else sum(cost for cost in costs if cost is not None)
    return {
        "id": prompt.id,
        "key": row.key,
        "dataset": prompt.dataset,
        "rollout": row.rollout,
        "model": model,
        "messages": messages,
        "turns": [_turn_data(record) for record in turns],
        "cost_pusd": known,
        "cost_usd": None if known is None else plain_usd(to_usd(known)),
        "metadata": dict(prompt.metadata),
    }


def encode_line(row: Mapping[str, Any]) -> bytes:
    """The row as one line of JSON, UTF-8, ended by 0x0A; no other line end of any kind inside."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.translate(_LINE_ENDS).encode() + b"\n"
    except UnicodeEncodeError:  # lone surrogates can only travel as escapes
        return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _message(role: str, content: str, reasoning: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        message["reasoning"] = reasoning
    return message


def _turn_data(record: TurnRecord) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in TURN_FIELDS}
    return found | {
        "row_class": record.row_class.value,
        "details": list(record.details),
        "flags": list(record.flags),
        "precision": dict(record.precision),
        "sampling": dict(record.sampling),
    }
