"""A trained head as a folder that vLLM or SGLang loads, read back and compared."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.drafter._checkpoints import latest_checkpoint
from quantroute.drafter._engines import Engine, layers_as_read, layers_to_write, target_family
from quantroute.drafter._head import FLAGS, Head, read_config
from quantroute.drafter._tensors import Tensor, read_tensors, write_tensors
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.storage import atomic_write

__all__ = ["DrafterExport", "export_drafter", "find_checkpoint"]

_SPECFORGE_STATE: Final = "training_state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterExport:
    """What was written. `layer_ids` stand in the config; the engine takes `layers` (boundary)."""

    folder: Path
    source: Path
    engine: Engine
    layer_ids: tuple[int, ...]
    layers: tuple[int, ...]
    serve: str
    notes: tuple[str, ...]


def export_drafter(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    engine: Engine,
    target: str | None = None,
    like: str | None = None,
    draft_config: Path | str | None = None,
    python: str = sys.executable,
) -> DrafterExport:
    """Write `folder` from a checkpoint of speculators or SpecForge, or from a training's folder.

    Args:
        target: the target's folder, for its class and depth; a speculators checkpoint names it.
        like: a class whose layers SGLang counts in the same way, for a target unknown here.
        draft_config, python: what SpecForge's own exporter needs; found beside its checkpoints.

    Raises:
        ConfigurationError: the engine cannot compute this head or take its layers.
        DatasetError: no checkpoint, a damaged one, or `folder` is not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DatasetError(path=str(folder), problem="not empty; choose another folder")
    source = find_checkpoint(Path(checkpoint))
    with tempfile.TemporaryDirectory(prefix="quantroute-export-") as work:
        if (source / _SPECFORGE_STATE).exists():
            config_path = _draft_config(source, draft_config)
            made = _run_specforge(source, config_path, Path(work) / "made", python)
            head, target = Head.from_specforge(made), target or _specforge_target(source)
        else:
            head = _read_head(source)
            target = target or head.target
        return _write(head, folder, source=source, engine=engine, target=target, like=like)


def _write(
    head: Head, folder: Path, *, source: Path, engine: Engine, target: str | None, like: str | None
) -> DrafterExport:
    if target is None:
        raise ConfigurationError("the checkpoint does not name its target; give --target")
    facts = _target_facts(target)
    family = target_family(like or facts["architecture"]) if engine == "sglang" else "plus one"
    ids = layers_to_write(head.layers, engine=engine, family=family)
    notes = _fits(head, engine)
    tensors = _named_for(head, engine)
    config = _config(head, engine, ids, target)
    write_tensors(folder / "model.safetensors", tensors)
    atomic_write(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    _compare(folder, tensors)
    read = layers_as_read(
        read_config(folder), engine=engine, family=family, num_layers=facts["num_layers"]
    )
    if read != head.layers:
        raise DatasetError(
            path=str(folder), problem=f"{engine} would take layers {read}, not {head.layers}"
        )
    return DrafterExport(
        folder=folder,
        source=source,
        engine=engine,
        layer_ids=ids,
        layers=head.layers,
        serve=_serve(head, folder, engine, target),
        notes=notes,
    )


# -- where it comes from --------------------------------------------------------------------------


def find_checkpoint(given: Path) -> Path:
    """The checkpoint itself: of a training's folder, the best one, else the latest.

    Raises:
        DatasetError: there is none.
    """
    roots = [given, given / "checkpoints"]
    for root in roots:
        if (root / "config.json").exists() or (root / _SPECFORGE_STATE).exists():
            return root.resolve()
    for root in roots:
        for name in ("checkpoint_best", "drafter-best", "drafter-latest"):
            if (root / name).exists():
                return (root / name).resolve()
        if (latest := latest_checkpoint(root)) is not None:
            return latest.resolve()
    raise DatasetError(path=str(given), problem="no checkpoint of speculators or SpecForge in it")


def _read_head(source: Path) -> Head:
    config = read_config(source)
    if config.get("speculators_model_type") == "eagle3":
        return Head.from_speculators(source)
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or ()):
        return Head.from_specforge(source)
    raise ConfigurationError(f"{source}/config.json is not that of an EAGLE-3 head")


def _beside(source: Path, name: str) -> dict[str, Any]:
    """What `quantroute train` wrote beside the checkpoints; empty if it was not us."""
    path = source.parent.parent / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _specforge_target(source: Path) -> str | None:
    """SpecForge itself may have been shown a folder of ours instead of the target's."""
    told = _beside(source, "specforge.json").get("model", {}).get("target_model_path")
    found: str | None = _beside(source, "training.json").get("target", told)
    return found


def _draft_config(source: Path, given: Path | str | None) -> Path:
    beside = source.parent.parent / "draft_config.json"
    path = Path(given) if given is not None else beside
    if given is None and not beside.exists():
        named = _beside(source, "specforge.json").get("model", {}).get("draft_model_config")
        path = Path(named) if named else beside
    if not path.exists():
        raise ConfigurationError(
            f"SpecForge's exporter needs the draft config ({path} does not exist); "
            "give --draft-config"
        )
    return path


def _run_specforge(source: Path, draft_config: Path, made: Path, python: str) -> Path:
    """SpecForge's own exporter, in a process of its own."""
    command = [
        *(python, "-m", "specforge.cli", "export", "--to", "sglang"),
        *("--checkpoint", str(source), "--draft-config", str(draft_config)),
        *("--output-dir", str(made)),
    ]
    ended = subprocess.run(  # noqa: S603 - the command is ours, the interpreter the user's
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},  # it imports its kernels even without a GPU
    )
    if ended.returncode != 0:
        said = "\n  ".join(ended.stderr.splitlines()[-6:])
        raise ConfigurationError(f"{shlex.join(command)} failed:\n  {said}")
    return made


def _target_facts(target: str) -> dict[str, Any]:
    path = Path(target)
    if not (path / "config.json").exists():
        raise ConfigurationError(
            f"the target's folder is needed to count its layers, and {target} is none; "
            "give --target"
        )
    whole = read_config(path)
    text = whole.get("text_config") or whole
    return {
        "architecture": (whole.get("architectures") or ["?"])[0],
        "num_layers": int(text["num_hidden_layers"]),
    }


# -- what is written ------------------------------------------------------------------------------


def _fits(head: Head, engine: Engine) -> tuple[str, ...]:
    """What is worth knowing; an error where the engine would compute another head.

    Raises:
        ConfigurationError: the engine has no such wiring, and would not say so.
    """
    if engine == "vllm":
        return ()
    if head.flags["norm_before_residual"]:
        raise ConfigurationError(
            "SGLang (0.5.23) knows no norm_before_residual and would silently compute another "
            "head; train with head = 'eagle3', or serve this one with vLLM"
        )
    if int(head.decoder["num_hidden_layers"]) != 1:
        raise ConfigurationError("for SGLang a head of one layer can be exported")
    window = _window(head)
    if window is None:
        return ()
    return (f"the head looks back {window} tokens; SGLang is told by a server option",)


def _window(head: Head) -> int | None:
    kinds = head.decoder.get("layer_types") or ()
    return head.decoder.get("sliding_window") if "sliding_attention" in kinds else None


def _named_for(head: Head, engine: Engine) -> dict[str, Tensor]:
    """The weights under the names that every version of the engine knows."""
    if engine == "vllm":
        return dict(head.tensors)
    keep = bool(head.config.get("embed_requires_grad"))
    if keep:
        raise ConfigurationError("SGLang shares the target's embedding; this head trained its own")
    return {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in head.tensors.items()
        if name != "embed_tokens.weight"
    }


def _config(head: Head, engine: Engine, ids: tuple[int, ...], target: str) -> dict[str, Any]:
    if engine == "vllm" and "speculators_model_type" in head.config:
        config = dict(head.config) | {"eagle_aux_hidden_state_layer_ids": list(ids)}
        del target
        config.pop("auto_map", None)  # points at code that is not in the folder
        return config
    config = dict(head.decoder) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "use_aux_hidden_state": True,
            "norm_before_fc": head.flags["norm_before_fc"],
        },
        **{name: head.flags[name] for name in FLAGS},
    }
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    if engine == "vllm":
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
    return config | _rope(head.decoder)


def _rope(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings of the rotary settings: older engines know only the first."""
    rope = decoder.get("rope_parameters")
    if not rope:
        return {}
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", 10_000.0)}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {name: rope[name] for name in rope if name != "rope_theta"}
    return found


def _compare(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read back: the same names, shapes and dtypes.

    Raises:
        DatasetError: they are not.
    """
    found = {name: (item.dtype, item.shape) for name, item in read_tensors(folder).items()}
    wanted = {name: (item.dtype, item.shape) for name, item in tensors.items()}
    if found != wanted:
        names = sorted(name for name in found | wanted if found.get(name) != wanted.get(name))
        raise DatasetError(path=str(folder), problem=f"not as written: {', '.join(names)}")


def _serve(head: Head, folder: Path, engine: Engine, target: str) -> str:
    """The command that serves the target with this drafter."""
    if engine == "vllm":
        draft = {"model": str(folder), "method": "eagle3", "num_speculative_tokens": 3}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(draft)])
    command = [
        *("python", "-m", "sglang.launch_server", "--model-path", target),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ]
    window = _window(head)
    if window is not None:
        command += ["--speculative-draft-window-size", str(window)]
    return shlex.join(command)
