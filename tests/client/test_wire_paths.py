"""The strict models for usual bodies and the tolerant ones for all bodies say the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute._json import loads
from quantroute.client import _reply
from quantroute.client._reply import BodyDecoder, Reply, StreamDecoder
from quantroute.client._wire import UsualReply, read_usual
from quantroute.secrets import Redactor

KEY = "sk-or-v1-0123456789abcdef"

USUAL: dict[str, Any] = {
    "id": "gen-1764000000-abc",
    "object": "chat.completion",
    "model": "moonshotai/kimi-k2.5-0127",
    "provider": "Moonshot AI",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "native_finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": "The sky scatters short waves more.",
                "refusal": None,
                "reasoning": "Rayleigh.",
                "reasoning_details": [{"type": "reasoning.text", "text": "Rayleigh.", "index": 0}],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 12,
        "completion_tokens": 34,
        "total_tokens": 46,
        "cost": 0.000_123,
        "is_byok": False,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 20},
        "cost_details": {"upstream_inference_cost": None},
    },
}

#: What services have put, or may put, where something else belongs.
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.sampled_from(["", "12", " 7 ", "true", "stop", "1e3", KEY, "\ud800", "ü", "\u2028"]),
    st.text(max_size=8),
    st.sampled_from([[], {}, [None], [{}], {"text": "x"}, [{"text": "a"}, None], {"code": 429}]),
)


def _paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value can be replaced: every place in the body but its root."""
    steps: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = list(enumerate(value))
    return [
        found for step, inner in steps for found in ((*path, step), *_paths(inner, (*path, step)))
    ]


PLACES = [
    *_paths(USUAL),
    ("error",),
    ("choices", 0, "error"),
    ("choices", 0, "delta"),
    ("choices", 0, "message", "reasoning_content"),
    ("usage", "is_byok"),
]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """The usual body with some of its values missing or replaced by odd ones."""
    body = copy.deepcopy(USUAL)
    for path in draw(st.lists(st.sampled_from(PLACES), max_size=4)):
        *way, last = path
        place: Any = body
        try:
            for step in way:
                place = place[step]
            if draw(st.booleans()):
                place[last] = copy.deepcopy(draw(odd_values))
            else:
                del place[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken that place away
    return body


def decoded(raw: bytes, *, is_streamed: bool) -> Reply:
    redactor = Redactor((KEY,))
    decoder = StreamDecoder(200, redactor) if is_streamed else BodyDecoder(200, redactor)
    decoder.feed(raw)
    return decoder.finish(is_cut=False)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_both_ways_of_reading_give_the_same_reply(is_streamed: bool) -> None:
    """Which models read a body can never be told from the reply."""
    ways = set()

    @settings(max_examples=examples(400), deadline=None)
    @given(bodies())
    def check(body: dict[str, Any]) -> None:
        if is_streamed:
            choices = body.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict) and "message" in choice:
                    choice["delta"] = choice.pop("message")
        text = json.dumps(body)
        raw = (f"data: {text}\n\ndata: [DONE]\n\n" if is_streamed else text).encode()
        ways.add(type(read_usual(text.encode())))
        usual = decoded(raw, is_streamed=is_streamed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_reply, "read_usual", lambda _: None)
            assert decoded(raw, is_streamed=is_streamed) == usual

    check()
    assert ways == {UsualReply, type(None)}, "the test must have taken both ways"


def test_the_usual_body_takes_the_short_way() -> None:
    """Recorded answers look like this one; the tolerant models cost twenty times as much."""
    assert isinstance(read_usual(json.dumps(USUAL).encode()), UsualReply)


@pytest.mark.parametrize(
    "cost", ["0.00044440000000000004", "1e-450", "1e999999", "0.1234567890123455", '"0.1"', "3"]
)
def test_an_amount_is_read_from_its_text(cost: str) -> None:
    """Both ways, to the last digit, and where nothing can be made of it."""
    raw = json.dumps(USUAL).replace("0.000123", cost).encode()
    usual = decoded(raw, is_streamed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reply, "read_usual", lambda _: None)
        assert decoded(raw, is_streamed=False) == usual


def test_a_body_that_is_not_utf_8_is_no_answer_in_either_way() -> None:
    """Also where the bytes stand in a field that nobody reads."""
    raw = json.dumps(USUAL).encode().replace(b"chat.completion", b"chat.\xff")
    assert read_usual(raw) is None
    assert not decoded(raw, is_streamed=False).is_json


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le"])
def test_bytes_are_read_in_the_encodings_of_json(encoding: str) -> None:
    """As the standard library reads them, with or without a byte-order mark."""
    assert loads('{"ü": 1}'.encode(encoding)) == {"ü": 1}
