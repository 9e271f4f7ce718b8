"""One class per answer, and nothing but whole, own, unlooped answers is good."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.fakes import make_answer
from quantroute.domain import Sampling
from quantroute.generation import RowClass, classify, loop_score
from quantroute.generation._quality import LOOP_THRESHOLD
from quantroute.pricing import TokenUsage

ON, OFF = Sampling(reasoning=True), Sampling(reasoning=False)
PROSE = (
    "The harbour master kept a ledger of every boat that came in after dark, with the name of its "
    "captain, what it carried and whether the lamp on the mole had been lit. In the winter of that "
    "year the pages are almost empty; where there is an entry the ink has run. Nobody found out "
    "why the last week of January was cut from the book, though two fishermen are known to have "
    "asked for it, and one of them came back in spring with a knife and a story about the tide. "
    "She told it twice, never the same way, and would not say who had rowed her home. "
)


@pytest.mark.parametrize(
    ("expected", "sampling", "changes"),
    [
        (RowClass.GOOD, Sampling(), {}),
        (RowClass.GOOD, ON, {"reasoning": "Let me see."}),
        (RowClass.GOOD, Sampling(), {"reasoning": "The model's own default."}),
        (RowClass.TRUNCATED, Sampling(), {"finish_reason": "length"}),
        (RowClass.TRUNCATED, ON, {"finish_reason": "length", "content": "Let me think"}),
        (RowClass.TRUNCATED, ON, {"finish_reason": "length", "content": "", "reasoning": "Hm"}),
        (RowClass.EMPTY, Sampling(), {"content": " \n"}),
        (RowClass.REASONING_ONLY, ON, {"content": "", "reasoning": "Hm"}),
        (RowClass.LEAKED_THINKING, Sampling(), {"content": "<think>Hm</think>Yes"}),
        (RowClass.LEAKED_THINKING, Sampling(), {"content": "Hm</think>Yes"}),
        (RowClass.LEAKED_THINKING, Sampling(), {"content": "Yes. <think>Hm"}),
        (RowClass.WRONG_MODE, OFF, {"reasoning": "Hm"}),
        (RowClass.WRONG_MODE, Sampling(reasoning_effort="none"), {"reasoning": "Hm"}),
        (
            RowClass.WRONG_MODE,
            OFF,
            {"usage": TokenUsage(input_tokens=1, output_tokens=9, reasoning_tokens=4)},
        ),
        (RowClass.WRONG_MODE, ON, {"reasoning": None}),
        (RowClass.WRONG_MODE, Sampling(reasoning_effort="high"), {"reasoning": " "}),
        (RowClass.REFUSED, Sampling(), {"finish_reason": "content_filter"}),
        (RowClass.WRONG_PROVIDER, Sampling(), {"flags": ("served_mismatch",)}),
        (RowClass.WRONG_PROVIDER, Sampling(), {"flags": ("model_mismatch",)}),
        (
            RowClass.WRONG_PROVIDER,
            Sampling(),
            {"flags": ("served_mismatch",), "finish_reason": "length"},
        ),
        (RowClass.UNVERIFIED, Sampling(), {"flags": ("served_unknown",)}),
        (RowClass.ERROR, Sampling(), {"finish_reason": None}),
        (RowClass.ERROR, Sampling(), {"finish_reason": "tool_calls"}),
        (RowClass.ERROR, Sampling(), {"content": "a \ud800 b"}),
        (RowClass.ERROR, Sampling(), {"flags": ("secret_redacted",)}),
        (RowClass.GOOD, Sampling(), {"flags": ("overrun", "usage_missing"), "usage": None}),
        (RowClass.LOOP, Sampling(), {"content": "and so on " * 400}),
        (RowClass.LOOP, ON, {"reasoning": "Wait. " * 400, "finish_reason": "length"}),
    ],
)
def test_each_shape_has_its_class(
    expected: RowClass, sampling: Sampling, changes: dict[str, Any]
) -> None:
    judgement = classify(make_answer(**changes), sampling=sampling)
    assert judgement.row_class is expected
    assert bool(judgement.details) == (expected is not RowClass.GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "[THINK]hm[/THINK]yes",
        "<seed:think>hm</seed:think>yes",
        "<|channel|>analysis<|message|>hm<|end|>yes",
        "<thinking>hm</thinking>yes",
        "<thought>\nhm\n</thought>\nyes",
        "hm</seed:think>yes",
    ],
)
def test_thinking_leaks_in_the_spelling_of_other_templates(text: str) -> None:
    judged = classify(make_answer(text), sampling=Sampling())
    assert judged.row_class is RowClass.LEAKED_THINKING


@pytest.mark.parametrize(
    "text",
    [
        "Use this:\n```python\nre.sub(r'<think>.*?</think>', '', text)\n```\nDone.",
        "Take what follows the `</think>` tag.",
        "```python\ntext.split('</think>')[-1]\n```",
        "A <thinking> person's <reasoning> is not in tags.",
    ],
)
def test_think_tags_in_code_are_talk(text: str) -> None:
    assert classify(make_answer(text), sampling=Sampling()).row_class is RowClass.GOOD


def test_a_leak_that_holds_code_is_a_leak() -> None:
    text = "First `x`:\n```\ny\n```\nso</think>\nThe answer is `z`."
    judged = classify(make_answer(text), sampling=Sampling())
    assert judged.row_class is RowClass.LEAKED_THINKING


@pytest.mark.parametrize("text", ["\u200b", "\ufeff\n", " \u2060\u200d "])
def test_what_nobody_sees_is_empty(text: str) -> None:
    assert classify(make_answer(text), sampling=Sampling()).row_class is RowClass.EMPTY


def test_talk_about_think_tags_is_no_leak_when_the_prompt_began_it() -> None:
    answer = make_answer("Put the plan between <think> and </think>, then answer.")
    asked = ["How do I use <think> tags?"]
    assert classify(answer, sampling=Sampling(), asked=asked).row_class is RowClass.GOOD
    assert classify(answer, sampling=Sampling()).row_class is RowClass.LEAKED_THINKING


def test_a_real_leak_is_one_even_if_the_prompt_has_tags() -> None:
    answer = make_answer("\n<think>They ask about tags.</think>Use them so.")
    judgement = classify(answer, sampling=Sampling(), asked=["What is <think>?"])
    assert judgement.row_class is RowClass.LEAKED_THINKING


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        PROSE + PROSE.upper() + PROSE[::-1],
        "".join(f"| {i} | {i * i} | {i**3} | {i % 7} |\n" for i in range(300)),
        "".join(f"    total_{i} = compute(total_{i - 1}, rate={i})\n" for i in range(200)),
    ],
)
def test_prose_tables_and_code_are_no_loops(text: str) -> None:
    assert 0 < loop_score(text) < LOOP_THRESHOLD


@pytest.mark.parametrize("phrase", ["ha", "I will not do it again. ", PROSE])
def test_a_phrase_that_never_ends_is_a_loop_wherever_it_begins(phrase: str) -> None:
    text = PROSE + phrase * (24_000 // len(phrase))
    assert loop_score(text) >= LOOP_THRESHOLD


def test_short_texts_are_not_scored() -> None:
    assert loop_score("yes " * 50) == 0.0


@given(
    content=st.text(),
    reasoning=st.none() | st.text(),
    finish=st.sampled_from(["stop", "length", None, "error", "content_filter", "odd"]),
    reasoning_on=st.sampled_from([None, True, False]),
)
def test_every_answer_has_a_class_and_only_stopped_ones_are_good(
    content: str, reasoning: str | None, finish: str | None, reasoning_on: bool | None
) -> None:
    answer = make_answer(content, reasoning=reasoning, finish_reason=finish)
    judgement = classify(answer, sampling=Sampling(reasoning=reasoning_on))
    if judgement.row_class is RowClass.GOOD:
        assert finish == "stop"
        assert content.strip()
    else:
        assert judgement.details
