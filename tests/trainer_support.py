"""A tiny target of random weights, its hidden states, and which trainers are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantroute.demo import DemoSize, TargetSize
from quantroute.extraction import StatesFacts
from quantroute.extraction._records import Example, LayerIds, States

#: The demo's whole chain in some minutes. A smaller target does not end its thoughts, and no row of
#: it is good.
SMALL_DEMO = DemoSize(
    target=TargetSize(hidden_size=64, heads=2, intermediate_size=176, vocab_size=600, steps=300),
    prompts=60,
    epochs=2,
    draft_vocab_size=300,
    speculate_prompts=1,
)
VOCAB, HIDDEN, LAYERS = 256, 64, 8
LAYER_IDS = LayerIds.default(LAYERS)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip, saying what is missing, where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@dataclass(frozen=True)
class RmsNorm:
    """Llama's final norm, from its formula."""

    weight: Any
    eps: float

    def apply(self, hidden: Any) -> Any:
        exact = hidden.float()
        scaled = exact * (exact.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * scaled.to(hidden.dtype)


def make_target(folder: Path) -> Any:
    """A Llama of eight layers, saved in shards as trainers expect it, with a word tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder, max_shard_size="40KB")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return model


def final_norm(model: Any) -> RmsNorm:
    """The model's own."""
    return RmsNorm(model.model.norm.weight.detach(), model.config.rms_norm_eps)


def facts(model: str = "tiny", **changes: Any) -> StatesFacts:
    """What the manifest says of these states."""
    settings: dict[str, Any] = {
        "model": model,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "layers": LAYER_IDS,
    }
    return StatesFacts(**(settings | changes))


def make_examples(count: int, *, length: int = 24, prompt: int = 6) -> list[Example]:
    """Random tokens; no two examples are equal."""
    random = np.random.default_rng(7)
    mask = np.arange(length) >= prompt
    return [
        Example(input_ids=random.integers(3, VOCAB, length), loss_mask=mask) for _ in range(count)
    ]


def states_of(model: Any, examples: list[Example]) -> Iterator[States]:
    """What the model computes; the last state is taken before the final norm."""
    for example in examples:
        yield States(example=example, hidden=hidden_of(model, example.input_ids.tolist()))


def hidden_of(model: Any, ids: list[int]) -> Any:
    """[S, L+1, H]."""
    import torch

    seen: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        with torch.no_grad():
            result = model.model(torch.tensor([ids]), output_hidden_states=True)
    finally:
        hook.remove()
    layers = [result.hidden_states[layer] for layer in LAYER_IDS.boundary]
    return torch.stack([*layers, seen[0]], dim=2)[0]


def random_states(examples: list[Example]) -> Iterator[States]:
    """No model: the same numbers for the same example, whatever came before."""
    import torch

    for example in examples:
        generator = torch.Generator().manual_seed(int(example.input_ids.sum()))
        shape = (len(example), len(LAYER_IDS.boundary) + 1, HIDDEN)
        yield States(
            example=example, hidden=torch.randn(shape, generator=generator).to(torch.bfloat16)
        )
