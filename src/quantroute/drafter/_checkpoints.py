"""speculators' checkpoints: which are whole.

The trainer writes them in place, one file after the other. A kill in the middle leaves a folder
with a number that its next start would take for the latest state and fail on.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from quantroute.drafter._tensors import read_tensors
from quantroute.errors import DatasetError

__all__ = ["latest_checkpoint", "set_torn_aside", "steps_done"]


def set_torn_aside(checkpoints: Path) -> tuple[Path, ...]:
    """Rename numbered folders that are not whole to `torn-N`; their new names."""
    moved = []
    for folder in _numbered(checkpoints):
        if not _is_whole(folder):
            aside = _free_name(checkpoints, f"torn-{folder.name}")
            folder.rename(aside)
            moved.append(aside)
    return tuple(moved)


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The folder with the highest number, as the trainer picks it; None if there is none."""
    return max(_numbered(checkpoints), key=lambda folder: int(folder.name), default=None)


def steps_done(checkpoints: Path) -> int:
    """Optimizer steps behind the latest checkpoint; 0 if there is none or it does not say."""
    latest = latest_checkpoint(checkpoints)
    if latest is None:
        return 0
    try:
        state = json.loads((latest / "training_state.json").read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _numbered(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return sorted(
        path
        for path in checkpoints.iterdir()
        if path.name.isdigit() and path.is_dir() and not path.is_symlink()
    )


def _is_whole(folder: Path) -> bool:
    try:
        json.loads((folder / "training_state.json").read_text(encoding="utf-8"))
        read_tensors(folder)
    except (OSError, ValueError, DatasetError):
        return False
    # torch.save writes a zip whose directory comes last: a torn one has none.
    return zipfile.is_zipfile(folder / "optimizer_state_dict.pt")


def _free_name(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path
