"""The training data as `quantroute extract` left it: a folder and what its manifest says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from quantroute.errors import DatasetError

__all__ = ["TrainingData", "boundary_ids"]

MANIFEST: Final = "manifest.json"
_KIND: Final = "quantroute trainer data"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """A finished folder of one trainer's format.

    `layers` are auxiliary layers in boundary convention (id k: the state that enters layer k).
    `draft_vocab_size` is None where the drafter keeps the target's whole vocabulary. `sha256` is
    of the manifest.
    """

    folder: Path
    trainer: str
    model: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: tuple[int, ...]
    dtype: str
    draft_vocab_size: int | None
    coverage: float | None
    examples: int
    tokens: int
    longest_tokens: int
    sha256: str

    @classmethod
    def read(cls, folder: Path | str) -> Self:
        """From the folder's manifest.

        Raises:
            DatasetError: no manifest, an unfinished one, or one this version cannot read.
        """
        path = Path(folder) / MANIFEST
        content = _load(path)
        try:
            return cls(**_fields(path, content))
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(path=str(path), problem=f"not complete: {error!r}") from error

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The same layers in output convention (id k: the state that leaves layer k)."""
        return tuple(layer - 1 for layer in self.layers)


def boundary_ids(ids: list[int], convention: str) -> tuple[int, ...]:
    """Layer ids of either convention as boundary ids.

    >>> boundary_ids([1, 29, 57], "output")
    (2, 30, 58)
    """
    shift = {"boundary": 0, "output": 1}[convention]
    return tuple(layer + shift for layer in ids)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(
            path=str(path.parent),
            problem=f"no {MANIFEST}; write the training data with `quantroute extract` first",
        ) from None
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    if content.get("kind") != _KIND or content.get("version") != _VERSION:
        raise DatasetError(path=str(path), problem="not a manifest that this version can read")
    if content.get("state") != "complete":
        raise DatasetError(
            path=str(path.parent),
            problem="writing was not finished; the same `quantroute extract` goes on from there",
        )
    return content


def _fields(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    target, layers = content["target"], content["layers"]
    return {
        "folder": path.parent,
        "trainer": content["trainer"],
        "model": target["model"],
        "num_layers": target["num_layers"],
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "layers": boundary_ids(layers["ids"], layers["convention"]),
        "dtype": content["dtype"],
        "draft_vocab_size": content["draft_vocab_size"],
        "coverage": content["coverage"],
        "examples": content["examples"],
        "tokens": content["tokens"],
        "longest_tokens": content["longest_tokens"],
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
