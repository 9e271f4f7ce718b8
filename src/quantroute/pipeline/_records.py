"""What a finished stage leaves behind: the hashes of what it read and of what it made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quantroute.domain import canonical_json
from quantroute.errors import DatasetError
from quantroute.pipeline._contents import Content, Files
from quantroute.storage import atomic_write

__all__ = ["StageRecord", "file_hashes", "read_begun", "write_begun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """`inputs` and `outputs` map a name, not a place, to a SHA-256: folders may be moved."""

    stage: str
    settings: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "stage": self.stage,
            "settings": self.settings,
            "inputs": dict(self.inputs),
            "outputs": dict(self.outputs),
        }

    @property
    def sha256(self) -> str:
        """Of the record: equal records mean equal work on equal files."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()

    def write(self, home: Path) -> None:
        """Put it down, whole or not at all."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        atomic_write(home / f"{self.stage}.json", text.encode())

    @classmethod
    def read(cls, home: Path, stage: str) -> Self | None:
        """The stage's record, None if it never finished.

        Raises:
            DatasetError: it cannot be read.
        """
        path = home / f"{stage}.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise DatasetError(
                path=str(path), problem=f"cannot be read ({error}); remove it to redo the stage"
            ) from error


def file_hashes(files: Files) -> dict[str, str]:
    """SHA-256 by name: of a file's bytes, or of its content where that is told apart.

    Raises:
        DatasetError: a file is missing or not what it should be.
    """
    return {name: _sha256(name, file) for name, file in files.items()}


def _sha256(name: str, file: Path | Content) -> str:
    path = file if isinstance(file, Path) else file.path
    try:
        if not isinstance(file, Path) and path.exists():
            return file.sha256(path)
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(
            path=str(path), problem=f"is wanted as {name}: {error.strerror}"
        ) from error


def write_begun(home: Path, stage: str, identity: str) -> None:
    """Note what a stage is about to work on, so that half-made files are known again."""
    atomic_write(home / f"{stage}.begun", identity.encode())


def read_begun(home: Path, stage: str) -> str | None:
    """What was noted, None if the stage never began."""
    try:
        return (home / f"{stage}.begun").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
