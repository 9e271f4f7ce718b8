"""speculators' checkpoints: which are whole.

The trainer writes them in place, one file after the other. A kill in the middle leaves a folder
with a number that its next start would take for the latest state and fail on.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

__all__ = ["is_whole_safetensors", "latest_checkpoint", "set_torn_aside"]


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


def is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its own header says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return False
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return path.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
    except (OSError, ValueError):
        return False
    # torch.save writes a zip whose directory comes last: a torn one has none.
    return is_whole_safetensors(folder / "model.safetensors") and zipfile.is_zipfile(
        folder / "optimizer_state_dict.pt"
    )


def _free_name(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path
