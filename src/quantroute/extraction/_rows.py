"""Answers out of exported rows: what was asked, what the model wrote, and where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantroute._rowfile import read_manifest, read_rows
from quantroute.domain import canonical_json
from quantroute.errors import DatasetError

__all__ = ["Turn", "read_row_files", "turns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of a row.

    Attributes:
        row: key of the row, and `number` the turn's place in it, from 0.
        before: the messages that were sent for it, as they were sent. None if no spelling of the
            row's messages has the hash that was stored with the answer.
        record: the answer's provenance, as exported.
        dataset: which one the prompt came from; `model`: which one was asked.
    """

    row: str
    number: int
    before: tuple[Mapping[str, Any], ...] | None
    content: str
    reasoning: str | None
    record: Mapping[str, Any]
    dataset: str | None
    model: str | None = None

    def provenance(self) -> dict[str, Any]:
        """What goes along with an example; JSON values."""
        found: dict[str, Any] = {"row_key": self.row, "turn": self.number}
        found |= {"dataset": self.dataset, "model": self.model}
        return found | {name: self.record.get(name) for name in _KEPT}


_KEPT = (
    "row_class",
    "finish_reason",
    "mode",
    "sampling",
    "endpoint",
    "served_provider",
    "served_model",
    "quantization_label",
    "precision",
    "input_tokens",
    "output_tokens",
    "reasoning_tokens",
    "generation_id",
)


def read_row_files(paths: Iterable[Path | str]) -> Iterator[dict[str, Any]]:
    """The rows of exported files, one file after another; manifests are checked first.

    Raises:
        DatasetError: a file is missing, damaged, or not the one its manifest speaks of.
    """
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise DatasetError(path=str(path), problem="no such file; export the rows first")
        read_manifest(path)
    for path in files:
        yield from read_rows(path)


def turns_of(row: Mapping[str, Any]) -> Iterator[Turn]:
    """The answers of an exported row, in order.

    Raises:
        DatasetError: not the form of an exported row.
    """
    key = str(row.get("key") or row.get("id") or "?")
    messages, records = row.get("messages"), row.get("turns")
    if not isinstance(messages, list) or not isinstance(records, list):
        raise DatasetError(
            path=f"row {key}", problem="has no `messages` and `turns`; use `quantroute export`"
        )
    if not all(map(_is_message, messages)) or not all(isinstance(item, dict) for item in records):
        raise DatasetError(
            path=f"row {key}",
            problem="each of its `messages` must have a role and text for content, each of its "
            "`turns` be an object; use `quantroute export`",
        )
    answers = [place for place, item in enumerate(messages) if item["role"] == "assistant"]
    if len(answers) != len(records):
        raise DatasetError(
            path=f"row {key}", problem=f"{len(answers)} answers, but provenance of {len(records)}"
        )
    for number, (place, record) in enumerate(zip(answers, records, strict=True)):
        yield Turn(
            row=key,
            number=number,
            before=_sent(messages[:place], record.get("messages_sha256")),
            content=messages[place]["content"],
            reasoning=messages[place].get("reasoning"),
            record=record,
            dataset=row.get("dataset"),
            model=row.get("model"),
        )


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item.get(name), str) for name in ("role", "content")
    )


def _sent(
    messages: list[Mapping[str, Any]], digest: str | None
) -> tuple[Mapping[str, Any], ...] | None:
    """The messages as they went out: with earlier reasoning or without, as their hash tells."""
    bare = tuple(_message(item, reasoning=False) for item in messages)
    if digest is None:
        return bare
    full = tuple(_message(item, reasoning=True) for item in messages)
    return next((found for found in (bare, full) if _digest(found) == digest), None)


def _message(message: Mapping[str, Any], *, reasoning: bool) -> dict[str, Any]:
    found = {"role": message["role"], "content": message["content"]}
    if reasoning and message.get("reasoning"):
        found["reasoning"] = message["reasoning"]
    return found


def _digest(messages: tuple[Mapping[str, Any], ...]) -> str:
    return hashlib.sha256(canonical_json(messages).encode()).hexdigest()
