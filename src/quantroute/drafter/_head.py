"""A trained EAGLE-3 head in one form, whatever trainer it comes from; checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quantroute.drafter._data import boundary_ids
from quantroute.drafter._tensors import Tensor, read_tensors
from quantroute.errors import ConfigurationError, DatasetError

__all__ = ["FLAGS", "Head", "read_config"]

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Weights by speculators' names (`layers.0.…`), the decoder's config, and how it is wired.

    `layers` are boundary ids. `flags` are the four norm settings that change what is computed.
    """

    folder: Path
    config: Mapping[str, Any]
    decoder: Mapping[str, Any]
    flags: Mapping[str, bool]
    layers: tuple[int, ...]
    draft_vocab_size: int
    tensors: Mapping[str, Tensor]
    target: str | None

    @classmethod
    def from_speculators(cls, folder: Path) -> Self:
        """A checkpoint of `speculators train`.

        Raises:
            ConfigurationError: not an EAGLE-3 head, or its layers are not named.
            DatasetError: weights are missing, left over or of the wrong shape.
        """
        config = read_config(folder)
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            raise ConfigurationError(
                f"{folder}/config.json names no layers; no engine could tell which to take"
            )
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        head = cls(
            folder=folder,
            config=config,
            decoder=config["transformer_layer_config"],
            flags={name: bool(config.get(name, False)) for name in FLAGS},
            layers=tuple(ids),
            draft_vocab_size=config["draft_vocab_size"],
            tensors=read_tensors(folder),
            target=verifier.get("name_or_path"),
        )
        head.check()
        return head

    @classmethod
    def from_specforge(cls, folder: Path) -> Self:
        """What `specforge export --to sglang` wrote: ids in output convention, no extra norms.

        Raises:
            ConfigurationError, DatasetError: as `from_speculators`.
        """
        config = read_config(folder)
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            raise ConfigurationError(f"{folder}/config.json: eagle_config names no layers")
        names = {
            name.replace("midlayer.", "layers.0."): item
            for name, item in read_tensors(folder).items()
        }
        size = config.get("draft_vocab_size") or config["vocab_size"]
        if size == config["vocab_size"]:  # buffers that were never filled
            names = {name: item for name, item in names.items() if name not in ("d2t", "t2d")}
        head = cls(
            folder=folder,
            config=config,
            decoder=config,
            flags=dict.fromkeys(FLAGS, False),
            layers=boundary_ids(ids, "output"),
            draft_vocab_size=size,
            tensors=names,
            target=None,
        )
        head.check()
        return head

    def check(self) -> None:
        """Names and shapes of all weights, and that the two vocabularies' map is one.

        Raises:
            DatasetError: anything is missing, left over, of the wrong shape, or contradicts.
        """
        wanted, optional = dict(self._required()), dict(self._optional())
        problems = [f"{name} is missing" for name in wanted if name not in self.tensors]
        for name, tensor in self.tensors.items():
            shape = wanted.get(name, optional.get(name))
            if shape is None:
                problems.append(f"{name} belongs to no part of the head")
            elif tensor.shape != shape:
                problems.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        if problems:
            raise DatasetError(path=str(self.folder), problem="; ".join(problems))
        self._check_vocabulary()

    def _required(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        decoder = self.decoder
        width, inner = int(decoder["hidden_size"]), int(decoder["intermediate_size"])
        heads = int(decoder["num_attention_heads"])
        size = int(decoder.get("head_dim") or width // heads)
        keys = int(decoder.get("num_key_value_heads") or heads) * size
        entering = len(self.layers) * int(self.config.get("target_hidden_size") or width)
        yield "fc.weight", (width, entering)
        yield "norm.weight", (width,)
        yield "lm_head.weight", (self.draft_vocab_size, width)
        yield "layers.0.hidden_norm.weight", (width,)
        for layer in range(int(decoder["num_hidden_layers"])):
            name, into = f"layers.{layer}", width if layer else 2 * width
            yield f"{name}.input_layernorm.weight", (width,)
            yield f"{name}.post_attention_layernorm.weight", (width,)
            yield f"{name}.self_attn.q_proj.weight", (heads * size, into)
            yield f"{name}.self_attn.k_proj.weight", (keys, into)
            yield f"{name}.self_attn.v_proj.weight", (keys, into)
            yield f"{name}.self_attn.o_proj.weight", (width, heads * size)
            yield f"{name}.mlp.gate_proj.weight", (inner, width)
            yield f"{name}.mlp.up_proj.weight", (inner, width)
            yield f"{name}.mlp.down_proj.weight", (width, inner)
        if self.flags["norm_before_fc"]:
            yield "input_norm.weight", (entering,)
        if self.flags["fc_norm"]:
            for number in range(len(self.layers)):
                yield f"fc_norm.{number}.weight", (entering // len(self.layers),)
        if self.draft_vocab_size != int(decoder["vocab_size"]):
            # Without the map an engine takes draft ids for target ids, and nothing looks wrong.
            yield "d2t", (self.draft_vocab_size,)
            yield "t2d", (int(decoder["vocab_size"]),)

    def _optional(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, vocab = int(self.decoder["hidden_size"]), int(self.decoder["vocab_size"])
        yield "embed_tokens.weight", (vocab, width)
        yield "d2t", (self.draft_vocab_size,)
        yield "t2d", (vocab,)

    def _check_vocabulary(self) -> None:
        if "d2t" not in self.tensors:
            return
        offsets = self.tensors["d2t"].numbers()
        ids = [draft + offset for draft, offset in enumerate(offsets)]
        mask = self.tensors["t2d"].numbers()
        if ids != sorted(set(ids)) or ids != [token for token, is_in in enumerate(mask) if is_in]:
            raise DatasetError(
                path=str(self.folder),
                problem="d2t and t2d do not describe the same tokens; "
                "d2t holds offsets (target id - draft id), t2d marks target ids",
            )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        DatasetError: missing or not JSON.
    """
    path = folder / "config.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    return content
