"""The forward pass of an EAGLE-3 head, read from a checkpoint of speculators or SpecForge.

Own code, so that a drafter can be judged without the trainer that made it; tests compare it with
the trainers' own models. One decoder layer of Llama's kind; its first projections take the token's
embedding beside the hidden state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    import torch

__all__ = ["DraftHead", "Wiring"]

_LAYER: Final = "layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Sizes, and the settings that change what is computed. `layers` are boundary ids."""

    layers: tuple[int, ...]
    hidden_size: int
    heads: int
    key_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    window_tokens: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, layers: tuple[int, ...] | None = None) -> Wiring:
        """From a `config.json`; `layers` are those of the states at hand (boundary ids).

        Raises:
            ConfigurationError: not an EAGLE-3 head of one layer, or of a kind unknown here.
        """
        is_speculators = config.get("speculators_model_type") == "eagle3"
        if not is_speculators and "LlamaForCausalLMEagle3" not in (
            config.get("architectures") or ()
        ):
            raise ConfigurationError("config.json is not that of an EAGLE-3 head")
        decoder = config["transformer_layer_config"] if is_speculators else config
        if decoder.get("model_type") != "llama" or int(decoder["num_hidden_layers"]) != 1:
            raise ConfigurationError("heads of one Llama layer can be evaluated, no others")
        rope = decoder.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default" or decoder.get("rope_scaling"):
            raise ConfigurationError("heads with scaled rotary positions cannot be evaluated")
        width, heads = int(decoder["hidden_size"]), int(decoder["num_attention_heads"])
        slides = "sliding_attention" in (decoder.get("layer_types") or ())
        # SpecForge's own `norm_output` asks for the norm before its head, which is always there;
        # the engines' means that the normed state goes on, and stands beside the other flags.
        has_flags = is_speculators or "norm_before_residual" in config
        return cls(
            layers=_agreed(config, layers, is_speculators=is_speculators),
            hidden_size=width,
            heads=heads,
            key_heads=int(decoder.get("num_key_value_heads") or heads),
            head_dim=int(decoder.get("head_dim") or width // heads),
            eps=float(decoder["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or decoder.get("rope_theta") or 10_000.0),
            window_tokens=decoder.get("sliding_window") if slides else None,
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_before_fc=bool(config.get("norm_before_fc")),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=has_flags and bool(config.get("norm_output")),
        )


def _agreed(
    config: Mapping[str, Any], layers: tuple[int, ...] | None, *, is_speculators: bool
) -> tuple[int, ...]:
    """Those given, else those named. An engine's config counts in the engine's own way."""
    named = tuple(config.get("eagle_aux_hidden_state_layer_ids") or ()) if is_speculators else ()
    if layers and named and layers != named:
        raise ConfigurationError(
            f"the head takes layers {list(named)}, but the states are of {list(layers)} (boundary)"
        )
    if not (found := layers or named):
        raise ConfigurationError("the config names no layers one could be sure of; give `layers`")
    return found


class DraftHead:
    """A head in memory, in float32.

    Attributes:
        target_ids: [Vd], the target's id of each draft id.
    """

    def __init__(
        self, wiring: Wiring, weights: Mapping[str, torch.Tensor], *, embedding: torch.Tensor
    ) -> None:
        self.wiring = wiring
        self._weights = {name: item.float() for name, item in weights.items() if name != "d2t"}
        self._embedding = embedding.float()
        torch = need("torch")
        size = weights["lm_head.weight"].shape[0]
        offsets = weights.get("d2t")
        self.target_ids = torch.arange(size)
        if size != embedding.shape[0]:
            if offsets is None:
                raise ConfigurationError("the draft vocabulary is cut, but d2t is missing")
            self.target_ids = self.target_ids + offsets

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        embedding: torch.Tensor,
        layers: tuple[int, ...] | None = None,
    ) -> DraftHead:
        """From a folder with `config.json` and safetensors.

        Args:
            embedding: the target's [V, H], for heads that share it.
            layers: boundary ids of the states; needed unless the config is of speculators.
        Raises:
            ConfigurationError, DatasetError: not such a head, or not readable.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DatasetError(path=str(folder / "config.json"), problem=str(error)) from error
        weights = dict(_read(folder))
        if broken := [name for name, item in weights.items() if not item.isfinite().all()]:
            raise DatasetError(
                path=str(folder),
                problem=f"{', '.join(broken)}: not finite, so the training went astray; take an "
                "earlier checkpoint, or train anew with a lower learning_rate",
            )
        own = weights.pop("embed_tokens.weight", None)
        return cls(
            Wiring.of(config, layers=layers),
            weights,
            embedding=embedding if own is None else own,
        )

    def untrained(self, *, seed: int = 0) -> DraftHead:
        """The same head with random weights: what a drafter is worth before training."""
        torch = need("torch")
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.ones_like(item)
            if item.ndim == 1
            else torch.randn(item.shape, generator=generator) * 0.02
            for name, item in self._weights.items()
        }
        fresh = DraftHead.__new__(DraftHead)
        fresh.wiring, fresh._weights = self.wiring, weights
        fresh._embedding, fresh.target_ids = self._embedding, self.target_ids
        return fresh

    def fuse(self, auxiliary: torch.Tensor) -> torch.Tensor:
        """Auxiliary states [S, L, H] -> what the first draft step takes, [S, H]."""
        torch = need("torch")
        found = auxiliary.float().flatten(1)
        if self.wiring.norm_before_fc:
            found = self._norm(found, "input_norm")
        if self.wiring.fc_norm:
            parts = found.chunk(auxiliary.shape[1], dim=-1)
            normed = [self._norm(part, f"fc_norm.{place}") for place, part in enumerate(parts)]
            found = torch.cat(normed, dim=-1)
        return self._linear(found, "fc")

    def unroll(
        self, tokens: torch.Tensor, fused: torch.Tensor, *, depth: int
    ) -> Iterator[tuple[torch.Tensor, Tokens]]:
        """Draft `depth` steps from every position at once, as training does.

        Position t stands for a drafter that knows the features g_0..g_t and the token after each;
        step k sees those of step 0 up to t and its own earlier steps, and takes its own last
        hidden state as feature.

        Args:
            tokens: [S], the token that follows each feature.
            fused: [S, H], from `fuse`.
        Yields:
            Logits [S, Vd] of each step, and where to put the tokens [S] of the next one; without
            a word, the drafter's own choices are taken.
        """
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden, handed = fused, Tokens(tokens)
        for step in range(depth):
            hidden = self._layer(handed.ids, hidden, past, step=step)
            normed = self._norm(hidden, "norm")
            if self.wiring.norm_output:
                hidden = normed
            logits = self._linear(normed, "lm_head")
            handed = Tokens(self.target_ids[logits.argmax(-1)])
            yield logits, handed

    def _layer(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        step: int,
    ) -> torch.Tensor:
        torch = need("torch")
        normed = self._norm(hidden, f"{_LAYER}hidden_norm")
        residual = normed if self.wiring.norm_before_residual else hidden
        embedded = self._norm(self._embedding[tokens], f"{_LAYER}input_layernorm")
        entering = torch.cat([embedded, normed], dim=-1)
        hidden = residual + self._attend(entering, past, step=step)
        normed = self._norm(hidden, f"{_LAYER}post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(normed, f"{_LAYER}mlp.gate_proj"))
        inner = gate * self._linear(normed, f"{_LAYER}mlp.up_proj")
        return hidden + self._linear(inner, f"{_LAYER}mlp.down_proj")

    def _attend(
        self,
        entering: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        step: int,
    ) -> torch.Tensor:
        torch, wiring = need("torch"), self.wiring
        length = entering.shape[0]
        where = torch.arange(length) + step
        query = self._rotated(self._heads(entering, "q", wiring.heads), where)
        key = self._rotated(self._heads(entering, "k", wiring.key_heads), where)
        value = self._heads(entering, "v", wiring.key_heads)
        repeats = wiring.heads // wiring.key_heads
        past.append((key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
        scale = wiring.head_dim**-0.5
        first_keys, first_values = past[0]
        scores = torch.einsum("qhd,khd->hqk", query, first_keys) * scale
        scores = scores.masked_fill(~self._seen(length), float("-inf"))
        own = [torch.einsum("qhd,qhd->hq", query, keys) * scale for keys, _ in past[1:]]
        shares = torch.cat([scores, *(item.unsqueeze(-1) for item in own)], dim=-1).softmax(-1)
        found = torch.einsum("hqk,khd->qhd", shares[..., :length], first_values)
        for place, (_, values) in enumerate(past[1:]):
            found = found + shares[..., length + place].transpose(0, 1).unsqueeze(-1) * values
        return self._linear(found.flatten(1), f"{_LAYER}self_attn.o_proj")

    def _seen(self, length: int) -> torch.Tensor:
        torch = need("torch")
        back = torch.arange(length).unsqueeze(1) - torch.arange(length)
        seen = back >= 0
        if self.wiring.window_tokens is not None:
            seen &= back < self.wiring.window_tokens
        return seen

    def _heads(self, entering: torch.Tensor, name: str, heads: int) -> torch.Tensor:
        found = self._linear(entering, f"{_LAYER}self_attn.{name}_proj")
        return found.unflatten(-1, (heads, self.wiring.head_dim))

    def _rotated(self, item: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Rotary positions over the two halves of each head, as Llama's."""
        torch = need("torch")
        half = self.wiring.head_dim // 2
        rates = self.wiring.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (where.unsqueeze(1) * rates).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        low, high = item[..., :half], item[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _linear(self, item: torch.Tensor, name: str) -> torch.Tensor:
        found: torch.Tensor = item @ self._weights[f"{name}.weight"].T
        return found

    def _norm(self, item: torch.Tensor, name: str) -> torch.Tensor:
        scale = (item.pow(2).mean(-1, keepdim=True) + self.wiring.eps).rsqrt()
        return item * scale * self._weights[f"{name}.weight"]


@dataclass(slots=True)
class Tokens:
    """The tokens [S] that the next step takes; set `ids` to have others taken."""

    ids: torch.Tensor


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under speculators' names."""
    safetensors = need("safetensors.torch")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DatasetError(path=str(folder), problem="no *.safetensors with weights in it")
    for path in files:
        for name, item in safetensors.load_file(path).items():
            yield name.replace("midlayer.", _LAYER), item
