"""GET /generation: the record of one answer, a little late, as the service gives it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from quantroute.simulator._bill import GenerationRecord
from quantroute.simulator._refusal import Refusal
from quantroute.simulator._state import ServiceState

__all__ = ["generation_body"]


def generation_body(state: ServiceState, generation_id: str) -> dict[str, Any]:
    """The body for one id.

    Raises:
        Refusal: 400 without an id; 404 while the record is not out yet, or for ever.
    """
    if not generation_id:
        raise Refusal(400, "Invalid input: id: expected a string")
    record = state.bill.records.get(generation_id)
    lookups = state.bill.lookups
    if record is not None:
        lookups[generation_id] += 1
    if (
        record is None
        or lookups[generation_id] <= state.generation_misses
        or state.clock.now_s() - record.recorded_at_s < state.generation_delay_s
    ):
        raise Refusal(404, f"Generation {generation_id} not found")
    return {"data": _record_json(record)}


def _record_json(record: GenerationRecord) -> dict[str, Any]:
    usage = record.usage
    cost = float(record.cost_usd)
    created = datetime.fromtimestamp(record.created_at_s, UTC)
    return {
        "id": record.generation_id,
        "upstream_id": f"chatcmpl-{record.generation_id[-12:]}",
        "total_cost": cost,
        "usage": cost,
        "cache_discount": None,
        "upstream_inference_cost": float(record.upstream_usd or 0) if record.is_byok else 0,
        "is_byok": record.is_byok,
        "model": record.model,
        "provider_name": record.provider_name,
        "provider_responses": [{"provider_name": record.provider_name, "status": 200}],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "streamed": record.is_streamed,
        "cancelled": record.is_cancelled,
        "latency": record.latency_ms,
        "generation_time": record.generation_ms,
        "moderation_latency": None,
        "tokens_prompt": usage.input_tokens,
        "tokens_completion": usage.output_tokens,
        "native_tokens_prompt": usage.input_tokens,
        "native_tokens_completion": usage.output_tokens,
        "native_tokens_reasoning": usage.reasoning_tokens,
        "native_tokens_cached": usage.cached_tokens,
        "num_media_prompt": None,
        "num_media_completion": None,
        "num_search_results": None,
        "finish_reason": record.finish_reason,
        "native_finish_reason": record.finish_reason,
        "router": None,
        "service_tier": None,
        "session_id": None,
        "response_cache_source_id": None,
    }
