"""Files of rows as every stage meets them: JSONL or Parquet, with a manifest beside the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quantroute.domain import canonical_json
from quantroute.errors import ConfigurationError, DatasetError

__all__ = [
    "LOOSE_FIELDS",
    "RowsContent",
    "content_sha256",
    "manifest_path",
    "pyarrow",
    "read_manifest",
    "read_rows",
]

#: Objects of a turn without a fixed form; they travel through Parquet as JSON text.
LOOSE_FIELDS: Final = ("precision", "sampling")

_CONTENT: Final = ("key", "dataset", "rollout", "model", "messages")
_CONTENT_OF_TURN: Final = (
    "row_class",
    "finish_reason",
    "mode",
    "sampling",
    "output_tokens",
    "reasoning_tokens",
)


class RowsContent:
    """SHA-256 over what is made of rows later, in their order.

    That is the texts, and what decides whether and how they are learnt. Left out is what differs
    between two runs that were given the same answers: who gave them, at which price, after how many
    attempts, when, and the ids of all that. Rows of another form, such as token ids, count whole.
    """

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def add(self, row: Mapping[str, Any]) -> None:
        """The next row.

        Raises:
            TypeError, AttributeError: it is none.
        """
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is an object, not {row!r:.40}")
        content = dict(row)
        if "turns" in row:
            turns = [{name: turn.get(name) for name in _CONTENT_OF_TURN} for turn in row["turns"]]
            content = {name: row.get(name) for name in _CONTENT} | {"turns": turns}
        self._hasher.update(canonical_json(content).encode() + b"\n")

    def sha256(self) -> str:
        """Of the rows so far."""
        return self._hasher.hexdigest()


def content_sha256(path: Path | str) -> str:
    """`RowsContent` of a file: from its manifest, where that is the file's own, else by reading it.

    Raises:
        DatasetError: no such file, it is not one of rows, or not the one its manifest speaks of.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path) or {}
        if isinstance(found := manifest.get("content_sha256"), str):
            return found
        content = RowsContent()
        for row in read_rows(path):
            content.add(row)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DatasetError(path=str(path), problem=f"rows cannot be read: {error!r}") from error
    return content.sha256()


def read_rows(path: Path | str) -> Iterator[dict[str, Any]]:
    """The rows of an exported file, JSONL or Parquet (by its ending), as equal dictionaries.

    Raises:
        DatasetError: a line that is not a row.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                row = json.loads(raw)
            except ValueError as error:
                raise DatasetError(
                    path=str(path), line=number, problem=f"not a row ({error}); export again"
                ) from None
            yield row


def manifest_path(path: Path | str) -> Path:
    """Where the manifest of a file of rows lies."""
    path = Path(path)
    return path.with_name(f"{path.name}.manifest.json")


def read_manifest(path: Path | str) -> Mapping[str, Any] | None:
    """The manifest of a file of rows, checked against the file; None if there is none.

    Raises:
        DatasetError: the manifest cannot be read, or belongs to other content.
    """
    path, beside = Path(path), manifest_path(path)
    try:
        manifest = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DatasetError(path=str(beside), problem=f"cannot be read: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), str):
        raise DatasetError(path=str(beside), problem="is no manifest: it has no sha256")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != manifest["sha256"]:
        raise DatasetError(
            path=str(path),
            problem=f"is not the file its manifest speaks of (SHA-256 {found[:12]} instead of "
            f"{manifest['sha256'][:12]}); export again",
        )
    return manifest


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    _, parquet = pyarrow()
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                yield _from_columns(row)


def _from_columns(row: dict[str, Any]) -> dict[str, Any]:
    for turn in row["turns"]:
        for name in LOOSE_FIELDS:
            turn[name] = json.loads(turn[name])
    for message in row["messages"]:
        if message["role"] != "assistant":  # the column is there for all, the field is not
            del message["reasoning"]
    return row | {"metadata": json.loads(row["metadata"])}


def pyarrow() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`.

    Raises:
        ConfigurationError: not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'quantroute[parquet]', or export as JSONL"
        ) from None
    return pyarrow, pyarrow.parquet
