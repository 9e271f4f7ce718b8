"""A stored answer for tests that only look at a few of its fields."""

from __future__ import annotations

from typing import Any

from quantroute.generation import RowClass, TurnRecord


def make_record(**changes: Any) -> TurnRecord:
    """A good answer, with changes."""
    values: dict[str, Any] = {
        "turn": 0,
        "row_class": RowClass.GOOD,
        "details": (),
        "flags": (),
        "loop_score": 0.0,
        "content": "text",
        "reasoning": None,
        "finish_reason": "stop",
        "native_finish_reason": "stop",
        "input_tokens": 10,
        "output_tokens": 20,
        "reasoning_tokens": 0,
        "cached_tokens": None,
        "cache_write_tokens": None,
        "cost_pusd": 100,
        "entry_id": "e",
        "generation_id": "gen-1",
        "endpoint": "a/int4",
        "provider_name": "A",
        "served_provider": "A",
        "served_model": None,
        "quantization_label": "int4",
        "precision": {},
        "input_usd_per_token": "0.0000006",
        "output_usd_per_token": "0.0000025",
        "listed_at_s": 0.0,
        "sampling": {},
        "max_output_tokens": 256,
        "mode": "default",
        "attempts": 1,
        "first_byte_s": None,
        "total_s": 1.0,
        "messages_sha256": "0" * 64,
        "created_at_s": 0.0,
    }
    return TurnRecord(**(values | changes))
