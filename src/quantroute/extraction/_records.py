"""What the parts of extraction hand to each other: examples, layer ids, states."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantroute.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["Example", "LayerConvention", "LayerIds", "States"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One assistant turn as the target saw and produced it.

    Attributes:
        input_ids: int64 [S]: prompt with generation prompt, then what the model generated.
        loss_mask: bool [S], unshifted: True on tokens the model generated.
        provenance: JSON values of the row it came from (`row_key`, `turn`, `dataset`, `endpoint`,
            `row_class`, `finish_reason`, `output_tokens`, ...); part of no hash.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 1 or self.input_ids.shape != self.loss_mask.shape:
            raise ConfigurationError(
                f"token ids {self.input_ids.shape} and mask {self.loss_mask.shape} must be one "
                "equally long row each"
            )
        if not self.loss_mask.any():
            raise ConfigurationError("the loss mask is all zero: nothing would be learnt from it")

    def __len__(self) -> int:
        """Number of tokens, S."""
        return int(self.input_ids.shape[0])

    @property
    def key(self) -> str:
        """SHA-256 of tokens and mask, hex: the same content has the same key everywhere."""
        hasher = hashlib.sha256(np.ascontiguousarray(self.input_ids, dtype="<i8").tobytes())
        hasher.update(np.packbits(self.loss_mask).tobytes())
        return hasher.hexdigest()


class LayerConvention(enum.Enum):
    """How a layer id is meant; see `LayerIds`."""

    BOUNDARY = "boundary"  # id k: the state that enters layer k (speculators, vLLM)
    OUTPUT = "output"  # id k: the state that leaves layer k (SpecForge, ModelOpt, EAGLE)


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Auxiliary layers, in boundary convention: id k is `hidden_states[k]` of transformers.

    `of` takes them in either convention; `ids(convention)` gives them back in either. The last
    state (boundary id n, before the final norm) is always taken besides and is not listed here.

    >>> LayerIds.of((1, 29, 57), LayerConvention.OUTPUT).boundary
    (2, 30, 58)
    """

    boundary: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.boundary or list(self.boundary) != sorted(set(self.boundary)):
            raise ConfigurationError(
                f"layer ids must be distinct and increasing, not {list(self.boundary)}"
            )
        if self.boundary[0] < 0:
            raise ConfigurationError(f"layer ids must not be negative: {list(self.boundary)}")

    @classmethod
    def of(cls, ids: tuple[int, ...], convention: LayerConvention) -> LayerIds:
        """From ids of either convention."""
        shift = 1 if convention is LayerConvention.OUTPUT else 0
        return cls(tuple(layer + shift for layer in ids))

    @classmethod
    def default(cls, num_layers: int) -> LayerIds:
        """EAGLE-3's choice: low, middle and high, `[2, n//2, n-3]`.

        Raises:
            ConfigurationError: fewer than eight layers make them collide; name them yourself.
        """
        ids = (2, num_layers // 2, num_layers - 3)
        if not 2 < ids[1] < ids[2]:
            raise ConfigurationError(
                f"a model of {num_layers} layers has no usual layer ids; name three yourself"
            )
        return cls(ids)

    def ids(self, convention: LayerConvention) -> tuple[int, ...]:
        """The same layers in a convention's ids."""
        shift = 1 if convention is LayerConvention.OUTPUT else 0
        return tuple(layer - shift for layer in self.boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Hidden states of one example.

    Attributes:
        hidden: [S, L+1, H] in the target's dtype: the auxiliary layers in the order of their
            (boundary) ids, then the last state BEFORE the final norm.
    """

    example: Example
    hidden: torch.Tensor
