"""Where SpecForge finds the target's embedding and head: two weights, by name, in an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantroute.drafter._tensors import read_tensors
from quantroute.errors import ConfigurationError

__all__ = ["SpecForgeTarget", "specforge_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecForgeTarget:
    """A folder that SpecForge can read, and the names of the two weights in it.

    `files` have to be written first. Where embedding and head are tied, both are one weight.
    """

    folder: Path
    embedding: str
    head: str
    files: Mapping[Path, str] = field(default_factory=dict)


def specforge_target(target: Path, beside: Path) -> SpecForgeTarget:
    """The target's folder, or one under `beside` with the index that SpecForge insists on.

    A target of one file has none. The one made here points at that file; no weight is copied.

    Raises:
        ConfigurationError: no folder of a model, or the two weights are not in it.
    """
    if not (target / "config.json").exists():
        raise ConfigurationError(
            f"SpecForge reads embedding and head from the target's folder, but {target} is none; "
            "set train.target to it"
        )
    found = sorted(target.glob("*.index.json"))
    if found:
        return _named(target, _weight_map(found[0]), target)
    if not list(target.glob("*.safetensors")):
        raise ConfigurationError(
            f"{target}: SpecForge looks weights up in *.index.json, and there are neither it nor "
            "*.safetensors to make it from; save the target with save_pretrained"
        )
    names = {name: str(item.path.resolve()) for name, item in read_tensors(target).items()}
    files = {
        beside / "config.json": (target / "config.json").read_text(encoding="utf-8"),
        beside / "model.safetensors.index.json": json.dumps({"weight_map": names}, indent=1) + "\n",
    }
    return _named(beside, names, target, files)


def _weight_map(index: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{index} is no index of weights: {error!r}") from error
    return found


def _named(
    folder: Path,
    names: Iterable[str],
    target: Path,
    files: Mapping[Path, str] | None = None,
) -> SpecForgeTarget:
    embedding = _ending(names, "embed_tokens.weight", target)
    if embedding is None:
        raise ConfigurationError(f"{target}: no embed_tokens.weight among its weights")
    head = _ending(names, "lm_head.weight", target) or embedding
    return SpecForgeTarget(folder=folder, embedding=embedding, head=head, files=files or {})


def _ending(names: Iterable[str], ending: str, target: Path) -> str | None:
    """The language model's weight; multimodal targets have a prefix before it."""
    found = [name for name in names if name.endswith(ending) and "vision" not in name]
    if len(found) > 1:
        raise ConfigurationError(f"{target}: several {ending}: {', '.join(found)}")
    return found[0] if found else None
