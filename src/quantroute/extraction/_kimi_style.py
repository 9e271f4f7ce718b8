"""A small tokenizer and template that behave like Kimi's, for rehearsals and demos.

Same control tokens, same turns, same two modes, same way of emptying the thinking of answers that
count as history; trained on a corpus of yours, so that a tiny target can use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from quantroute.errors import ConfigurationError

__all__ = ["KIMI_STYLE_TEMPLATE", "write_kimi_style_tokenizer"]

_SPECIAL: Final = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "[PAD]",
)
_THINK: Final = ("<think>", "</think>")

#: Thinking by default: the prompt opens it. `thinking=False`: the prompt closes it at once. Every
#: answer up to the last one without tool calls is history, and loses its thinking.
KIMI_STYLE_TEMPLATE: Final = """\
{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}
    {%- set last.answer = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- set instant = thinking is defined and thinking is false -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_system|>system<|im_middle|>You answer questions in short.<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set turn = message.role if message.role in ('user', 'assistant') else 'system' -%}
  {{- '<|im_' ~ turn ~ '|>' ~ message.role ~ '<|im_middle|>' -}}
  {%- if message.role == 'assistant' -%}
    {{- '<think>' -}}
    {%- if loop.index0 > last.answer and not instant -%}
      {{- message.reasoning_content or '' -}}
    {%- endif -%}
    {{- '</think>' -}}
  {%- endif -%}
  {{- message.content or '' -}}
  {%- if message.tool_calls -%}
    {{- '<|tool_calls_section_begin|>' -}}
    {%- for call in message.tool_calls -%}
      {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' -}}
      {%- set given = call.function.arguments -%}
      {{- given if given is string else given | tojson -}}
      {{- '<|tool_call_end|>' -}}
    {%- endfor -%}
    {{- '<|tool_calls_section_end|>' -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_assistant|>assistant<|im_middle|><think>' -}}
  {%- if instant -%}{{- '</think>' -}}{%- endif -%}
{%- endif -%}
"""


def write_kimi_style_tokenizer(
    folder: Path | str,
    corpus: Iterable[str],
    *,
    vocab_size: int = 1_024,
    template: str = KIMI_STYLE_TEMPLATE,
) -> Path:
    """Train a byte-level BPE on `corpus` and write it, with the template, in Hugging Face form.

    Args:
        corpus: texts like those that the target will read and write.
        vocab_size: at most so many tokens, control tokens included; at least 271.
    Raises:
        ConfigurationError: the vocabulary is too small for all bytes.
    Returns:
        The folder; `TargetTokenizer.load` and `AutoTokenizer` take it.
    """
    if vocab_size < (least := 256 + len(_SPECIAL) + len(_THINK)):
        raise ConfigurationError(f"vocab_size must be at least {least}, not {vocab_size}")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL) - len(_THINK),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(corpus, trainer)
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in _THINK])
    roles = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **roles
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Path(folder)
