"""Rows to examples, against token lists written by hand: one token per letter, control by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extraction_support import (
    CHANNELS,
    CHATML,
    K2_THINKING_STYLE,
    QWEN_STYLE,
    R1_STYLE,
    V31_STYLE,
    letters,
    make_row,
)
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction import (
    KIMI_STYLE_TEMPLATE,
    Example,
    Refusal,
    RefusalReason,
    TargetTokenizer,
    TokenSettings,
    TokensReport,
    examples_from_rows,
)

SYSTEM = "<|im_system|>system<|im_middle|>You answer questions in short.<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"


@pytest.fixture
def kimi(tmp_path: Path) -> TargetTokenizer:
    return letters(tmp_path, KIMI_STYLE_TEMPLATE)


def made(
    tokenizer: TargetTokenizer, *rows: dict[str, Any], **settings: Any
) -> list[Example | Refusal]:
    return list(examples_from_rows(rows, tokenizer, TokenSettings(**settings)))


def refused(tokenizer: TargetTokenizer, row: dict[str, Any], **settings: Any) -> RefusalReason:
    (result,) = made(tokenizer, row, **settings)
    assert isinstance(result, Refusal)
    return result.reason


def shown(tokenizer: TargetTokenizer, result: Example | Refusal) -> tuple[list[str], list[str]]:
    """Tokens of the prompt and of what is trained, by their texts."""
    assert isinstance(result, Example), result
    tokens = [tokenizer.decode([number]) for number in result.input_ids]
    first = int(result.loss_mask.argmax())
    assert result.loss_mask[first:].all()  # one run, up to the end
    return tokens[:first], tokens[first:]


def spelled(text: str) -> list[str]:
    """Control tokens whole, everything else by letter: the reference, independent of tokenizers."""
    return re.findall(r"<\|\w+\|>|</?think>|<[be]os>|[\s\S]", text)


def check(
    tokenizer: TargetTokenizer, result: Example | Refusal, *, prompt: str, trained: str
) -> None:
    assert shown(tokenizer, result) == (spelled(prompt), spelled(trained))


# -- what is trained, family by family -------------------------------------------------------------


def test_kimi_thinks_in_a_prompt_that_opened_it(kimi: TargetTokenizer) -> None:
    (example,) = made(kimi, make_row(("why so", "Yes.")))
    check(
        kimi,
        example,
        prompt=f"{SYSTEM}<|im_user|>user<|im_middle|>Hi<|im_end|>{ASSISTANT}<think>",
        trained="why so</think>Yes.<|im_end|>",
    )


def test_kimi_without_thinking_trains_no_empty_pair(kimi: TargetTokenizer) -> None:
    (example,) = made(kimi, make_row((None, "Yes."), mode="instant", system="Be kind."))
    check(
        kimi,
        example,
        prompt="<|im_system|>system<|im_middle|>Be kind.<|im_end|>"
        f"<|im_user|>user<|im_middle|>Hi<|im_end|>{ASSISTANT}<think></think>",
        trained="Yes.<|im_end|>",
    )


def test_each_turn_keeps_its_own_reasoning_and_sees_none_of_the_earlier(
    kimi: TargetTokenizer,
) -> None:
    first, second = made(kimi, make_row(("one", "A"), ("two", "B"), system="S"))
    start = "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
    check(kimi, first, prompt=f"{start}{ASSISTANT}<think>", trained="one</think>A<|im_end|>")
    check(
        kimi,
        second,
        prompt=f"{start}{ASSISTANT}<think></think>A<|im_end|>"
        f"<|im_user|>user<|im_middle|>More<|im_end|>{ASSISTANT}<think>",
        trained="two</think>B<|im_end|>",
    )


def test_an_opener_that_the_model_wrote_is_trained(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, K2_THINKING_STYLE)
    (example,) = made(tokenizer, make_row(("why", "Yes."), mode="thinking"))
    check(
        tokenizer,
        example,
        prompt=f"<|im_user|>user<|im_middle|>Hi<|im_end|>{ASSISTANT}",
        trained="<think>why</think>Yes.<|im_end|>",
    )


def test_nothing_after_the_end_token_is_trained(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHATML)
    (example,) = made(tokenizer, make_row((None, "Yes.\n")))
    check(
        tokenizer,
        example,
        prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        trained="Yes.\n<|im_end|>",
    )


@pytest.mark.parametrize(
    ("reasoning", "content"),
    [("why", "Yes."), ("\nwhy\n", "\n\nYes."), ("why\n", "Yes."), ("\nwhy", "\n\nYes.")],
)
def test_line_ends_around_reasoning_stand_once(
    tmp_path: Path, reasoning: str, content: str
) -> None:
    tokenizer = letters(tmp_path, QWEN_STYLE)
    (example,) = made(tokenizer, make_row((reasoning, content)))
    check(
        tokenizer,
        example,
        prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        trained="<think>\nwhy\n</think>\n\nYes.<|im_end|>",
    )


def test_r1_writes_its_closer_after_a_prompt_that_opened(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, R1_STYLE)
    (example,) = made(tokenizer, make_row(("why\n", "\n\nYes.")))
    check(
        tokenizer,
        example,
        prompt="<bos><|User|>Hi<|Assistant|><think>\n",
        trained="why\n</think>\n\nYes.<eos>",
    )


@pytest.mark.parametrize(
    ("mode", "reasoning", "tail", "trained"),
    [
        ("thinking", "why", "<think>", "why</think>Yes.<eos>"),
        ("instant", None, "</think>", "Yes.<eos>"),
        ("default", None, "</think>", "Yes.<eos>"),
    ],
)
def test_v31_is_rendered_in_the_mode_it_was_asked_in(
    tmp_path: Path, mode: str, reasoning: str | None, tail: str, trained: str
) -> None:
    tokenizer = letters(tmp_path, V31_STYLE)
    (example,) = made(tokenizer, make_row((reasoning, "Yes."), mode=mode))
    check(tokenizer, example, prompt=f"<bos><|User|>Hi<|Assistant|>{tail}", trained=trained)


def test_channels_are_the_model_s_own(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHANNELS)
    (example,) = made(tokenizer, make_row(("why", "Yes.")))
    check(
        tokenizer,
        example,
        prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant",
        trained="<|channel|>analysis<|message|>why<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|return|>",
    )


# -- answers that were cut -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "trained"),
    [(("why", "Ye"), "why</think>Ye"), (("why is i", ""), "why is i")],
)
def test_an_answer_cut_by_the_limit_has_no_end_token(
    kimi: TargetTokenizer, answer: tuple[str, str], trained: str
) -> None:
    row = make_row(answer, finish_reason="length", row_class="truncated")
    (example,) = made(kimi, row, classes=frozenset({"truncated"}))
    assert "".join(shown(kimi, example)[1]) == trained


def test_too_long_is_refused_or_cut_at_the_end(kimi: TargetTokenizer) -> None:
    row = make_row(("why", "Yes."), system="S")
    (whole,) = made(kimi, row)
    assert isinstance(whole, Example)
    size = len(whole)
    assert refused(kimi, row, max_tokens=size - 1) is RefusalReason.TOO_LONG
    (kept,) = made(kimi, row, max_tokens=size)
    assert isinstance(kept, Example)
    assert kept.key == whole.key
    assert kept.provenance["truncated"] is False
    (cut,) = made(kimi, row, max_tokens=size - 1, too_long="truncate")
    assert isinstance(cut, Example)
    assert (cut.input_ids == whole.input_ids[:-1]).all()
    assert cut.provenance["truncated"] is True
    prompt_tokens = int(whole.loss_mask.argmax())
    reason = refused(kimi, row, max_tokens=prompt_tokens, too_long="truncate")
    assert reason is RefusalReason.TOO_LONG  # nothing would be left to learn


# -- letters of control tokens ---------------------------------------------------------------------

TRICK = "a<|im_end|>b</think>c"
TRICK_SPELLED = [*"a<|im_end|>b</think>c"]


def test_letters_of_control_tokens_stay_letters(kimi: TargetTokenizer) -> None:
    row = make_row((TRICK, TRICK), questions=[TRICK], system=TRICK)
    prompt, trained = shown(kimi, made(kimi, row)[0])
    assert prompt == [
        *spelled("<|im_system|>system<|im_middle|>"),
        *TRICK_SPELLED,
        *spelled("<|im_end|><|im_user|>user<|im_middle|>"),
        *TRICK_SPELLED,
        *spelled(f"<|im_end|>{ASSISTANT}<think>"),
    ]
    assert trained == [*TRICK_SPELLED, "</think>", *TRICK_SPELLED, "<|im_end|>"]


def test_letters_of_control_tokens_can_be_refused_or_taken_for_real(kimi: TargetTokenizer) -> None:
    row = make_row(("r", "A"), questions=[TRICK])
    assert refused(kimi, row, special_text="refuse") is RefusalReason.SPECIAL_TEXT
    (example,) = made(kimi, row, special_text="control")
    assert shown(kimi, example)[0] == spelled(
        f"{SYSTEM}<|im_user|>user<|im_middle|>{TRICK}<|im_end|>{ASSISTANT}<think>"
    )


def test_a_template_that_acts_on_such_letters_is_not_trusted(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, R1_STYLE)
    row = make_row(("r", "x</think>y"), ("r", "B"))
    assert [type(item) for item in made(tokenizer, row)] == [Example, Refusal]
    result = made(tokenizer, row)[1]
    assert isinstance(result, Refusal)
    assert result.reason is RefusalReason.SPECIAL_TEXT


# -- history ---------------------------------------------------------------------------------------


def test_replayed_reasoning_is_rendered_if_it_was_sent(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHANNELS)
    for replayed in (False, True):
        _, second = made(tokenizer, make_row(("one", "A"), ("two", "B"), replayed=replayed))
        prompt = "".join(shown(tokenizer, second)[0])
        assert ("<|message|>one<|end|>" in prompt) is replayed


def test_messages_that_were_not_sent_are_refused(kimi: TargetTokenizer) -> None:
    row = make_row(("one", "A"))
    row["messages"][0]["content"] = "Ho"
    assert refused(kimi, row) is RefusalReason.HISTORY_UNKNOWN


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "record", "reason"),
    [
        (("r", "A"), {"row_class": "loop"}, RefusalReason.ROW_CLASS),
        (("r", "A"), {"finish_reason": "tool_calls"}, RefusalReason.FINISH_REASON),
        (("r", "A"), {"finish_reason": None}, RefusalReason.FINISH_REASON),
        (("r", "A"), {"sampling": {"stop": ["x"]}}, RefusalReason.STOP_SEQUENCE),
        (("r", ""), {}, RefusalReason.NO_ANSWER),
        ((None, ""), {"finish_reason": "length"}, RefusalReason.NO_ANSWER),
        ((None, "A"), {"reasoning_tokens": 9}, RefusalReason.REASONING_HIDDEN),
        (("", "A"), {"reasoning_tokens": 9}, RefusalReason.REASONING_HIDDEN),
        ((None, "A"), {}, RefusalReason.REASONING_MISSING),
        ((None, "A"), {"mode": "thinking", "reasoning_tokens": 0}, RefusalReason.REASONING_MISSING),
        ((None, "A"), {"finish_reason": "length"}, RefusalReason.REASONING_MISSING),
        (("r", "A"), {"mode": "instant"}, RefusalReason.MODE_MISMATCH),
        (
            ("r" * 40, "A"),
            {"reasoning_tokens": 900, "output_tokens": 903},
            RefusalReason.REASONING_SUMMARISED,
        ),
        (("r", "A\ud800"), {}, RefusalReason.UNENCODABLE),
    ],
)
def test_what_is_not_on_policy_is_refused_with_its_reason(
    kimi: TargetTokenizer, answer: tuple[str | None, str], record: Any, reason: RefusalReason
) -> None:
    assert refused(kimi, make_row(answer, **record)) is reason


def test_one_bad_text_does_not_spoil_its_neighbours(kimi: TargetTokenizer) -> None:
    good = make_row(("r", "A"))
    results = made(kimi, good, make_row(("r", "A\ud800")), good)
    assert [type(item) for item in results] == [Example, Refusal, Example]


def test_hidden_reasoning_is_noticed_in_every_template(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHATML)
    row = make_row((None, "A"), reasoning_tokens=9, output_tokens=11)
    assert refused(tokenizer, row) is RefusalReason.REASONING_HIDDEN


def test_reasoning_needs_a_form(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHATML)
    row = make_row(("r", "A"))
    assert refused(tokenizer, row) is RefusalReason.NO_REASONING_FORM
    (example,) = made(tokenizer, row, think_opener="<think>", think_closer="</think>")
    assert "".join(shown(tokenizer, example)[1]) == "<think>r</think>A<|im_end|>"


def test_the_users_word_overrules_the_mode_of_the_row(kimi: TargetTokenizer) -> None:
    (example,) = made(kimi, make_row((None, "A"), mode="default"), thinking="off")
    assert shown(kimi, example)[0][-2:] == ["<think>", "</think>"]
    (example,) = made(kimi, make_row(("r", "A"), mode="instant"), thinking="on")
    assert shown(kimi, example)[0][-1] == "<think>"


def test_a_template_without_a_switch_needs_the_users_word_for_plain_answers(
    tmp_path: Path,
) -> None:
    tokenizer = letters(tmp_path, K2_THINKING_STYLE)
    row = make_row((None, "A"), mode="instant")
    assert refused(tokenizer, row) is RefusalReason.MODE_MISMATCH
    (example,) = made(tokenizer, row, thinking="off")
    assert "".join(shown(tokenizer, example)[1]) == "<think></think>A<|im_end|>"


def test_a_template_that_refuses_the_messages_refuses_the_example(tmp_path: Path) -> None:
    template = (
        "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"
        + CHATML
    )
    (result,) = made(letters(tmp_path, template), make_row((None, "A"), system="S"))
    assert isinstance(result, Refusal)
    assert result.reason is RefusalReason.TEMPLATE_FAILED
    assert "no system" in result.problem


def test_a_prompt_of_another_shape_is_refused(tmp_path: Path) -> None:
    template = CHATML + "{%- if messages|length > 3 -%}{{ '!' }}{%- endif -%}"
    results = made(letters(tmp_path, template), make_row((None, "A"), (None, "B"), system="S"))
    assert isinstance(results[0], Example)
    assert isinstance(results[1], Refusal)
    assert results[1].reason is RefusalReason.PROMPT_SHAPE


def test_an_answer_that_the_template_rewrites_is_refused(tmp_path: Path) -> None:
    template = CHATML.replace("message.content", "message.content.replace('Yes', 'No')")
    tokenizer = letters(tmp_path, template)
    row = make_row((None, "Yes."))
    assert refused(tokenizer, row) is RefusalReason.NOT_A_PREFIX
    (example,) = made(tokenizer, row, verify=False)
    assert "".join(shown(tokenizer, example)[1]) == "Yes.<|im_end|>"


def test_not_a_row_is_an_error(kimi: TargetTokenizer) -> None:
    with pytest.raises(DatasetError, match="quantroute export"):
        made(kimi, {"key": "k", "messages": []})
    row = make_row(("r", "A"))
    row["turns"] = []
    with pytest.raises(DatasetError, match="1 answers"):
        made(kimi, row)


@pytest.mark.parametrize(
    ("place", "odd"),
    [
        ("messages", "text"),
        ("messages", {"role": "user"}),
        ("messages", {"role": "user", "content": [{"type": "text", "text": "r"}]}),
        ("turns", None),
    ],
)
def test_a_row_of_odd_parts_is_an_error_that_says_so(
    kimi: TargetTokenizer, place: str, odd: Any
) -> None:
    row = make_row(("r", "A"))
    row[place][0] = odd
    with pytest.raises(DatasetError, match="must have a role and text"):
        made(kimi, row)


def test_an_answer_without_any_token_is_refused(tmp_path: Path) -> None:
    from tokenizers.normalizers import Replace

    tokenizer = letters(tmp_path, CHATML)
    inner = tokenizer._backend
    assert inner is not None
    inner[0].normalizer = Replace("~", "")
    row = make_row((None, "~"))
    row["turns"][0]["finish_reason"] = "length"
    assert refused(tokenizer, row, verify=False) is RefusalReason.NO_ANSWER


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 1},
        {"min_reasoning_share": 1.5},
        {"classes": frozenset()},
        {"classes": frozenset({"wrong_provider"})},
    ],
)
def test_impossible_settings_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        TokenSettings(**bad)


# -- the report ------------------------------------------------------------------------------------


def test_the_report_compares_counts_by_endpoint(kimi: TargetTokenizer) -> None:
    exact = len(spelled("why</think>Yes.<|im_end|>"))
    rows = [
        make_row(("why", "Yes."), endpoint="a", output_tokens=exact, input_tokens=10),
        make_row(("why", "Yes."), endpoint="a", output_tokens=exact),
        make_row(("why", "Yes."), endpoint="b", output_tokens=exact - 1),
        make_row(("why", "Yes."), endpoint="b", output_tokens=exact + 3),
        make_row(("why", "Yes."), endpoint="c"),
        make_row((None, "Yes."), endpoint="c"),
        make_row(("r", TRICK), endpoint="c", system="S"),
    ]
    report = TokensReport()
    results = list(examples_from_rows(rows, kimi, report=report))
    found = report.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["examples"] == sum(isinstance(item, Example) for item in results) == 6
    assert found["refused"] == {"reasoning_missing": 1}
    assert (found["default_system"], found["lookalikes"], found["truncated"]) == (5, 1, 0)
    supervised = [int(item.loss_mask.sum()) for item in results if isinstance(item, Example)]
    assert found["supervised_tokens"] == sum(supervised)
    counts = found["counts_by_endpoint"]
    assert counts["a"]["output"] == {
        "examples": 2,
        "exact_share": 1.0,
        "least": 0,
        "p05": 0,
        "median": 0,
        "p95": 0,
        "most": 0,
    }
    assert counts["a"]["input"]["examples"] == 1
    assert counts["b"]["output"]["exact_share"] == 0.0
    assert (counts["b"]["output"]["least"], counts["b"]["output"]["most"]) == (-3, 1)
    assert counts["c"] == {"output": None, "input": None, "without_billed_count": 2}


def test_provenance_goes_along_and_is_json(kimi: TargetTokenizer) -> None:
    (example,) = made(kimi, make_row(("why", "Yes."), served_provider="Alpha"))
    assert isinstance(example, Example)
    found = dict(example.provenance)
    assert json.loads(json.dumps(found)) == found
    assert found["row_key"] == "k"
    assert (found["dataset"], found["turn"], found["served_provider"]) == ("d", 0, "Alpha")
    assert found["default_system"] is True


def test_effort_reaches_a_template_that_reads_it(tmp_path: Path) -> None:
    template = "{{ 'effort ' + (reasoning_effort or 'none') + '\n' }}" + CHATML
    tokenizer = letters(tmp_path, template)
    row = make_row((None, "A"), sampling={"reasoning": {"effort": "high"}})
    (example,) = made(tokenizer, row)
    assert "".join(shown(tokenizer, example)[0]).startswith("effort high\n")


def test_variables_reach_the_template(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, "{{ date }}" + CHATML)
    (example,) = made(tokenizer, make_row((None, "A")), variables={"date": "May"})
    assert "".join(shown(tokenizer, example)[0]).startswith("May<|im_start|>")
