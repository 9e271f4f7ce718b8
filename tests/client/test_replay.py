"""Earlier reasoning goes back once, in the field that the endpoint reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client_support import MODEL, opened
from policy_support import MOONSHOT, make_endpoint
from quantroute import ChatRequest, ConfigurationError, LocalEndpoint, Sampling
from quantroute.client._body import encode_body
from quantroute.client._replay import ReplayForm, form_for, replayed

DETAILS = [{"type": "reasoning.text", "text": "because", "format": "unknown", "index": 0}]
LOCAL: dict[str, Any] = {
    "name": "box",
    "base_url": "http://127.0.0.1:1/v1",
    "serves": "moonshotai/kimi-k2.5",
    "quantization": "int4",
}


def conversation(**turn: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", **turn},
        {"role": "user", "content": "And then?"},
    ]


def sent(form: ReplayForm, **turn: Any) -> dict[str, Any]:
    question, answer, following = replayed(conversation(**turn), form)
    assert (question, following) == (conversation()[0], conversation()[2])
    assert answer["content"] == "So."
    return {name: value for name, value in answer.items() if name not in ("role", "content")}


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning": "because"},
        {"reasoning_content": "because"},
        {"reasoning_details": DETAILS},
        {"reasoning": "because", "reasoning_details": DETAILS},
        {"reasoning": "because", "reasoning_content": "because"},
    ],
)
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (ReplayForm.REASONING, {"reasoning": "because"}),
        (ReplayForm.CONTENT, {"reasoning_content": "because"}),
        (ReplayForm.DETAILS, {"reasoning_details": DETAILS}),
        (ReplayForm.NONE, {}),
    ],
)
def test_every_alias_becomes_the_one_form(
    turn: dict[str, Any], form: ReplayForm, expected: dict[str, Any]
) -> None:
    assert sent(form, **turn) == expected


def test_no_reasoning_is_sent_as_none_not_as_an_empty_text() -> None:
    assert sent(ReplayForm.CONTENT, reasoning="") == {}
    assert sent(ReplayForm.CONTENT) == {}


def test_details_that_are_more_than_text_are_left_as_they_came() -> None:
    details = [*DETAILS, {"type": "reasoning.encrypted", "data": "x"}]
    turn = {"reasoning": "because", "reasoning_details": details}
    assert sent(ReplayForm.CONTENT, **turn) == turn


def test_moonshot_reads_another_name_than_the_others() -> None:
    assert form_for(MOONSHOT) is ReplayForm.CONTENT
    assert form_for(make_endpoint("atlas-cloud/int4", "AtlasCloud")) is ReplayForm.REASONING


@pytest.mark.parametrize(
    ("replay_as", "expected"),
    [
        ("reasoning_content", {"reasoning_content": "because"}),
        ("reasoning", {"reasoning": "because"}),
        ("none", {}),
    ],
)
def test_a_local_server_gets_the_form_its_owner_names(
    replay_as: str, expected: dict[str, str]
) -> None:
    request = ChatRequest(
        model="moonshotai/kimi-k2.5",
        messages=tuple(conversation(reasoning="because")),
        max_output_tokens=10,
    )
    local = LocalEndpoint(**LOCAL, replay_as=replay_as)
    body = json.loads(encode_body(request, max_tokens=10, preferences={}, local=local))
    turn = body["messages"][1]
    assert turn == {"role": "assistant", "content": "So.", **expected}


@pytest.mark.parametrize(
    ("turn", "reasoning", "only", "asked"),
    [
        ({}, None, ["inceptron", "moonshotai"], {"inceptron"}),
        ({}, True, ["inceptron", "moonshotai"], {"inceptron"}),
        ({}, False, ["inceptron", "moonshotai"], {"inceptron", "moonshotai"}),
        ({"reasoning": "because"}, None, ["inceptron", "moonshotai"], {"inceptron", "moonshotai"}),
        ({}, None, ["moonshotai"], {"moonshotai"}),  # it may take it all the same
    ],
)
@pytest.mark.usefixtures("key")
async def test_who_wants_earlier_reasoning_back_is_not_asked_without_it(
    turn: dict[str, Any], reasoning: bool | None, only: list[str], asked: set[str]
) -> None:
    sampling = Sampling(reasoning=reasoning)
    async with opened(only=only) as (client, _):
        catalogue = client._opened().catalogue
        offers = await catalogue.offers(MODEL, sampling)
        candidates = catalogue.candidates(
            offers,
            ChatRequest(
                model=MODEL,
                messages=tuple(conversation(**turn)),
                max_output_tokens=100,
                sampling=sampling,
            ),
        )
    assert {item.endpoint.provider_slug for item in candidates} == asked


def test_a_form_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="replay_as"):
        LocalEndpoint(**LOCAL, replay_as="thoughts")
