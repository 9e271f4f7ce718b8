"""safetensors files by their bytes: names, shapes, copies. Needs neither torch nor numpy.

The format (huggingface/safetensors, README): eight bytes of length, a JSON header with dtype, shape
and offsets per name, then the data.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.errors import DatasetError
from quantroute.storage import atomic_file

__all__ = ["Tensor", "read_tensors", "write_tensors"]

_COPY_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where a tensor lies: `size` bytes from `start` of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def numbers(self) -> list[int]:
        """The values of a tensor of 64-bit integers or of truth values.

        Raises:
            DatasetError: it is of another dtype.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        if self.dtype == "BOOL":
            return list(content)
        if self.dtype != "I64":
            raise DatasetError(
                path=str(self.path), problem=f"integers are wanted where {self.dtype} is"
            )
        values = array("q", content)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files, by name.

    Raises:
        DatasetError: there is no such file, or one is damaged.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= _read(path)
    if not found:
        raise DatasetError(path=str(folder), problem="no *.safetensors with weights in it")
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of these tensors under these names, whole or not at all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        ends = [offset, offset + tensor.size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of eight
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                left = tensor.size
                while left:
                    chunk = source.read(min(left, _COPY_BYTES))
                    if not chunk:
                        raise DatasetError(path=str(tensor.path), problem="ends too early")
                    file.write(chunk)
                    left -= len(chunk)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        found = {
            name: Tensor(
                path=path,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + length + entry["data_offsets"][0],
                size=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if max((item.start + item.size for item in found.values()), default=8 + length) != size:
            raise ValueError("data are missing or left over")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(path=str(path), problem=f"not whole: {error}") from error
    return found
