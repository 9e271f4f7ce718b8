"""The query filters of GET /models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from quantroute.simulator._catalogue import Catalogue, LiveModel
from quantroute.simulator._refusal import Refusal

__all__ = ["select_models"]

Keep = Callable[[LiveModel], bool]


def select_models(catalogue: Catalogue, query: Mapping[str, str]) -> dict[str, Any] | None:
    """The filtered list, or None if the query does not filter (the whole list is pre-rendered).

    Raises:
        Refusal: 400, a number is not one.
    """
    keeps = [keep for name, text in query.items() if text and (keep := _filter(name, text))]
    is_paged = "offset" in query or "limit" in query
    if not keeps and not is_paged and "sort" not in query:
        return None
    models = [model for model in catalogue.listed() if all(keep(model) for keep in keeps)]
    if query.get("sort") in ("price", "pricing-low-to-high"):
        models.sort(key=_prompt_usd_per_million)
    rows = [model.wire for model in models]
    body = catalogue.list_json(rows)
    if is_paged:
        offset = int(_number("offset", query.get("offset", "0")))
        limit = min(1000, int(_number("limit", query.get("limit", "500"))))
        body["data"] = rows[offset : offset + limit]
        if offset + limit < len(rows):
            body["links"] = {"next": f"/api/v1/models?offset={offset + limit}&limit={limit}"}
    return body


def _filter(name: str, text: str) -> Keep | None:
    """The test for one query parameter; None for those that do not filter here."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    match name:
        case "supported_parameters":
            return lambda m: set(words) <= set(m.wire.get("supported_parameters") or ())
        case "q":
            needle = text.casefold()
            return lambda m: needle in f"{m.model_id} {m.wire.get('name', '')}".casefold()
        case "providers":
            # Names here, unlike in requests, where slugs are wanted.
            return lambda m: any(e.provider_name in words for e in m.endpoints)
        case "model_authors":
            return lambda m: m.model_id.split("/", 1)[0] in words
        case "context":
            least = _number(name, text)
            return lambda m: (m.wire.get("context_length") or 0) >= least
        case "min_price":
            low = _number(name, text)
            return lambda m: _prompt_usd_per_million(m) >= low
        case "max_price":
            high = _number(name, text)
            return lambda m: 0 <= _prompt_usd_per_million(m) <= high
        case "input_modalities" | "output_modalities":
            return lambda m: set(words) <= set((m.wire.get("architecture") or {}).get(name) or ())
        case "arch":
            return lambda m: (m.wire.get("architecture") or {}).get("tokenizer") in words
        case "zdr":
            return lambda m: text != "true" or any(e.is_zdr for e in m.endpoints)
        case _:
            return None


def _prompt_usd_per_million(model: LiveModel) -> Decimal:
    try:
        return Decimal(str((model.wire.get("pricing") or {}).get("prompt", "-1"))) * 1_000_000
    except InvalidOperation:
        return Decimal(-1)


def _number(name: str, text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise Refusal(400, f"Invalid input: {name}: expected a number") from None
