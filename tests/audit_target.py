"""A small target made by code: random int4 weights that speak in lower-case letters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the extra `audit`")
pytest.importorskip("transformers", reason="needs the extra `audit`")

import torch

from extraction_support import CHATML, letters_tokenizer, make_row
from quantroute.audit import Target, served_as

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
END = "<|im_end|>"
LIMIT_TOKENS = 40
QUESTIONS = tuple(f"Tell me about {name}" for name in ("rivers", "ships"))


def make_target(folder: Path) -> Path:
    """Writes model and tokenizer; the same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters_tokenizer(folder, CHATML)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        bos_token_id=None,
    )
    torch.manual_seed(11)
    model = LlamaForCausalLM(config)
    allowed = tokenizer.convert_tokens_to_ids([*LETTERS, END])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.15)
        # The first component is large everywhere, so that the head can forbid by it.
        model.model.embed_tokens.weight.normal_(0, 1)
        model.model.embed_tokens.weight[:, 0] = 12
        head = model.lm_head.weight
        head.normal_(0, 0.4)
        head[:, 0] = -9
        head[allowed, 0] = 0
        head[allowed[-1]] *= 0.3
        head[allowed[-1], 0] = 0.3  # answers end now and then
    with served_as(model, "int4"):
        model.save_pretrained(folder)
    return folder


def sample(
    model: Any, prompts: Sequence[Sequence[int]], *, temperature: float = 1.0, seed: int
) -> list[list[int]]:
    """Answers to equally long prompts, end token included, of LIMIT_TOKENS at most."""
    end = model.config.eos_token_id
    ids = torch.tensor([list(prompt) for prompt in prompts])
    draws, past, drawn = torch.Generator().manual_seed(seed), dict[str, Any](), list[torch.Tensor]()
    # Since transformers 5.24 it is called `cache`; the other name still works, with a warning.
    known = inspect.signature(model.forward).parameters
    cache = "cache" if "cache" in known else "past_key_values"
    with torch.inference_mode():
        for _ in range(LIMIT_TOKENS):
            out = model(ids, use_cache=True, logits_to_keep=1, **past)
            past = {cache: out.past_key_values}
            odds = (out.logits[:, -1] / temperature).softmax(-1)
            ids = torch.multinomial(odds, 1, generator=draws)
            drawn.append(ids)
    rows = torch.cat(drawn, dim=-1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def prompt_ids(target: Target, question: str, system: str | None = None) -> list[int]:
    """The rendered prompt."""
    from quantroute.extraction._tokenizer import Marked

    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = target.tokenizer.render(messages, prompt=True, switches={})
    (ids,) = target.tokenizer.encode([Marked(text)])
    assert isinstance(ids, list)
    return ids


def served_rows(
    target: Target,
    endpoint: str,
    *,
    rollouts: int = 24,
    form: str | None = None,
    temperature: float = 1.0,
    system: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Exported rows as an endpoint would have answered them."""
    rows = []
    with target.in_format(form):
        for number, question in enumerate(QUESTIONS):
            prompt = prompt_ids(target, question, system)
            answers = sample(
                target.model,
                [prompt] * rollouts,
                temperature=temperature,
                seed=1_000 * seed + number,
            )
            rows += [
                _row(target, endpoint, question, ids, prompt, f"{endpoint}-{number}-{rollout}")
                for rollout, ids in enumerate(answers)
            ]
    return rows


def _row(
    target: Target, endpoint: str, question: str, ids: list[int], prompt: list[int], key: str
) -> dict[str, Any]:
    ended = ids[-1] == target.model.config.eos_token_id
    text = target.tokenizer.decode(ids[:-1] if ended else ids)
    row = make_row(
        (None, text),
        questions=[question],
        endpoint=endpoint,
        finish_reason="stop" if ended else "length",
        row_class="good" if ended else "truncated",
        input_tokens=len(prompt),
        output_tokens=len(ids),
        sampling={"temperature": 1.0},
    )
    return row | {"key": key, "model": "example/letters"}


def mean_answer_tokens(rows: Sequence[dict[str, Any]]) -> float:
    """Billed output tokens per row."""
    return float(np.mean([row["turns"][0]["output_tokens"] for row in rows]))
