"""The draft vocabulary: the tokens that a drafter may propose, chosen by what the target says.

A drafter's head is cut to the N tokens that make up nearly all of the output. The map between the
two vocabularies is written as trainers and engines read it: `d2t` holds offsets
(target id = draft id + d2t[draft id]), `t2d` says of each target id whether it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction._records import Example

__all__ = ["DraftVocabulary", "count_supervised", "special_token_ids"]


def count_supervised(examples: Iterable[Example], *, vocab_size: int) -> NDArray[np.int64]:
    """How often each target token is learnt from: int64 [vocab_size]. Prompts do not count.

    Raises:
        DatasetError: a token id lies outside the target's vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for example in examples:
        add_counts(counts, example)
    return counts


def add_counts(counts: NDArray[np.int64], example: Example) -> None:
    """Add one example's supervised tokens to `counts`, in place."""
    ids = example.input_ids
    if int(ids.min()) < 0 or int(ids.max()) >= len(counts):
        raise DatasetError(
            path=f"example {example.key[:16]}",
            problem=f"token ids reach from {int(ids.min())} to {int(ids.max())}, but the target "
            f"knows {len(counts)}; it was tokenised for another model",
        )
    np.add.at(counts, ids[example.loss_mask], 1)


def special_token_ids(folder: Path | str) -> tuple[int, ...]:
    """Ids of the added tokens of a tokenizer: end of turn, thinking markers, template tokens.

    Read from the files in the target's folder, never assumed: models of one family differ.

    Raises:
        ConfigurationError: the folder names no added token in any of the usual files.
    """
    folder = Path(folder)
    found: set[int] = set()
    added = _json(folder / "tokenizer.json").get("added_tokens") or ()
    found.update(int(token["id"]) for token in added)
    decoder = _json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found.update(int(token) for token in decoder)
    for name in ("generation_config.json", "config.json"):
        ends = _json(folder / name).get("eos_token_id")
        found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if not found:
        raise ConfigurationError(
            f"{folder}: no added tokens in tokenizer.json, tokenizer_config.json or config.json; "
            "name the ids that must be in the draft vocabulary yourself"
        )
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftVocabulary:
    """Which target tokens the drafter knows.

    Attributes:
        target_ids: int64 [N], increasing; draft id i stands for `target_ids[i]`.
        vocab_size: of the target.
        counts: int64 [vocab_size], supervised tokens that it was chosen by.
    """

    target_ids: NDArray[np.int64]
    vocab_size: int
    counts: NDArray[np.int64]

    @classmethod
    def choose(cls, counts: NDArray[np.int64], *, size: int, forced: Iterable[int] = ()) -> Self:
        """`size` tokens: the forced ones, then the most frequent, then the lowest unused ids.

        Ties go to the lower id, so the choice depends on nothing but the counts.

        Raises:
            ConfigurationError: more tokens than there are, or more forced ones than asked for.
        """
        vocab_size, must = len(counts), sorted(set(forced))
        if not 0 < size <= vocab_size:
            raise ConfigurationError(
                f"a draft vocabulary has between 1 and {vocab_size} tokens, not {size}"
            )
        if must and not 0 <= must[0] <= must[-1] < vocab_size:
            raise ConfigurationError(
                f"forced token ids must lie within the target's {vocab_size}: {must[0]}..{must[-1]}"
            )
        if len(must) > size:
            raise ConfigurationError(
                f"{len(must)} special tokens do not fit in a draft vocabulary of {size}; take more"
            )
        rank = counts.astype(np.int64).copy()
        rank[must] = np.iinfo(np.int64).max
        order = np.argsort(-rank, kind="stable")
        return cls(
            target_ids=np.sort(order[:size]).astype(np.int64),
            vocab_size=vocab_size,
            counts=counts,
        )

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def d2t(self) -> NDArray[np.int64]:
        """Offsets [N]: target id = draft id + offset."""
        return self.target_ids - np.arange(len(self.target_ids), dtype=np.int64)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """Mask [vocab_size]: the target ids that are in."""
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        mask[self.target_ids] = True
        return mask

    @property
    def coverage(self) -> float:
        """Share of the supervised tokens that the drafter can say at all; 0 if there are none."""
        total = int(self.counts.sum())
        return int(self.counts[self.target_ids].sum()) / total if total else 0.0


def _json(path: Path) -> Mapping[str, Any]:
    """A JSON object, empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
