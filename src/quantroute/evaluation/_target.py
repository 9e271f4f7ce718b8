"""The target at hand: what it computes for text, and real speculative decoding with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantroute._extra import need
from quantroute.errors import ConfigurationError
from quantroute.evaluation._acceptance import Sample
from quantroute.evaluation._head import DraftHead

if TYPE_CHECKING:
    import torch

    from quantroute.extraction import Example

__all__ = ["Decoded", "LocalTarget", "cache_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What was written (token ids), and how many passes of the target it took."""

    ids: tuple[int, ...]
    target_passes: int

    @property
    def tokens_per_pass(self) -> float:
        """The acceptance length that really came about."""
        return len(self.ids) / self.target_passes


class LocalTarget:
    """A causal language model in a local folder, on the CPU, in float32.

    Raises:
        ConfigurationError: it cannot be loaded.
    """

    def __init__(self, folder: Path | str) -> None:
        torch, transformers = need("torch"), need("transformers")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{folder}: transformers cannot load it: {error}") from error
        self._model: Any = model.eval()
        self._cache_name = cache_name(model)

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H], shared by heads."""
        found: torch.Tensor = self._model.get_input_embeddings().weight.detach()
        return found

    @property
    def end(self) -> int | None:
        """The token that ends a turn."""
        found: int | list[int] | None = self._model.config.eos_token_id
        return found[0] if isinstance(found, list) else found

    def samples(self, examples: Iterable[Example], layers: Sequence[int]) -> Iterator[Sample]:
        """Examples with their states at `layers` (boundary ids) and logits, one at a time."""
        torch = need("torch")
        for example in examples:
            ids = torch.from_numpy(example.input_ids)
            with torch.inference_mode():
                found = self._model(ids.unsqueeze(0), output_hidden_states=True, use_cache=False)
            yield Sample(
                ids=ids,
                mask=torch.from_numpy(example.loss_mask),
                auxiliary=_auxiliary(found, layers)[0],
                logits=found.logits[0],
                dataset=example.provenance.get("dataset"),
            )

    def decode(self, prompt: Sequence[int], *, tokens: int, end: int | None = None) -> Decoded:
        """Greedy, one token per pass."""
        torch = need("torch")
        cache = need("transformers").DynamicCache()
        ids, written = torch.tensor([list(prompt)]), list[int]()
        with torch.inference_mode():
            while len(written) < tokens and (not written or written[-1] != end):
                logits = self._model(ids, use_cache=True, **{self._cache_name: cache}).logits
                written.append(int(logits[0, -1].argmax()))
                ids = torch.tensor([written[-1:]])
        return Decoded(ids=tuple(written), target_passes=len(written))

    def speculate(
        self,
        head: DraftHead,
        prompt: Sequence[int],
        *,
        tokens: int,
        depth: int = 3,
        end: int | None = None,
    ) -> Decoded:
        """Greedy with a drafter: each pass checks `depth` drafted tokens and adds one of its own.

        The text is the one `decode` writes, whatever the drafter is worth.
        """
        torch = need("torch")
        cache = need("transformers").DynamicCache()
        layers = head.wiring.layers
        written, checked, passes = list[int](), list(prompt), 0
        features: list[Any] = []
        drafted: list[int] = []
        waiting = list(prompt)  # what the next pass reads
        with torch.inference_mode():
            while len(written) < tokens and (not written or written[-1] != end):
                found = self._model(
                    torch.tensor([waiting]),
                    use_cache=True,
                    output_hidden_states=True,
                    **{self._cache_name: cache},
                )
                passes += 1
                choices = found.logits[0].argmax(-1).tolist()[-1 - len(drafted) :]
                kept = _agreeing(drafted, choices)
                fresh = [*drafted[:kept], choices[kept]]
                seen = len(waiting) - len(drafted) + kept
                features.append(_auxiliary(found, layers)[0][:seen])
                checked += fresh
                written += _until(fresh, end)
                if in_vain := len(drafted) - kept:
                    cache.crop(-in_vain)
                drafted = self._draft(head, checked, torch.cat(features), depth)
                waiting = [checked[-1], *drafted]
        return Decoded(ids=tuple(written[:tokens]), target_passes=passes)

    @staticmethod
    def _draft(
        head: DraftHead, checked: list[int], features: torch.Tensor, depth: int
    ) -> list[int]:
        torch = need("torch")
        tokens = torch.tensor(checked[1:])
        steps = head.unroll(tokens, head.fuse(features), depth=depth)
        return [int(head.target_ids[logits[-1].argmax()]) for logits, _ in steps]


def cache_name(model: Any) -> str:
    """How this model's class calls its key-value cache: transformers renames it in version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _auxiliary(found: Any, layers: Sequence[int]) -> torch.Tensor:
    """[B, S, L, H] from a model's output."""
    stacked: torch.Tensor = need("torch").stack(
        [found.hidden_states[layer] for layer in layers], dim=-2
    )
    return stacked


def _agreeing(drafted: Sequence[int], choices: Sequence[int]) -> int:
    for place, (mine, theirs) in enumerate(zip(drafted, choices, strict=False)):
        if mine != theirs:
            return place
    return len(drafted)


def _until(ids: list[int], end: int | None) -> list[int]:
    """Up to the end token, that included."""
    return ids[: ids.index(end) + 1] if end in ids else ids
