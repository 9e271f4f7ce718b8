"""Small targets for tests of extraction: tokenizers made by code, templates of several families."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from quantroute.domain import canonical_json
from quantroute.extraction import TargetTokenizer

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

#: The model writes the opener itself; finished answers keep their reasoning, earlier ones do not.
QWEN_STYLE = """\
{%- set found = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set found.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' and loop.index0 > found.last -%}
    {{- '<think>\n' + (message.reasoning_content or '').strip('\n') + '\n</think>\n\n' -}}
    {{- message.content.lstrip('\n') -}}
  {%- else -%}
    {{- message.content -}}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""

#: As Kimi K2-Thinking: the role marker ends the prompt, and the model opens its thinking.
K2_THINKING_STYLE = """\
{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}
    {%- set last.answer = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_' ~ message.role ~ '|>' ~ message.role ~ '<|im_middle|>' -}}
  {%- if message.role == 'assistant' -%}
    {{- '<think>' ~ (message.reasoning_content or '' if loop.index0 > last.answer else '') -}}
    {{- '</think>' -}}
  {%- endif -%}
  {{- message.content -}}
  {%- if message.tool_calls -%}{{- '<|tools|>' -}}{%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""

#: As DeepSeek R1: the prompt opens the thinking; answers are cut behind the closing tag.
R1_STYLE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{{- message.content -}}
  {%- elif message.role == 'user' -%}{{- '<|User|>' ~ message.content -}}
  {%- else -%}{{- '<|Assistant|>' ~ message.content.split('</think>')[-1] ~ '<eos>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\n' -}}{%- endif -%}
"""

#: As DeepSeek V3.1: without thinking the prompt ends with the closing tag alone.
V31_STYLE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{{- message.content -}}
  {%- elif message.role == 'user' -%}{{- '<|User|>' ~ message.content -}}
  {%- else -%}
    {{- '<|Assistant|></think>' ~ message.content.split('</think>')[-1] ~ '<eos>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|Assistant|>' ~ ('<think>' if thinking is defined and thinking else '</think>') -}}
{%- endif -%}
"""

#: Channels in place of tags.
CHANNELS = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- if message.thinking -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|return|>' -}}
  {%- else -%}
    {{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

SPECIAL = (
    *("<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|im_middle|>", "<|tools|>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|User|>", "<|Assistant|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
)
TAGS = ("<think>", "</think>")


def letters_tokenizer(folder: Path, template: str, *, special: Iterable[str] = SPECIAL) -> Path:
    """A tokenizer with one token per ASCII letter: what it must give can be written by hand."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0} | {chr(code): code for code in range(1, 128)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def letters(folder: Path, template: str) -> TargetTokenizer:
    """`letters_tokenizer`, loaded."""
    return TargetTokenizer.load(letters_tokenizer(folder, template))


def make_row(
    *answers: tuple[str | None, str],
    questions: Iterable[str] = ("Hi", "More", "Again"),
    system: str | None = None,
    replayed: bool = False,
    **record: Any,
) -> dict[str, Any]:
    """An exported row: answers are (reasoning, content); `record` overrides provenance."""
    messages: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []
    turns = []
    if system is not None:
        messages.append({"role": "system", "content": system})
        sent.append(dict(messages[0]))
    for number, (question, (reasoning, content)) in enumerate(
        zip(questions, answers, strict=False)
    ):
        messages.append({"role": "user", "content": question})
        sent.append({"role": "user", "content": question})
        digest = hashlib.sha256(canonical_json(sent).encode()).hexdigest()
        turns.append({"turn": number, "messages_sha256": digest, **DEFAULTS, **record})
        messages.append({"role": "assistant", "content": content, "reasoning": reasoning})
        answer = {"role": "assistant", "content": content}
        sent.append(answer | ({"reasoning": reasoning} if replayed and reasoning else {}))
    return {"id": "p", "key": "k", "dataset": "d", "messages": messages, "turns": turns}


DEFAULTS: dict[str, Any] = {
    "row_class": "good",
    "finish_reason": "stop",
    "mode": "default",
    "endpoint": "alpha/int4",
    "input_tokens": None,
    "output_tokens": None,
    "reasoning_tokens": None,
    "sampling": {},
}
