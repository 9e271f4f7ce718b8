"""The catalogue's entries as published. Unknown fields are kept; these names stop in this package.

Source: OpenRouter endpoint, model and provider lists of 2026-07-10 and 2026-08-22; all fields
beyond the identifying ones are treated as optional, since the list is open.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

__all__ = ["WireArchitecture", "WireEndpoint", "WireModel", "WireProvider", "WireTopProvider"]


def _mapping(value: object) -> object:
    """Prices that are no mapping are unknown prices, not a malformed endpoint."""
    return value if isinstance(value, dict) else {}


def _texts(value: object) -> object:
    """Null is an empty list; entries that are no text are dropped."""
    if value is None:
        return []
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else value


def _zero(value: object) -> object:
    return 0 if value is None else value


def _percent(value: object) -> object:
    """An uptime that is no percentage is not known; it does not damn the endpoint."""
    try:
        number = float(value)  # type: ignore[arg-type]  # anything JSON can hold
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0.0 <= number <= 100.0 else None


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Texts = Annotated[list[str], BeforeValidator(_texts)]
Tokens = Annotated[int, Field(ge=0)]
Percent = Annotated[float | None, BeforeValidator(_percent)]
Prices = Annotated[dict[str, Any], BeforeValidator(_mapping)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), defer_build=True)


class WireEndpoint(_Wire):
    """One entry of `GET /models/{author}/{slug}/endpoints`."""

    tag: Text
    provider_name: Text
    name: str | None = None
    quantization: Any = None
    pricing: Prices = {}
    status: Annotated[int, BeforeValidator(_zero)] = 0
    context_length: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_prompt_tokens: Tokens | None = None
    supported_parameters: Texts = []
    uptime_last_5m: Percent = None
    uptime_last_30m: Percent = None
    uptime_last_1d: Percent = None


class WireArchitecture(_Wire):
    """What a model takes in and gives out."""

    input_modalities: Texts = []
    output_modalities: Texts = []
    tokenizer: str | None = None


class WireTopProvider(_Wire):
    """Limits of the provider listed first; other endpoints differ."""

    max_completion_tokens: Tokens | None = None


class WireModel(_Wire):
    """One entry of `GET /models`."""

    id: Text
    name: str | None = None
    canonical_slug: str | None = None
    hugging_face_id: str | None = None
    created: Tokens | None = None
    context_length: Tokens | None = None
    architecture: WireArchitecture | None = None
    top_provider: WireTopProvider | None = None
    pricing: Prices = {}
    supported_parameters: Texts = []
    expiration_date: str | None = None


class WireProvider(_Wire):
    """One entry of `GET /providers`; the archive of July 2026 spells more fields, all optional."""

    slug: Text
    name: Text
    headquarters: str | None = None
    datacenters: Texts = []
