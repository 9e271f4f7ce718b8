"""Held-out answers out of a store of hidden states: no model has to run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    """Of the target, as they are stored.

    Attributes:
        embedding: [V, H].
        head: [V, H], and its `bias` [V].
        scale: what logits are multiplied by; `cap`: what they are softly kept below, after that.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def read(cls, folder: Path | str) -> TargetWeights:
        """Out of a folder's safetensors, nothing else being loaded.

        Raises:
            DatasetError: there is no embedding under a usual name, or no config.
        """
        folder = Path(folder)
        scale, cap = _scale_and_cap(folder / "config.json")
        embedding = _tensor(folder, "embed_tokens.weight")
        if embedding is None:
            raise DatasetError(path=str(folder), problem="no embed_tokens.weight in it")
        head = _tensor(folder, "lm_head.weight")
        return cls(
            embedding=embedding,
            head=embedding if head is None else head,
            bias=_tensor(folder, "lm_head.bias"),
            scale=scale,
            cap=cap,
        )

    @property
    def is_bare(self) -> bool:
        """Whether logits are states times head and nothing else."""
        return self.bias is None and self.scale == 1.0 and self.cap is None

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] in float32 of last states [S, H] after the final norm."""
        logits = normed.float() @ self.head.float().T
        if self.bias is not None:
            logits = logits + self.bias.float()
        logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


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
    weights = replace(weights, head=weights.head.float())  # once, not for each answer
    for item in states:
        hidden = item.hidden.float()
        yield Sample(
            ids=torch.from_numpy(item.example.input_ids),
            mask=torch.from_numpy(item.example.loss_mask),
            auxiliary=hidden[:, :-1],
            logits=weights.logits(norm.apply(hidden[:, -1])),
            dataset=item.example.provenance.get("dataset"),
            last=hidden[:, -1],
            normed=norm.apply(hidden[:, :-1]),
        )


def _scale_and_cap(path: Path) -> tuple[float, float | None]:
    """What the model types of transformers 5.24 do to logits, by the names in their configs."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    config = whole.get("text_config") or whole
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= config.get(name) or 1.0
    scaling = config.get("logits_scaling") or 1.0
    # Granite divides by it, HyperCLOVA X multiplies.
    scale *= scaling if config.get("model_type") == "hyperclovax" else 1 / scaling
    return scale, config.get("final_logit_softcapping")


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
