"""What templates of several families are found to do, by probing alone."""

from __future__ import annotations

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
    letters_tokenizer,
)
from quantroute.errors import ConfigurationError
from quantroute.extraction import (
    KIMI_STYLE_TEMPLATE,
    Rerender,
    TargetTokenizer,
    TemplateProfile,
    probe_template,
)

KIMI = "<|im_end|><|im_assistant|>assistant<|im_middle|>"
QWEN = "<|im_end|>\n<|im_start|>assistant\n"


def profile_of(folder: Path, template: str, **options: Any) -> TemplateProfile:
    return probe_template(letters(folder, template), **options)


def parts(profile: TemplateProfile, mode: str) -> tuple[str, str, str] | None:
    """Tail, opener and closer of a mode; None where it has no reasoning."""
    form = profile.forms[mode]
    return form.reasoning and (form.tail, form.reasoning.opener, form.reasoning.closer)


@pytest.mark.parametrize(
    ("template", "switch", "thinking", "instant", "rerender"),
    [
        (
            KIMI_STYLE_TEMPLATE,
            ("thinking",),
            (f"{KIMI}<think>", "", "</think>"),
            None,
            Rerender.EMPTIED,
        ),
        (
            K2_THINKING_STYLE,
            (),
            (KIMI, "<think>", "</think>"),
            (KIMI, "<think>", "</think>"),
            Rerender.EMPTIED,
        ),
        (
            QWEN_STYLE,
            ("enable_thinking",),
            (QWEN, "<think>\n", "\n</think>\n\n"),
            None,
            Rerender.KEPT,
        ),
        (
            R1_STYLE,
            (),
            ("<|Assistant|><think>\n", "", "</think>"),
            ("<|Assistant|><think>\n", "", "</think>"),
            Rerender.DROPPED,
        ),
        (
            V31_STYLE,
            ("thinking",),
            ("<|Assistant|><think>", "", "</think>"),
            None,
            Rerender.EMPTIED,
        ),
        (
            CHANNELS,
            (),
            (
                "<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>",
            ),
            (
                "<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>",
            ),
            Rerender.KEPT,
        ),
        (CHATML, (), None, None, Rerender.UNKNOWN_TO_IT),
    ],
    ids=["kimi", "k2-thinking", "qwen", "r1", "v3.1", "channels", "chatml"],
)
def test_each_family_shows_what_the_model_writes_itself(
    tmp_path: Path,
    template: str,
    switch: tuple[str, ...],
    thinking: Any,
    instant: Any,
    rerender: Rerender,
) -> None:
    profile = profile_of(tmp_path, template)
    assert profile.switch == switch
    assert parts(profile, "thinking") == thinking
    assert parts(profile, "instant") == instant
    assert profile.rerender is rerender
    assert not profile.history_keeps_reasoning or template == CHANNELS


@pytest.mark.parametrize(
    ("template", "tail"),
    [
        (KIMI_STYLE_TEMPLATE, f"{KIMI}<think></think>"),
        (QWEN_STYLE, f"{QWEN}<think>\n\n</think>\n\n"),
        (V31_STYLE, "<|Assistant|></think>"),
    ],
)
def test_without_thinking_the_prompt_supplies_the_empty_pair(
    tmp_path: Path, template: str, tail: str
) -> None:
    form = profile_of(tmp_path, template).forms["instant"]
    assert (form.tail, form.plain_lead, form.plain_is_prompted) == (tail, "", True)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (KIMI_STYLE_TEMPLATE, "<|im_end|>"),
        (CHATML, "<|im_end|>"),
        (R1_STYLE, "<eos>"),
        (CHANNELS, "<|return|>"),
    ],
)
def test_the_end_token_is_the_one_right_after_the_answer(
    tmp_path: Path, template: str, end: str
) -> None:
    assert profile_of(tmp_path, template).end == end


def test_a_supplied_system_prompt_is_found(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, KIMI_STYLE_TEMPLATE)
    assert profile.default_system == "You answer questions in short."
    assert any("system prompt" in note for note in profile.notes)
    assert profile_of(tmp_path, CHATML).default_system is None


def test_a_template_without_an_end_needs_to_be_told(tmp_path: Path) -> None:
    template = CHATML.replace("'<|im_end|>' + ", "")
    with pytest.raises(ConfigurationError, match="end_token"):
        profile_of(tmp_path, template)
    assert profile_of(tmp_path, template, end_token="<|im_end|>").end == "<|im_end|>"
    with pytest.raises(ConfigurationError, match="no control token"):
        profile_of(tmp_path, template, end_token="bye")


def test_what_cannot_be_seen_can_be_said(tmp_path: Path) -> None:
    tokenizer = letters(tmp_path, CHATML)
    profile = probe_template(tokenizer, think_opener="<think>", think_closer="</think>")
    assert parts(profile, "default") == (QWEN, "<think>", "</think>")
    assert profile.forms["default"].found_by == "settings"
    with pytest.raises(ConfigurationError, match="think_closer"):
        probe_template(tokenizer, think_opener="<think>")


def test_settings_do_not_reach_a_mode_that_the_template_closes(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, KIMI_STYLE_TEMPLATE, think_closer="\n</think>\n")
    assert parts(profile, "thinking") == (f"{KIMI}<think>", "", "\n</think>\n")
    assert parts(profile, "instant") is None


def test_other_stops_than_the_template_s_are_noted(tmp_path: Path) -> None:
    folder = letters_tokenizer(tmp_path, CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (note,) = probe_template(TargetTokenizer.load(folder)).notes
    assert "stops at [1, 2]" in note


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no') }}", "cannot render one question"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out"),
        ("{% if %}", "cannot render one question"),
    ],
)
def test_a_useless_template_is_refused(tmp_path: Path, template: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        profile_of(tmp_path, template)


def test_the_profile_is_json(tmp_path: Path) -> None:
    import json

    found = profile_of(tmp_path, KIMI_STYLE_TEMPLATE).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["forms"]["thinking"]["closer"] == "</think>"
