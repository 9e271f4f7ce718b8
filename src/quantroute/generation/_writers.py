"""Files of rows: JSONL and Parquet, written a batch at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import IO, Any, Final, Protocol

from quantroute._rowfile import LOOSE_FIELDS, pyarrow
from quantroute.errors import ConfigurationError
from quantroute.generation._rowdata import encode_line

__all__ = ["HashingFile", "JsonlWriter", "ParquetWriter", "RowWriter"]

_ROWS_PER_GROUP: Final = 1_000
_BYTES_PER_GROUP: Final = 64 * 2**20


class RowWriter(Protocol):
    """Takes rows one by one; `close` completes the file, and is needed after a failure too."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row."""

    def close(self) -> None:
        """Write what is still held back."""


class HashingFile:
    """A file that knows the SHA-256 of what went through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._written_bytes = 0
        self.closed = False

    def write(self, raw: bytes) -> int:
        """Write and remember."""
        self._hash.update(raw)
        self._written_bytes += len(raw)
        return self._file.write(raw)

    def flush(self) -> None:
        """Pass on."""
        self._file.flush()

    def close(self) -> None:
        """Nothing: the file belongs to whoever opened it."""

    def tell(self) -> int:
        """Bytes so far."""
        return self._written_bytes

    def sha256(self) -> str:
        """Hex digest of all bytes so far."""
        return self._hash.hexdigest()


class JsonlWriter:
    """One JSON object per line."""

    def __init__(self, file: HashingFile) -> None:
        self._file = file

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(encode_line(row))

    def close(self) -> None:
        """Nothing is held back."""


class ParquetWriter:
    """Parquet with zstd, in groups of at most 1,000 rows or 64 MiB of text.

    `arrow_bytes` is what the rows take up once they are read.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """

    def __init__(self, file: HashingFile) -> None:
        arrow, parquet = pyarrow()
        self._arrow = arrow
        self._schema = _schema(arrow)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._held: list[dict[str, Any]] = []
        self._held_bytes = 0
        self.arrow_bytes = 0

    def write(self, row: Mapping[str, Any]) -> None:
        self._held.append(_to_columns(row))
        self._held_bytes += sum(
            len(message["content"]) + len(message.get("reasoning") or "")
            for message in row["messages"]
        )
        if len(self._held) >= _ROWS_PER_GROUP or self._held_bytes >= _BYTES_PER_GROUP:
            self._flush()

    def close(self) -> None:
        try:
            if self._held:
                self._flush()
        finally:  # harmless if it was closed before
            self._writer.close()

    def _flush(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        try:
            table = self._arrow.Table.from_pylist(held, schema=self._schema)
        except UnicodeEncodeError:
            raise ConfigurationError(
                "an answer holds lone surrogates, which Parquet cannot store; export as JSONL"
            ) from None
        self.arrow_bytes += table.nbytes
        self._writer.write_table(table)


def _to_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = [turn | {name: _dump(turn[name]) for name in LOOSE_FIELDS} for turn in row["turns"]]
    return {**row, "turns": turns, "metadata": _dump(row["metadata"])}


def _dump(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _schema(arrow: Any) -> Any:
    text, whole, real = arrow.large_string(), arrow.int64(), arrow.float64()
    turn = {
        "turn": whole,
        "revision": whole,
        "row_class": text,
        "details": arrow.list_(text),
        "flags": arrow.list_(text),
        "loop_score": real,
        "finish_reason": text,
        "native_finish_reason": text,
        "input_tokens": whole,
        "output_tokens": whole,
        "reasoning_tokens": whole,
        "cached_tokens": whole,
        "cache_write_tokens": whole,
        "cost_pusd": whole,
        "entry_id": text,
        "generation_id": text,
        "endpoint": text,
        "provider_name": text,
        "served_provider": text,
        "served_model": text,
        "quantization_label": text,
        "precision": text,
        "input_usd_per_token": text,
        "output_usd_per_token": text,
        "listed_at_s": real,
        "sampling": text,
        "max_output_tokens": whole,
        "mode": text,
        "attempts": whole,
        "first_byte_s": real,
        "total_s": real,
        "messages_sha256": text,
        "created_at_s": real,
    }
    message = {"role": text, "content": text, "reasoning": text}
    return arrow.schema(
        {
            "id": text,
            "key": text,
            "dataset": text,
            "rollout": whole,
            "model": text,
            "messages": arrow.list_(arrow.struct(message)),
            "turns": arrow.list_(arrow.struct(turn)),
            "cost_pusd": whole,
            "cost_usd": text,
            "metadata": text,
        }
    )
