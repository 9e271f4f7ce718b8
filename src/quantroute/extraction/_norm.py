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

# Of a checkpoint alone, the model type has to tell what its norm computes. The tables are those of
# transformers 5.24 (2026-11), whose causal language models' final norms were all tried.
#: Model types whose final norm multiplies by (1 + weight).
_ONE_PLUS_WEIGHT: Final = frozenset(
    {
        *("gemma", "gemma2", "gemma3", "gemma3_text", "paligemma", "recurrent_gemma", "vaultgemma"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen4_exp", "qwen4_exp_text", "step3p5", "step3p7", "nemotron"),
        *("minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer_text", "muse_spark_text"),
    }
)
#: Model types whose final norm subtracts the mean though it has no bias, which others have then.
_LAYER_WITHOUT_BIAS: Final = frozenset({"cohere", "cohere2", "cohere2_moe", "dbrx", "mpt"})
#: Model types whose final norm does not, though their epsilon is called otherwise than elsewhere.
_RMS_BY_ANOTHER_NAME: Final = frozenset({"mamba", "mamba2", "falcon_mamba", "nemotron_h"})
_EPS: Final = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
#: How the final norm's weight is called in checkpoints: the usual decoders, then older ones.
_WEIGHT_ENDINGS: Final = (
    "model.norm.weight",
    "model.final_norm.weight",
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
    norms = [
        FinalNorm(kind=kind, eps=eps, weight=factor, bias=bias)
        for kind in kinds
        for factor in (weight, weight.float() + 1)
    ]
    gaps = [float((norm.apply(trial.cpu()).float() - wanted).abs().max()) for norm in norms]
    # The nearest, not the first that is near: of large weights, one more is little.
    if not min(gaps) <= 2e-2 * float(wanted.abs().max()):
        raise unknown
    return norms[gaps.index(min(gaps))]


def _has(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), float)


def read_norm(target: Path, config: Mapping[str, Any]) -> FinalNorm:
    """The final norm out of a checkpoint folder, reading nothing but that tensor.

    Raises:
        ConfigurationError: no weight of a known name, or several; or what it computes is not known.
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
    model_type = config.get("model_type")
    if model_type in _ONE_PLUS_WEIGHT:
        weight = weight.float() + 1
    name = _eps_name(target, config)
    kind = _kind(target, model_type, name, has_bias=bias is not None)
    return FinalNorm(kind=kind, eps=float(config[name]), weight=weight, bias=bias)


def _eps_name(target: Path, config: Mapping[str, Any]) -> str:
    layer_first = config.get("model_type") in _LAYER_WITHOUT_BIAS  # cohere2_moe has both
    names = (*_EPS[1:], _EPS[0]) if layer_first else _EPS
    found = next((name for name in names if name in config), None)
    if found is None:
        raise ConfigurationError(
            f"{target}/config.json: none of {', '.join(_EPS)}; extract with "
            'source = "transformers", which asks the module itself'
        )
    return found


def _kind(target: Path, model_type: str | None, eps_name: str, *, has_bias: bool) -> Kind:
    if has_bias or model_type in _LAYER_WITHOUT_BIAS:
        return "layer"
    if eps_name == "rms_norm_eps" or model_type in _RMS_BY_ANOTHER_NAME:
        return "rms"
    raise ConfigurationError(
        f"{target}: whether the final norm of a {model_type} subtracts the mean is not known; "
        'extract with source = "transformers", which asks the module itself'
    )


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
