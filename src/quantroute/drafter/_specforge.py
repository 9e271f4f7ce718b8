"""SpecForge: the config for an offline training, its command, and its log."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.drafter._data import TrainingData
from quantroute.drafter._launch import Launch, Measurement
from quantroute.drafter._spec import TrainSpec
from quantroute.drafter._specforge_target import SpecForgeTarget, specforge_target
from quantroute.drafter._versions import Installed
from quantroute.errors import ConfigurationError, DatasetError

__all__ = ["RUN_ID", "SpecForgeLog", "specforge_launch"]

RUN_ID: Final = "drafter"
_CPU_LAUNCHER: Final = Path(__file__).with_name("_specforge_cpu_launcher.py")


def specforge_launch(spec: TrainSpec, data: TrainingData, installed: Installed) -> Launch:
    """`specforge train` with a config written beside the checkpoints.

    Raises:
        ConfigurationError: the target is not a folder SpecForge can read weights from.
        DatasetError: the vocabulary's map is missing.
    """
    on_cpu = spec.device == "cpu" or (spec.device == "auto" and not installed.gpus)
    target = Path(spec.target or data.model)
    read_from = specforge_target(target, spec.out / "target")
    draft_path, config_path = spec.out / "draft_config.json", spec.out / "specforge.json"
    checkpoints = spec.out / "checkpoints"
    config = _config(spec, data, read_from, spec.draft_config or draft_path, on_cpu=on_cpu)
    files = dict(read_from.files) | {config_path: json.dumps(config, indent=2) + "\n"}
    if spec.draft_config is None:
        files[draft_path] = json.dumps(derive_draft_config(target, data), indent=2) + "\n"
    program = (str(_CPU_LAUNCHER),) if on_cpu else ("-m", "specforge.cli")
    env = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"} if on_cpu else {}
    return Launch(
        argv=(spec.python, *program, "train", "-c", str(config_path), *spec.extra),
        env={"PYTHONUNBUFFERED": "1", **env},
        parser=SpecForgeLog(),
        checkpoints=checkpoints,
        files=files,
        total_steps=_total_steps(spec, data),
        notes=("on the CPU: slow, for rehearsals",) if on_cpu else (),
    )


def _config(
    spec: TrainSpec,
    data: TrainingData,
    target: SpecForgeTarget,
    draft_config: Path,
    *,
    on_cpu: bool,
) -> dict[str, Any]:
    checkpoints = spec.out / "checkpoints"
    steps_per_epoch = _steps_per_epoch(spec, data)
    training: dict[str, Any] = {
        "strategy": "eagle3",
        "num_epochs": spec.epochs,
        "batch_size": spec.batch_size,
        "ttt_length": spec.depth,
        "save_interval": max(1, steps_per_epoch // spec.checkpoints_per_epoch),
        "log_interval": spec.log_every_steps,
        "seed": spec.seed,
    }
    if spec.max_steps is not None:
        training["max_steps"] = spec.max_steps
    if spec.learning_rate is not None:
        training["learning_rate"] = spec.learning_rate
    if on_cpu:
        training |= {"fsdp_sharding": "NO_SHARD", "attention_backend": "sdpa"}
    if list(checkpoints.glob(f"{RUN_ID}-step*/training_state.pt")):
        training["resume_from"] = str(checkpoints)
    model: dict[str, Any] = {
        "target_model_path": str(target.folder),
        "embedding_key": target.embedding,
        "lm_head_key": target.head,
        "draft_model_config": str(draft_config),
        "torch_dtype": "bfloat16",
    }
    if data.draft_vocab_size is not None:
        model["vocab_mapping_path"] = str(_mapping(data))
    return {
        "run_id": RUN_ID,
        "output_dir": str(checkpoints),
        "model": model,
        "data": {
            "hidden_states_path": str(data.folder / "hidden_states"),
            "max_length": spec.max_tokens or data.longest_tokens,
            "cache_dir": str(spec.out / "cache"),
            **({"dataloader_num_workers": 0} if on_cpu else {}),
        },
        "training": training,
        "deployment": {"trainer": {"nproc_per_node": spec.processes}},
    }


def _mapping(data: TrainingData) -> Path:
    path = data.folder / "vocab_mapping" / "vocab_mapping.pt"
    if not path.exists():
        raise DatasetError(path=str(path), problem="is missing; write the data again")
    return path


def derive_draft_config(target: Path, data: TrainingData) -> dict[str, Any]:
    """A Llama-style drafter of one layer and the target's width.

    Raises:
        ConfigurationError: the target's config lacks a size.
    """
    path = target / "config.json"
    whole: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text: Mapping[str, Any] = whole.get("text_config") or whole
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        inner = int(text["intermediate_size"])
    except KeyError as error:
        raise ConfigurationError(
            f"{path}: {error} is missing; give train.draft_config a config of your own"
        ) from error
    kv_heads = int(text.get("num_key_value_heads") or heads)
    rope = text.get("rope_parameters") or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        # A head dimension of the target's own (MLA) means nothing to a Llama-style drafter.
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "vocab_size": data.vocab_size,
        "draft_vocab_size": data.draft_vocab_size or data.vocab_size,
        "max_position_embeddings": text.get("max_position_embeddings", 4096),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "rope_theta": text.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(data.output_layers),
            "use_aux_hidden_state": True,
        },
    }


def _steps_per_epoch(spec: TrainSpec, data: TrainingData) -> int:
    # The last examples of an epoch that do not fill a batch are left out.
    return max(1, data.examples // (spec.batch_size * spec.processes))


def _total_steps(spec: TrainSpec, data: TrainingData) -> int:
    steps = _steps_per_epoch(spec, data) * spec.epochs
    return steps if spec.max_steps is None else min(steps, spec.max_steps)


_STEP: Final = re.compile(r"^step (\d+): (\{.*\})\s*$")


@dataclass(slots=True)
class SpecForgeLog:
    """Reads lines such as `step 17: {'acc_0': 0.74, 'loss': 4.4, ...}`."""

    def read(self, line: str) -> Measurement | None:
        found = _STEP.match(line)
        if found is None:
            return None
        figures = _literal(found[2])
        if "loss" not in figures:
            return None
        return Measurement(
            split="train",
            step=int(found[1]),
            epoch=None,
            loss=figures["loss"],
            accuracy=_positions(figures),
            learning_rate=figures.get("lr"),
        )


def _literal(text: str) -> dict[str, float]:
    """A printed dict of numbers; `nan` and `inf` are no literals of the language."""
    quoted = re.sub(r"(?<=: )(-?(?:nan|inf))\b", r"'\1'", text)
    try:
        content = ast.literal_eval(quoted)
        return {str(name): float(value) for name, value in content.items()}
    except (ValueError, SyntaxError, TypeError):
        return {}


def _positions(figures: Mapping[str, float]) -> tuple[float, ...]:
    found: list[float] = []
    while (key := f"acc_{len(found)}") in figures:
        found.append(figures[key])
    return tuple(found)
