"""What a file says apart from where, when and by whom it was made: that is what stages compare.

Equal contents mean that a later stage would do the same work. Plain files stand for themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantroute._rowfile import content_sha256
from quantroute.domain import canonical_json
from quantroute.errors import DatasetError

__all__ = ["Content", "Files", "config_of_drafter", "rows", "states", "training_data"]


@dataclass(frozen=True, slots=True)
class Content:
    """A file, and how its hash is found."""

    path: Path
    sha256: Callable[[Path], str]


Files = Mapping[str, Path | Content]


def rows(path: Path) -> Content:
    """Texts and what decides how they are learnt, not who gave them, for how much, and when."""
    return Content(path, content_sha256)


def states(folder: Path) -> Content:
    """The store's tokens and states. The lines beside them tell where rows came from."""
    return Content(folder / "manifest.json", _states)


def training_data(folder: Path) -> Content:
    """The trainer's data, wherever the target's folder lies."""
    return Content(folder / "manifest.json", _training_data)


def config_of_drafter(folder: Path) -> Content:
    """What an engine reads, wherever the target's folder lies."""
    return Content(folder / "config.json", _config)


def _states(path: Path) -> str:
    facts = _load(path)
    for shard in facts.get("shards", ()):
        shard.pop("rows_sha256", None)
    return _hash(facts)


def _training_data(path: Path) -> str:
    facts = _load(path)
    facts.get("target", {}).pop("model", None)
    return _hash(facts)


def _config(path: Path) -> str:
    facts = _load(path)
    facts.get("speculators_config", {}).get("verifier", {}).pop("name_or_path", None)
    return _hash(facts)


def _load(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DatasetError(path=str(path), problem="does not exist") from None
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise DatasetError(path=str(path), problem="not a JSON object")
    return facts


def _hash(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()
