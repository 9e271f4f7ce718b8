"""Held-out answers out of a store of hidden states: no model has to run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.evaluation._acceptance import Sample

if TYPE_CHECKING:
    import torch

    from quantroute.extraction import FinalNorm, States

__all__ = ["TargetWeights", "is_held_out", "stored_samples"]

_HASH: Final = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWeights:
    """Of the target: `embedding` [V, H], `head` [V, H] and its `bias` [V], as they are stored."""

    embedding: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def read(cls, folder: Path | str) -> TargetWeights:
        """Out of a folder's safetensors, nothing else being loaded.

        Raises:
            DatasetError: there is no embedding under a usual name.
        """
        folder = Path(folder)
        embedding = _tensor(folder, "embed_tokens.weight")
        if embedding is None:
            raise DatasetError(path=str(folder), problem="no embed_tokens.weight in it")
        head = _tensor(folder, "lm_head.weight")
        return cls(
            embedding=embedding,
            head=embedding if head is None else head,
            bias=_tensor(folder, "lm_head.bias"),
        )


def is_held_out(row_key: str, *, share: float) -> bool:
    """Whether a row is kept from training: by its key, alike on every machine.

    Keys of our own rows are hashes; others are hashed first. All answers of a conversation go the
    same way.
    """
    digest = row_key if _HASH.match(row_key) else hashlib.sha256(row_key.encode()).hexdigest()
    return int(digest[:8], 16) < share * 2**32


def stored_samples(
    states: Iterable[States], *, norm: FinalNorm, weights: TargetWeights
) -> Iterator[Sample]:
    """States with the logits that the target makes of them."""
    torch = need("torch")
    head = weights.head.float()
    bias = 0.0 if weights.bias is None else weights.bias.float()
    for item in states:
        hidden = item.hidden.float()
        yield Sample(
            ids=torch.from_numpy(item.example.input_ids),
            mask=torch.from_numpy(item.example.loss_mask),
            auxiliary=hidden[:, :-1],
            logits=norm.apply(hidden[:, -1]) @ head.T + bias,
            dataset=item.example.provenance.get("dataset"),
            last=hidden[:, -1],
            normed=norm.apply(hidden[:, :-1]),
        )


def _tensor(folder: Path, ending: str) -> torch.Tensor | None:
    safetensors = need("safetensors")
    for path in _files(folder, ending):
        with safetensors.safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(ending)]  # noqa: SIM118
            names = [name for name in names if "vision" not in name]
            if len(names) > 1:
                raise ConfigurationError(f"{folder}: several {ending}: {', '.join(names)}")
            if names:
                found: torch.Tensor = file.get_tensor(names[0])
                return found
    return None


def _files(folder: Path, ending: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / file for name, file in listed.items() if name.endswith(ending)})
