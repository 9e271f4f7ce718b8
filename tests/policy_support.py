"""Endpoints for the policy's tests, and the recorded listings they are compared with."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from quantroute.domain import Endpoint, Provider, Quantization
from quantroute.money import parse_price
from quantroute.pricing import Pricing

AT = datetime(2026, 8, 22, 12, tzinfo=UTC)
K25 = "moonshotai/kimi-k2.5"
CATALOGUE = (
    Path(__file__).resolve().parents[1] / "../shared/data/openrouter/catalogue-2026-08-22.json.gz"
)

PROVIDERS = (
    Provider(slug="fireworks", name="Fireworks"),
    Provider(slug="baseten", name="BaseTen"),
    Provider(slug="moonshotai", name="Moonshot AI"),
    Provider(slug="siliconflow", name="SiliconFlow"),
    Provider(slug="google-vertex", name="Google"),
)


def make_endpoint(
    tag: str = "siliconflow/int4",
    name: str = "SiliconFlow",
    label: str | None = "int4",
    *,
    usd_in: str = "0.00000045",
    usd_out: str = "0.00000225",
    **changes: Any,
) -> Endpoint:
    """A healthy int4 endpoint of Kimi K2.5, but for what is said otherwise."""
    facts: dict[str, Any] = {
        "model": K25,
        "tag": tag,
        "provider_name": name,
        "quantization": Quantization.parse(label),
        "quantization_label": label,
        "pricing": Pricing.flat(input_usd_per_token=usd_in, output_usd_per_token=usd_out),
        "context_tokens": 262_144,
        "supported_parameters": frozenset({"max_tokens", "temperature", "top_p", "reasoning"}),
        "served_name": "moonshotai/kimi-k2.5-0127",
    }
    return Endpoint(**(facts | changes))


MOONSHOT = make_endpoint("moonshotai/int4", "Moonshot AI")
FIREWORKS = make_endpoint("fireworks", "Fireworks", "unknown")
SILICONFLOW = make_endpoint()


def recorded_catalogue() -> dict[str, Any]:
    """The archived catalogue; skips the test where the archive is not at hand."""
    if not CATALOGUE.exists():
        pytest.skip("recorded catalogue not found beside the repository (../shared/data)")
    with gzip.open(CATALOGUE) as file:
        catalogue: dict[str, Any] = json.load(file, parse_float=Decimal)
    return catalogue


def recorded_endpoints(catalogue: dict[str, Any], model: str) -> list[Endpoint]:
    """One model's archived list, read for what the policy looks at."""
    found: list[Endpoint] = []
    for entry in catalogue["endpoints"][model]["data"]["endpoints"]:
        found.append(
            Endpoint(
                model=model,
                tag=entry["tag"],
                ordinal=sum(other.tag == entry["tag"] for other in found),
                provider_name=entry["provider_name"],
                quantization=Quantization.parse(entry["quantization"]),
                quantization_label=entry["quantization"],
                pricing=Pricing(
                    prices={
                        name: parse_price(price)
                        for name, price in entry["pricing"].items()
                        if name not in ("discount", "overrides")
                    }
                ),
                status=entry["status"],
                context_tokens=entry["context_length"],
                max_output_tokens=entry["max_completion_tokens"],
                supported_parameters=frozenset(entry["supported_parameters"]),
            )
        )
    return found
