"""Tiny targets and examples for tests of extraction; torch is imported by whoever calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantroute.errors import SourceError
from quantroute.extraction._norm import FinalNorm, read_norm
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.extraction._source import Lost
from quantroute.extraction._target import Target

VOCAB = 199


def tiny_llama(folder: Path, *, layers: int = 8, hidden: int = 32, seed: int = 0) -> Path:
    """A Llama with random weights, saved as people save models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )
    return _save(LlamaForCausalLM, config, folder, seed)


def tiny_deepseek(folder: Path, *, layers: int = 8, hidden: int = 32, seed: int = 0) -> Path:
    """A DeepSeek-V3: latent attention, experts after the first layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )
    return _save(DeepseekV3ForCausalLM, config, folder, seed)


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        # A fresh norm multiplies by one everywhere: nothing would tell it from no weight at all.
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def example(number: int, tokens: int, **provenance: Any) -> Example:
    """An example of `tokens` made-up ids, the second half of them learnt."""
    ids = np.random.default_rng([number, tokens]).integers(3, VOCAB, tokens)
    mask = np.arange(tokens) >= tokens // 2
    facts = {"row_key": f"row-{number}", "dataset": "d", **provenance}
    return Example(input_ids=ids.astype(np.int64), loss_mask=mask, provenance=facts)


def examples(count: int, *, longest: int = 40) -> list[Example]:
    """Examples of unequal lengths."""
    lengths = np.random.default_rng(7).integers(2, longest + 1, count)
    return [example(number, int(length)) for number, length in enumerate(lengths)]


async def gathered(results: AsyncIterator[Any]) -> list[Any]:
    """All of them."""
    return [item async for item in results]


def by_key(results: Iterable[States]) -> dict[str, Any]:
    """States by their example's key."""
    return {item.example.key: item.hidden for item in results}


class WrittenOut:
    """The target as a loop over its layers, one example at a time: the reference for every source.

    Independent of `hidden_states` of transformers and of any hook.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = (
            AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval().model
        )

    def states(self, ids: Sequence[int], boundary: Sequence[int]) -> Any:
        """[S, L+1, H] in float32, the last state before the norm."""
        import torch

        length = len(ids)
        positions = torch.arange(length)[None]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            hidden = self._model.embed_tokens(torch.tensor(ids)[None])
            rotary = self._model.rotary_emb(hidden, positions)
            entering = []
            for layer in self._model.layers:
                entering.append(hidden)
                hidden = layer(
                    hidden,
                    attention_mask=causal,
                    position_ids=positions,
                    position_embeddings=rotary,
                    use_cache=False,
                )
        taken = [*(entering[layer] for layer in boundary), hidden]
        return torch.stack([state[0] for state in taken], dim=1)


def slow_states(folder: Path, one: Example, boundary: Sequence[int]) -> Any:
    """Of one example."""
    return WrittenOut(folder).states(one.input_ids.tolist(), boundary)


class FakeSource:
    """States that follow from token ids alone: no model, the same whatever the batch.

    `bad` keys come out as NaN, `gone` keys as lost, `silent` keys not at all; after `dies_after`
    examples the source gives up.
    """

    def __init__(
        self,
        target: Target,
        layers: LayerIds,
        *,
        dtype: str = "float32",
        bad: Container[str] = (),
        gone: Container[str] = (),
        silent: Container[str] = (),
        dies_after: int | None = None,
    ) -> None:
        self.name, self.target, self.layers, self.dtype = "fake", target, layers, dtype
        self._bad, self._gone, self._silent = bad, gone, silent
        self._left = dies_after
        self.asked = 0

    def final_norm(self) -> FinalNorm:
        return read_norm(self.target.folder, self.target.config)

    def hidden(self, one: Example) -> Any:
        """What comes out for an example."""
        import torch

        slots, width = len(self.layers.boundary) + 1, self.target.hidden_size
        ids = torch.from_numpy(one.input_ids).double()[:, None, None]
        slot = torch.arange(1, slots + 1)[None, :, None]
        place = torch.arange(1, width + 1)[None, None]
        return torch.sin(ids * slot / place).to(getattr(torch, self.dtype))

    async def states(self, examples: Iterable[Example]) -> AsyncIterator[States | Lost]:
        for one in sorted(examples, key=len):  # not in the order they came in
            if self._left is not None:
                if not self._left:
                    raise SourceError(source="fake", problem="died")
                self._left -= 1
            self.asked += 1
            if one.key in self._silent:
                continue
            if one.key in self._gone:
                yield Lost(example=one, reason="too_long", detail="why")
                continue
            hidden = self.hidden(one)
            if one.key in self._bad:
                hidden[0, 0, 0] = float("nan")
            yield States(example=one, hidden=hidden)

    async def close(self) -> None:
        pass


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store, locks apart."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }
