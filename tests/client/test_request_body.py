"""The bytes that are sent say exactly what was asked, whichever encoder wrote them."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.client import ChatRequest
from quantroute.client._body import encode_body
from quantroute.domain import Sampling

MODEL = "moonshotai/kimi-k2.5"
PIN = {"only": ["alpha/int4"], "allow_fallbacks": False, "max_price": {"prompt": "0.6"}}


def sent(request: ChatRequest) -> dict[str, Any]:
    body = json.loads(encode_body(request, max_tokens=64, preferences=MappingProxyType(PIN)))
    assert isinstance(body, dict)
    return body


@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1),
    temperature=st.floats(0, 2),
    seed=st.integers(),
)
def test_text_and_numbers_arrive_as_they_are(text: str, temperature: float, seed: int) -> None:
    request = ChatRequest(
        model=MODEL,
        messages=({"role": "user", "content": text},),
        max_output_tokens=64,
        sampling=Sampling(temperature=temperature, seed=seed),
    )
    assert sent(request) == {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 64,
        "provider": PIN,
        "temperature": temperature,
        "seed": seed,
    }


@pytest.mark.parametrize("seed", [2**63, 2**64, 2**200])
def test_a_seed_beyond_64_bits_is_sent(seed: int) -> None:
    request = ChatRequest(
        model=MODEL,
        messages=(MappingProxyType({"role": "user", "content": "hi"}),),
        max_output_tokens=64,
        sampling=Sampling(seed=seed),
    )
    assert sent(request)["seed"] == seed
    assert sent(request)["messages"] == [{"role": "user", "content": "hi"}]
