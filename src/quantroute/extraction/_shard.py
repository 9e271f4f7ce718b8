"""One shard: packed tokens, offsets and states, and how they come together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantroute._extra import need
from quantroute.errors import ConfigurationError
from quantroute.extraction._fp8 import to_fp8
from quantroute.extraction._records import Example, States
from quantroute.extraction._source import Lost

if TYPE_CHECKING:
    import torch

__all__ = ["ShardBuffer"]


class ShardBuffer:
    """Takes the states of a shard's examples in any order; memory is that of the shard.

    Args:
        dtype: of the states, as torch names it. With another one a source's states are refused.
    """

    def __init__(
        self, examples: Sequence[Example], *, slots: int, hidden_size: int, dtype: str
    ) -> None:
        torch = need("torch")
        self.examples = tuple(examples)
        self.lost: dict[str, Lost] = {}
        lengths = [len(example) for example in examples]
        ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = {
            example.key: int(end) - length
            for example, end, length in zip(examples, ends, lengths, strict=True)
        }
        self._waiting = set(self._starts)
        self._dtype = getattr(torch, dtype)
        self._hidden = torch.empty(int(sum(lengths)), slots, hidden_size, dtype=self._dtype)

    def add(self, result: States | Lost) -> None:
        """Keep one example's result. States that are not finite are lost.

        Raises:
            ConfigurationError: not one of this shard's examples, twice, or of another shape.
        """
        example = result.example
        key = example.key
        if key not in self._waiting:
            raise ConfigurationError(f"states of example {key[:12]} were not asked for, or twice")
        self._waiting.remove(key)
        if isinstance(result, Lost):
            self.lost[key] = result
            return
        hidden = result.hidden
        place = self._hidden[self._starts[key] : self._starts[key] + len(example)]
        if hidden.shape != place.shape or hidden.dtype != self._dtype:
            raise ConfigurationError(
                f"states of example {key[:12]} are {hidden.dtype} {tuple(hidden.shape)} instead of "
                f"{self._dtype} {tuple(place.shape)}"
            )
        if _is_finite(hidden):
            place.copy_(hidden)
        else:
            self.lost[key] = Lost(example=example, reason="not_finite")

    def finish(self, *, reason: str = "no_answer") -> None:
        """No more results come: whatever is still missing is lost."""
        for example in self.examples:
            if example.key in self._waiting:
                self.lost[example.key] = Lost(example=example, reason=reason)
        self._waiting.clear()

    @property
    def kept(self) -> list[Example]:
        """The examples with states, in the order of the shard."""
        return [example for example in self.examples if example.key not in self.lost]

    def tensors(self, *, fp8: bool) -> dict[str, torch.Tensor]:
        """What the file holds, in its order: int64 first, so that everything is aligned."""
        torch = need("torch")
        kept, hidden = self.kept, self._hidden
        if self.lost:
            spans = [(self._starts[example.key], len(example)) for example in kept]
            parts = [hidden[start : start + length] for start, length in spans]
            hidden = torch.cat(parts) if parts else hidden[:0]
        ends = np.cumsum([0, *(len(example) for example in kept)], dtype=np.int64)
        empty = np.zeros(0, dtype=np.int64)
        ids = np.concatenate([empty, *(example.input_ids for example in kept)])
        mask = np.concatenate([empty, *(example.loss_mask for example in kept)])
        found = {"offsets": torch.from_numpy(ends), "input_ids": torch.from_numpy(ids)}
        if fp8:
            found["states"], found["states_scales"] = to_fp8(hidden)
            # Scales first: float32 wants its alignment, float8 none.
            found["states"] = found.pop("states")
        else:
            found["states"] = hidden
        found["loss_mask"] = torch.from_numpy(mask.astype(np.uint8))
        return found


def _is_finite(hidden: torch.Tensor) -> bool:
    torch = need("torch")
    # One NaN or infinity makes the sum one too; only then is it worth looking at every value.
    if bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(hidden).all())
