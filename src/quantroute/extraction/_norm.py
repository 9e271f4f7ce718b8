"""The target's final norm: what turns a stored last state into what the head sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from quantroute._extra import need
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction._safetensors import write_tensors

if TYPE_CHECKING:
    import torch

__all__ = ["FinalNorm", "norm_of_module", "read_norm"]

Kind = Literal["rms", "layer"]

#: Model types whose RMS norm multiplies by (1 + weight); read in transformers 5.24, 2026-11.
_ONE_PLUS_WEIGHT: Final = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "paligemma"})
#: How the final norm's weight is called in checkpoints: the usual decoders, then older ones.
_WEIGHT_ENDINGS: Final = (
    "model.norm.weight",
    "final_layernorm.weight",
    "final_layer_norm.weight",
    "ln_f.weight",
    "norm_f.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """`weight` [H] is what the normed state is multiplied by: Gemma's 1 is already added."""

    kind: Kind
    eps: float
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state after the norm, in the dtype of `hidden` [..., H]; computed in float32.

        Models that round before they multiply by the weight differ in the last bit of bfloat16.
        """
        exact = hidden.float()
        if self.kind == "layer":
            exact = exact - exact.mean(-1, keepdim=True)
        scale = (exact.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        normed = (exact * scale) * self.weight.float()
        if self.bias is not None:
            normed = normed + self.bias.float()
        return normed.to(hidden.dtype)

    def equals(self, other: FinalNorm) -> bool:
        """Whether it is the same norm, to the bit."""
        torch = need("torch")
        biases = [torch.zeros(1) if norm.bias is None else norm.bias for norm in (self, other)]
        return (
            (self.kind, self.eps) == (other.kind, other.eps)
            and torch.equal(self.weight, other.weight)
            and torch.equal(*biases)
        )

    def save(self, path: Path) -> None:
        """One safetensors file: `weight`, `bias` if there is one, kind and eps as metadata."""
        tensors = {"weight": self.weight}
        if self.bias is not None:
            tensors["bias"] = self.bias
        metadata = {"kind": self.kind, "eps": repr(self.eps), "applied_to": "last state"}
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: Path) -> FinalNorm:
        """What `save` wrote.

        Raises:
            DatasetError: missing, torn or of another kind.
        """
        safetensors = need("safetensors")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                bias = file.get_tensor("bias") if "bias" in file.keys() else None  # noqa: SIM118
                return cls(
                    kind=metadata["kind"],
                    eps=float(metadata["eps"]),
                    weight=file.get_tensor("weight"),
                    bias=bias,
                )
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            raise DatasetError(path=str(path), problem=f"not a final norm: {error}") from error


def norm_of_module(module: Any) -> FinalNorm:
    """The norm that a module computes, found by trying: classes and names differ, numbers do not.

    Raises:
        ConfigurationError: neither an RMS norm nor a layer norm.
    """
    torch = need("torch")
    unknown = ConfigurationError(
        f"the final norm ({type(module).__name__}) is neither an RMS norm nor a layer norm"
    )
    weight = module.weight.detach().cpu()
    if weight.ndim != 1:
        raise unknown
    bias = getattr(module, "bias", None)
    bias = None if bias is None else bias.detach().cpu()
    # Not bool or int: LayerNorm's `eps` is a float, and so is every RMS norm's.
    eps = next(
        (
            float(getattr(module, name))
            for name in ("variance_epsilon", "eps")
            if _has(module, name)
        ),
        0.0,
    )
    trial = torch.linspace(-3, 5, 2 * weight.shape[0]).reshape(2, -1)
    trial = (trial * trial).to(module.weight.device, module.weight.dtype)
    with torch.no_grad():
        wanted = module(trial).float().cpu()
    kinds: tuple[Kind, ...] = ("rms", "layer")
    for kind in kinds:
        for factor in (weight, weight.float() + 1):
            norm = FinalNorm(kind=kind, eps=eps, weight=factor, bias=bias)
            found = norm.apply(trial.cpu()).detach().float()
            if torch.allclose(found, wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max())):
                return norm
    raise unknown


def _has(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), float)


def read_norm(target: Path, config: Mapping[str, Any]) -> FinalNorm:
    """The final norm out of a checkpoint folder, reading nothing but that tensor.

    Raises:
        ConfigurationError: no weight of a known name, or several.
    """
    found = _find_weight(target)
    if found is None:
        raise ConfigurationError(
            f"{target}: no weight of a final norm ({', '.join(_WEIGHT_ENDINGS)}) in its "
            "safetensors files; give the target's own folder"
        )
    path, name = found
    safetensors = need("safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        weight = file.get_tensor(name)
        bias_name = name.removesuffix("weight") + "bias"
        bias = file.get_tensor(bias_name) if bias_name in file.keys() else None  # noqa: SIM118
    if config.get("model_type") in _ONE_PLUS_WEIGHT:
        weight = weight.float() + 1
    if "rms_norm_eps" in config:
        return FinalNorm(kind="rms", eps=float(config["rms_norm_eps"]), weight=weight, bias=bias)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if key in config:
            return FinalNorm(kind="layer", eps=float(config[key]), weight=weight, bias=bias)
    raise ConfigurationError(f"{target}/config.json: neither rms_norm_eps nor layer_norm_eps")


def _find_weight(target: Path) -> tuple[Path, str] | None:
    names: dict[str, Path] = {}
    index = target / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name: target / file for name, file in listed.items()}
    else:
        safetensors = need("safetensors")
        for path in sorted(target.glob("*.safetensors")):
            with safetensors.safe_open(path, framework="pt") as file:
                names |= dict.fromkeys(file.keys(), path)
    for ending in _WEIGHT_ENDINGS:
        # A vision tower has norms too; the language model's name is the one without it.
        hits = [
            name
            for name in names
            if (name == ending or name.endswith(f".{ending}")) and "vision" not in name
        ]
        if len(hits) > 1:
            raise ConfigurationError(f"{target}: several final norms: {', '.join(sorted(hits))}")
        if hits:
            return names[hits[0]], hits[0]
    return None
