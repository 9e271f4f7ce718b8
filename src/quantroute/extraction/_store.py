"""Reading a folder of hidden states: in order, by key, and every byte of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from quantroute._extra import need
from quantroute.errors import DatasetError
from quantroute.extraction._fp8 import from_fp8
from quantroute.extraction._manifest import FORMAT, VERSION, Folder, ShardRecord, read_json
from quantroute.extraction._norm import FinalNorm
from quantroute.extraction._records import Example, LayerIds, States

__all__ = ["StateStore"]

_HASH_CHUNK_BYTES = 8 * 2**20
_DAMAGED = "delete it together with its .json marker and run the extraction again"


@dataclass(slots=True, kw_only=True)
class StateStore:
    """A complete store. Files are mapped, not loaded: only what is asked for is read.

    >>> store = StateStore.open("states")            # doctest: +SKIP
    >>> for states in store: ...                     # doctest: +SKIP
    """

    folder: Folder
    manifest: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    _places: dict[str, tuple[int, int]] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read the manifest.

        Raises:
            DatasetError: no complete store is there, or of another form or version.
        """
        folder = Folder(Path(path))
        if not folder.manifest.exists() and folder.plan.exists():
            raise DatasetError(
                path=str(path),
                problem="extraction is not finished (no manifest.json); run the same command again",
            )
        manifest = read_json(folder.manifest)
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise DatasetError(path=str(folder.manifest), problem=f"not {FORMAT} version {VERSION}")
        try:
            shards = tuple(
                ShardRecord.of({name: item[name] for name in ShardRecord.__slots__})
                for item in manifest["shards"]
            )
        except (KeyError, TypeError) as error:
            raise DatasetError(path=str(folder.manifest), problem=f"no shards: {error}") from error
        return cls(folder=folder, manifest=manifest, shards=shards)

    def __len__(self) -> int:
        """Number of examples."""
        return sum(shard.examples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Of all tokens, masks and states and of the final norm, by the manifest's checksums."""
        parts = [record.sha256 for record in self.shards]
        parts.append(self.manifest["final_norm"]["sha256"])
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def layers(self) -> LayerIds:
        """The auxiliary layers; after them comes the last state, before the final norm."""
        return LayerIds(tuple(self.manifest["layers"]["ids"]))

    @property
    def dtype(self) -> str:
        """Of the states as they are given, also where they are stored as float8."""
        return str(self.manifest["states"]["dtype"])

    def final_norm(self) -> FinalNorm:
        """What leads from the last state to what the head sees."""
        return FinalNorm.load(self.folder.norm)

    def __iter__(self) -> Iterator[States]:
        """All examples in the order of the shards; one example in memory at a time."""
        for record in self.shards:
            yield from self._of_shard(record)

    def keys(self) -> Iterator[str]:
        """Keys of the examples, in the same order."""
        return iter(self._index())

    def __getitem__(self, key: str) -> States:
        """One example, by `Example.key`.

        Raises:
            KeyError: not in the store.
        """
        number, row = self._index()[key]
        (states,) = self._of_shard(self.shards[number], row)
        return states

    def verify(self) -> None:
        """Read every byte.

        Raises:
            DatasetError: the first file that is missing, torn or changed.
        """
        for record in self.shards:
            path, rows = self.folder.shard(record.index), self.folder.rows(record.index)
            for file, wanted in ((path, record.sha256), (rows, record.rows_sha256)):
                if _sha256(file) != wanted:
                    raise DatasetError(
                        path=str(file),
                        problem=f"differs from its checksum in the manifest; {_DAMAGED}",
                    )
        norm = self.manifest["final_norm"]["sha256"]
        if _sha256(self.folder.norm) != norm:
            raise DatasetError(path=str(self.folder.norm), problem="differs from its checksum")

    def _index(self) -> dict[str, tuple[int, int]]:
        if self._places is None:
            self._places = {
                facts["key"]: (number, row)
                for number, record in enumerate(self.shards)
                for row, facts in enumerate(self._rows(record))
            }
        return self._places

    def _rows(self, record: ShardRecord) -> list[dict[str, Any]]:
        path = self.folder.rows(record.index)
        try:
            with path.open(encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except (OSError, ValueError) as error:
            raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error

    def _of_shard(self, record: ShardRecord, row: int | None = None) -> Iterator[States]:
        safetensors = need("safetensors")
        path = self.folder.shard(record.index)
        facts = self._rows(record)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                offsets = file.get_tensor("offsets").tolist()
                if len(offsets) != len(facts) + 1:
                    raise DatasetError(path=str(path), problem="rows and offsets disagree")
                for number in range(len(facts)) if row is None else (row,):
                    span = slice(offsets[number], offsets[number + 1])
                    yield self._states(file, span, facts[number], record)
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error

    def _states(self, file: Any, span: slice, facts: dict[str, Any], record: ShardRecord) -> States:
        hidden = file.get_slice("states")[span]
        if self.manifest["states"]["scales"] is not None:
            hidden = from_fp8(hidden, file.get_slice("states_scales")[span], self.dtype)
        example = Example(
            input_ids=file.get_slice("input_ids")[span].numpy(),
            loss_mask=file.get_slice("loss_mask")[span].numpy().astype(np.bool_),
            provenance=facts["provenance"],
        )
        if example.key != facts["key"]:
            raise DatasetError(
                path=str(self.folder.rows(record.index)),
                problem=f"example {facts['key'][:16]} has other tokens in its shard: {_DAMAGED}",
            )
        return States(example=example, hidden=hidden)


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            _feed(file, hasher)
    except OSError as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    return hasher.hexdigest()


def _feed(file: IO[bytes], hasher: Any) -> None:
    while chunk := file.read(_HASH_CHUNK_BYTES):
        hasher.update(chunk)
