"""Training data, heads and a trainer, made up of bytes: no torch needed."""

from __future__ import annotations

import json
import stat
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH, INNER, HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB = 16, 32, 4, 2, 40, 10
TARGET_WEIGHTS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
VERSIONS = {
    "speculators": "0.9.0",
    "hs-connectors": "0.9.0",
    "specforge": "0.2.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "datasets": "5.1.0",
    "triton": "3.9.0",
    "accelerate": "1.15.0",
    "yunchang": "0.6.5",
}


def write_data(folder: Path, trainer: str = "speculators", **changes: Any) -> Path:
    """A folder as the writers of `extraction` leave it, without the states."""
    layers = {"speculators": ([2, 4, 5], "boundary"), "specforge": ([1, 3, 4], "output")}[trainer]
    content = {
        "kind": "quantroute trainer data",
        "version": 1,
        "state": "complete",
        "trainer": trainer,
        "target": {
            "model": str(folder.parent / "target"),
            "num_layers": 8,
            "hidden_size": WIDTH,
            "vocab_size": VOCAB,
        },
        "layers": {"ids": layers[0], "convention": layers[1]},
        "last_state": "before final norm",
        "dtype": "bfloat16",
        "draft_vocab_size": DRAFT_VOCAB,
        "coverage": 0.97,
        "examples": 100,
        "tokens": 40_000,
        "longest_tokens": 900,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(content | changes))
    for name in (f"d2t-{DRAFT_VOCAB}.npy", f"t2d-{DRAFT_VOCAB}.npy"):
        (folder / name).touch()
    (folder / "vocab_mapping").mkdir(exist_ok=True)
    (folder / "vocab_mapping" / "vocab_mapping.pt").touch()
    return folder


def write_target(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    """A target's config; its weights are not needed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "num_hidden_layers": 8,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    names = dict.fromkeys(TARGET_WEIGHTS, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def fake_interpreter(path: Path, body: str, **versions: str | None) -> str:
    """An executable that answers the probe with these versions and otherwise runs `body`."""
    probe = json.dumps({"packages": VERSIONS | versions, "gpus": 0})
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if sys.argv[1] == '-c':\n    print({probe!r})\n    raise SystemExit\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# -- heads ----------------------------------------------------------------------------------------


def save_tensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file from dtype, shape and bytes per name."""
    header, offset = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        ends = [offset, offset + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header).encode()
    body = b"".join(content for _, _, content in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def zeros(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of bfloat16 zeros."""
    size = 2
    for length in shape:
        size *= length
    return "BF16", shape, bytes(size)


def head_tensors(
    ids: list[int] | None = None, *, first: str = "layers.0", norm_before_fc: bool = False
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The weights of an EAGLE-3 head; `ids` are the target ids of its vocabulary."""
    ids = list(range(0, 2 * DRAFT_VOCAB, 2)) if ids is None else ids
    size = WIDTH // HEADS
    tensors = {
        "fc.weight": zeros(WIDTH, 3 * WIDTH),
        "norm.weight": zeros(WIDTH),
        "lm_head.weight": zeros(DRAFT_VOCAB, WIDTH),
        "embed_tokens.weight": zeros(VOCAB, WIDTH),
        f"{first}.hidden_norm.weight": zeros(WIDTH),
        f"{first}.input_layernorm.weight": zeros(WIDTH),
        f"{first}.post_attention_layernorm.weight": zeros(WIDTH),
        f"{first}.self_attn.q_proj.weight": zeros(HEADS * size, 2 * WIDTH),
        f"{first}.self_attn.k_proj.weight": zeros(KV_HEADS * size, 2 * WIDTH),
        f"{first}.self_attn.v_proj.weight": zeros(KV_HEADS * size, 2 * WIDTH),
        f"{first}.self_attn.o_proj.weight": zeros(WIDTH, HEADS * size),
        f"{first}.mlp.gate_proj.weight": zeros(INNER, WIDTH),
        f"{first}.mlp.up_proj.weight": zeros(INNER, WIDTH),
        f"{first}.mlp.down_proj.weight": zeros(WIDTH, INNER),
        "d2t": ("I64", (DRAFT_VOCAB,), struct.pack(f"<{DRAFT_VOCAB}q", *_offsets(ids))),
        "t2d": ("BOOL", (VOCAB,), bytes(token in ids for token in range(VOCAB))),
    }
    if norm_before_fc:
        tensors["input_norm.weight"] = zeros(3 * WIDTH)
    return tensors


def _offsets(ids: list[int]) -> list[int]:
    return [token - draft for draft, token in enumerate(ids)]


def speculators_checkpoint(
    folder: Path, target: Path, *, layers: tuple[int, ...] = (2, 4, 5), **changes: Any
) -> Path:
    """What `speculators train` leaves; `changes` are of its config."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "speculators_config": {"verifier": {"name_or_path": str(target)}},
        "transformer_layer_config": decoder(),
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    weights = head_tensors(norm_before_fc=bool(config["norm_before_fc"]))
    save_tensors(folder / "model.safetensors", weights)
    return folder


def decoder() -> dict[str, Any]:
    """The config of the head's own layer."""
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"},
        "layer_types": ["full_attention"],
        "sliding_window": 2048,
    }
