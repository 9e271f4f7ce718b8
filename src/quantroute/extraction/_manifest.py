"""What stands beside the shards: the plan, one marker per committed shard, and the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.errors import DatasetError
from quantroute.extraction._norm import FinalNorm
from quantroute.extraction._plan import Plan, StateLayout
from quantroute.extraction._records import LayerConvention, LayerIds
from quantroute.extraction._target import Target
from quantroute.storage import atomic_write

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PRE_FINAL_NORM",
    "Folder",
    "ShardRecord",
    "describe",
    "differing_names",
    "manifest_of",
    "read_json",
    "write_json",
]

FORMAT: Final = "quantroute-hidden-states"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
PRE_FINAL_NORM: Final = "pre_final_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A committed shard. `lost` holds key, reason and detail of examples that gave no states."""

    index: int
    keys_sha256: str
    sha256: str
    size_bytes: int
    rows_sha256: str
    examples: int
    tokens: int
    loss_tokens: int
    lost: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ShardRecord:
        """From JSON values.

        Raises:
            TypeError, KeyError: not a marker.
        """
        return cls(**{**facts, "lost": tuple(facts["lost"])})


@dataclass(frozen=True, slots=True)
class Folder:
    """The store's folder and the names in it."""

    path: Path

    @property
    def manifest(self) -> Path:
        """Written last, when every shard stands."""
        return self.path / MANIFEST

    @property
    def plan(self) -> Path:
        """What the folder is to hold; written first."""
        return self.path / "plan.json"

    @property
    def norm(self) -> Path:
        """The target's final norm."""
        return self.path / "final_norm.safetensors"

    def shard(self, index: int) -> Path:
        """Tokens and states."""
        return self.path / "shards" / f"{index:06}.safetensors"

    def rows(self, index: int) -> Path:
        """One line per example: key, place, where it came from."""
        return self.path / "shards" / f"{index:06}.jsonl"

    def marker(self, index: int) -> Path:
        """Stands only if the other two do."""
        return self.path / "shards" / f"{index:06}.json"

    def committed(self, index: int, keys_sha256: str) -> ShardRecord | None:
        """The shard's record, None if it has to be made: no marker, or its files are not whole.

        Looks at sizes; `StateStore.verify` looks at every byte.
        """
        try:
            record = ShardRecord.of(read_json(self.marker(index)))
            is_whole = self.shard(index).stat().st_size == record.size_bytes
            rows = self.rows(index).read_bytes()
        except (DatasetError, OSError, TypeError, KeyError):
            return None
        is_ours = record.keys_sha256 == keys_sha256 and record.index == index
        is_whole = is_whole and hashlib.sha256(rows).hexdigest() == record.rows_sha256
        return record if is_ours and is_whole else None


def describe(
    target: Target, layers: LayerIds, layout: StateLayout, *, source: Mapping[str, Any]
) -> dict[str, Any]:
    """What the states are, as JSON values: enough to read them without asking anybody."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": {
            "architecture": target.architecture,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "config_sha256": target.config_sha256(),
            "tokenizer_sha256": target.tokenizer_sha256(),
            "template_sha256": target.template_sha256(),
        },
        "layers": {
            "convention": LayerConvention.BOUNDARY.value,
            "ids": list(layers.boundary),
            "output_ids": list(layers.ids(LayerConvention.OUTPUT)),
        },
        "last_state": {"norm": PRE_FINAL_NORM, "boundary_id": target.num_layers},
        "states": {
            "shape": ["tokens", layout.slots, layout.hidden_size],
            "dtype": layout.dtype,
            "stored_as": layout.stored_as,
            "scales": "float32 per token and slot: state = stored x scale" if layout.fp8 else None,
        },
        "source": dict(source),
    }


def differing_names(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Names of what is not the same: `plan.tokens`, `source.batch_tokens`."""
    for name in sorted({*one, *other}):
        ours, theirs = one.get(name), other.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from (f"{name}.{inner}" for inner in differing_names(ours, theirs))
        elif ours != theirs:
            yield name


def manifest_of(
    description: Mapping[str, Any],
    plan: Plan,
    records: Sequence[ShardRecord],
    norm: FinalNorm,
    folder: Folder,
) -> dict[str, Any]:
    """The whole manifest. Equal for equal files: no times, no names of machines."""
    return {
        **description,
        "final_norm": {
            "file": folder.norm.name,
            "kind": norm.kind,
            "eps": norm.eps,
            "sha256": hashlib.sha256(folder.norm.read_bytes()).hexdigest(),
        },
        "totals": {
            "examples": sum(record.examples for record in records),
            "tokens": sum(record.tokens for record in records),
            "loss_tokens": sum(record.loss_tokens for record in records),
            "lost": sum(len(record.lost) for record in records),
            "left_out": dict(sorted(plan.left_out.items())),
            "size_bytes": sum(record.size_bytes for record in records),
        },
        "shards": [
            {
                "file": str(folder.shard(record.index).relative_to(folder.path)),
                "rows": str(folder.rows(record.index).relative_to(folder.path)),
                **asdict(record),
            }
            for record in records
        ],
    }


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Readable, in a stable order, whole or absent."""
    atomic_write(path, json.dumps(facts, indent=1, sort_keys=True).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """An object.

    Raises:
        DatasetError: missing, torn, or not an object.
    """
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise DatasetError(path=str(path), problem="not a JSON object")
    return facts
