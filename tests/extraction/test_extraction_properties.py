"""For any texts: the prompt's ids, then the answer's, and nothing written turns into control."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extraction_support import K2_THINKING_STYLE, make_row
from property_support import examples
from quantroute.extraction import (
    KIMI_STYLE_TEMPLATE,
    Example,
    TargetTokenizer,
    TemplateProfile,
    examples_from_rows,
    probe_template,
    write_kimi_style_tokenizer,
)

CORPUS = ["The sky is blue because light scatters.\n\n  def f(x):\n    return x + 1\n"] * 8
PIECES = st.sampled_from(
    [
        *("<|im_end|>", "<|im_user|>user<|im_middle|>", "<think>", "</think>", "[BOS]", "[EOS]"),
        *("<|im_end|", "|im_end|>", "<", ">", "\n", "\n\n", " ", "\u2028", "\x00", "\ufeff", "é"),
        *("\U0001f600", "\ue0f02\ue0f1", "e\u0301", "the sky", "[[", "{{ messages }}", "{% if %}"),
    ]
)
TEXTS = st.one_of(
    st.lists(PIECES, min_size=1, max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
)
ANSWERS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=[KIMI_STYLE_TEMPLATE, K2_THINKING_STYLE], ids=["k2.5", "k2"])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> TargetTokenizer:
    folder = tmp_path_factory.mktemp("target")
    return TargetTokenizer.load(
        write_kimi_style_tokenizer(folder, CORPUS, vocab_size=300, template=request.param)
    )


@functools.cache
def profile_of(target: TargetTokenizer) -> TemplateProfile:
    return probe_template(target)


@settings(max_examples=examples(60), deadline=None)
@given(answers=ANSWERS, questions=st.lists(TEXTS, min_size=3, max_size=3), system=TEXTS)
def test_what_is_trained_is_what_was_written(
    target: TargetTokenizer, answers: list[tuple[str, str]], questions: list[str], system: str
) -> None:
    row = make_row(*answers, questions=questions, system=system)
    opener = "<think>" if target.template == K2_THINKING_STYLE else ""
    results = list(examples_from_rows([row], target, profile=profile_of(target)))
    assert len(results) == len(answers)
    for turn, (example, (reasoning, content)) in enumerate(zip(results, answers, strict=True)):
        assert isinstance(example, Example)
        first = int(example.loss_mask.argmax())
        assert example.loss_mask[first:].all()
        assert not example.loss_mask[:first].any()
        trained = target.decode(example.input_ids[first:].tolist())
        assert trained == f"{opener}{reasoning}</think>{content}<|im_end|>"
        messages = [
            {"role": item["role"], "content": item["content"]}
            for item in row["messages"][: 2 + 2 * turn]
        ]
        prompt = target.render(messages, prompt=True, switches={})
        assert target.decode(example.input_ids[:first].tolist()) == prompt
        # Control tokens are those of the frame, however many a text imitates.
        assert _controls(target, example.input_ids[first:]) == (
            (["<think>"] if opener else []) + ["</think>", "<|im_end|>"]
        )
        ends = _controls(target, example.input_ids[:first]).count("<|im_end|>")
        assert ends == 2 + 2 * turn


@settings(max_examples=examples(40), deadline=None)
@given(answer=st.tuples(TEXTS, TEXTS), question=TEXTS)
def test_without_imitations_the_prompt_is_encoded_as_a_whole(
    target: TargetTokenizer, answer: tuple[str, str], question: str
) -> None:
    import transformers

    texts = (*answer, question)
    if any(map(target.has_control, texts)):
        return
    (example,) = examples_from_rows(
        [make_row(answer, questions=[question])], target, profile=profile_of(target)
    )
    assert isinstance(example, Example)
    plain = transformers.AutoTokenizer.from_pretrained(target.folder)
    expected = plain.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert example.input_ids[~example.loss_mask].tolist() == expected


def _controls(target: TargetTokenizer, ids: np.ndarray) -> list[str]:
    names = {number: token for token, number in target.control.items()}
    return [names[number] for number in ids.tolist() if number in names]
