"""Writing safetensors files: whole or absent, hashed on the way, the same bytes every time.

Not through the package's own writer: that one puts metadata in a random order, and neither hashes
nor takes an open file; to read a gigabyte again only to hash it would halve the speed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quantroute._extra import need
from quantroute.storage import atomic_file

if TYPE_CHECKING:
    import torch

__all__ = ["Written", "write_tensors"]

_CHUNK_BYTES: Final = 16 * 2**20
_DTYPE_NAMES: Final = {
    "torch.int64": "I64",
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.uint8": "U8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file on the disk."""

    sha256: str
    size_bytes: int


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Written:
    """Write a file; tensors of wide dtypes first, so that each is aligned.

    Raises:
        OSError: no space, no permission; nothing is left behind.
    """
    header = _header(tensors, metadata)
    pieces = [memoryview(header)]
    pieces += [memoryview(_raw(tensor)) for tensor in tensors.values()]
    hasher = hashlib.sha256()

    def digest() -> None:
        for piece in pieces:
            hasher.update(piece)

    # Both give up the interpreter's lock, so they run beside each other.
    with ThreadPoolExecutor(1, thread_name_prefix="sha256") as pool:
        hashed = pool.submit(digest)
        with atomic_file(path) as file:
            for piece in pieces:
                for chunk in _chunks(piece):
                    file.write(chunk)
        hashed.result()
    return Written(sha256=hasher.hexdigest(), size_bytes=sum(map(len, pieces)))


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPE_NAMES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: torch.Tensor) -> Any:
    torch = need("torch")
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, dtype=np.uint8)


def _chunks(piece: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(piece), _CHUNK_BYTES):
        yield piece[start : start + _CHUNK_BYTES]
