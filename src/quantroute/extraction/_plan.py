"""Before anything is extracted: which examples, in which shards, and how much disk they need."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import compress, islice
from typing import Any, Final

from quantroute.errors import DatasetError
from quantroute.extraction._fp8 import FP8_NAME
from quantroute.extraction._records import Example
from quantroute.extraction._target import DTYPE_BYTES
from quantroute.policy import EvidenceTable

__all__ = [
    "DiskNeed",
    "ExampleStream",
    "Plan",
    "Selection",
    "ShardCursor",
    "ShardSpan",
    "StateLayout",
    "plan_shards",
]

ExampleStream = Callable[[], Iterable[Example]]
"""Starts a new reading of the same examples in the same order; each reading may be lazy."""

_FILE_BYTES: Final = 64 * 2**10  # a shard's header, markers and the blocks they round up to


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """How the states of a token are stored. `slots` counts the last state: L + 1."""

    slots: int
    hidden_size: int
    dtype: str
    fp8: bool = False

    @property
    def stored_as(self) -> str:
        """The file's dtype, as torch names it."""
        return FP8_NAME if self.fp8 else self.dtype

    @property
    def state_bytes_per_token(self) -> int:
        """States alone. Kimi K2.5: 4 x 7,168 x 2 = 57,344."""
        if self.fp8:
            return self.slots * (self.hidden_size + 4)  # a float32 scale per slot
        return self.slots * self.hidden_size * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """With the token id (8) and the loss mask (1)."""
        return self.state_bytes_per_token + 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which examples to take, in tokens (prompt and answer). None is no limit.

    Under a limit, examples are taken in the order of their keys, which is as good as random and is
    the same on each machine and whatever order the files are in. Answers of endpoints that
    `without_failed` speaks against are left out.
    """

    max_tokens: int | None = None
    max_tokens_per_dataset: int | None = None
    max_tokens_per_endpoint: int | None = None
    max_example_tokens: int | None = None
    row_classes: Set[str] | None = None
    without_failed: EvidenceTable | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        facts = asdict(replace(self, without_failed=None))
        facts["row_classes"] = None if self.row_classes is None else sorted(self.row_classes)
        # Only where it is asked for, so that folders of before the setting are still known again.
        del facts["without_failed"]
        if self.without_failed is not None:
            rows = self.without_failed.serving
            failed = {f"{row.model} {row.tag}" for row in rows if row.failed and row.tag}
            facts["without_failed"] = sorted(failed)
        return facts

    def refuses(self, example: Example) -> str | None:
        """Why the example by itself is not wanted."""
        if self.row_classes is not None:
            row_class = example.provenance.get("row_class")
            if row_class not in self.row_classes:
                return "row_class"
        if self.without_failed is not None:
            known = example.provenance
            if known.get("endpoint") in self.without_failed.failed_tags(known.get("model")):
                return "endpoint_failed"
        limit = self.max_example_tokens
        return "too_long" if limit is not None and len(example) > limit else None

    def buckets(self, example: Example) -> Iterator[tuple[str, int]]:
        """The budgets that the example draws from: their names and limits in tokens."""
        if self.max_tokens is not None:
            yield "", self.max_tokens
        for name, limit in (
            ("dataset", self.max_tokens_per_dataset),
            ("endpoint", self.max_tokens_per_endpoint),
        ):
            if limit is not None:
                yield f"{name}:{example.provenance.get(name)}", limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpan:
    """One shard of the plan. `keys_sha256` is over its examples' keys in order."""

    index: int
    examples: int
    tokens: int
    keys_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The split of chosen examples into shards. Equal input gives an equal plan, anywhere.

    `taken` holds one byte per example read: 1 if it was chosen. `left_out` counts the others.
    """

    shards: tuple[ShardSpan, ...]
    taken: bytes = field(repr=False)
    left_out: Mapping[str, int]
    loss_tokens: int

    @property
    def examples(self) -> int:
        """Chosen examples."""
        return sum(span.examples for span in self.shards)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return sum(span.tokens for span in self.shards)

    @property
    def sha256(self) -> str:
        """Of the split: which examples, in which order, in which shards."""
        hasher = hashlib.sha256()
        for span in self.shards:
            hasher.update(span.keys_sha256.encode())
        return hasher.hexdigest()

    def members(
        self, stream: ExampleStream, wanted: Set[int]
    ) -> Iterator[tuple[ShardSpan, list[Example]]]:
        """The wanted shards with their examples, one shard in memory at a time.

        Raises:
            DatasetError: this reading gives other examples than the one the plan was made from.
        """
        chosen = compress(stream(), self.taken)
        for span in self.shards:
            members = list(islice(chosen, span.examples))
            if span.index not in wanted:
                continue
            if _keys_sha256(example.key for example in members) != span.keys_sha256:
                raise DatasetError(path="examples", problem=_CHANGED)
            yield span, members


class ShardCursor:
    """Members of shards that are asked for one by one, in any order.

    Going forward reads on, leaving out what lies between; going back starts a new reading.
    """

    def __init__(self, plan: Plan, stream: ExampleStream) -> None:
        self._plan, self._stream = plan, stream
        self._wanted: set[int] = set()
        self._next = 0
        self._reading = plan.members(stream, self._wanted)

    def at(self, index: int) -> tuple[ShardSpan, list[Example]]:
        """That shard and its examples.

        Raises:
            DatasetError: the examples are others than those the plan was made from.
        """
        if index < self._next:
            self._reading = self._plan.members(self._stream, self._wanted)
        self._wanted.clear()
        self._wanted.add(index)
        self._next = index + 1
        return next(self._reading)


_CHANGED: Final = "they changed between planning and extraction; plan again"


def plan_shards(stream: ExampleStream, *, shard_tokens: int, selection: Selection) -> Plan:
    """Read everything once, choose, and split; memory is some 200 bytes per example.

    Shards hold consecutive chosen examples, until the next would exceed `shard_tokens`; a longer
    example has a shard of its own. A second example of equal content is left out.
    """
    census = _Census(selection)
    for example in stream():
        census.add(example)
    census.keep_to_budgets()
    return Plan(
        shards=tuple(census.spans(shard_tokens)),
        taken=bytes(census.taken),
        left_out=dict(census.left_out),
        loss_tokens=sum(compress(census.loss_lengths, census.taken)),
    )


class _Census:
    """What planning remembers of each example: its key, its lengths, the budgets it draws from."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self.taken = bytearray()
        self.left_out: Counter[str] = Counter()
        self.keys: list[bytes] = []
        self.lengths, self.loss_lengths = array("q"), array("q")
        self._seen: set[bytes] = set()
        self._budgets: dict[int, tuple[tuple[str, int], ...]] = {}

    def add(self, example: Example) -> None:
        key = bytes.fromhex(example.key)
        reason = "duplicate" if key in self._seen else self._selection.refuses(example)
        self._seen.add(key)
        if reason is not None:
            self.left_out[reason] += 1
        elif budgets := tuple(self._selection.buckets(example)):
            self._budgets[len(self.keys)] = budgets
        self.keys.append(key)
        self.taken.append(reason is None)
        self.lengths.append(len(example))
        self.loss_lengths.append(int(example.loss_mask.sum()))

    def keep_to_budgets(self) -> None:
        """Take back what does not fit, going by the keys."""
        spent: Counter[str] = Counter()
        for place in sorted(self._budgets, key=self.keys.__getitem__):
            length, budgets = self.lengths[place], self._budgets[place]
            if any(spent[name] + length > limit for name, limit in budgets):
                self.taken[place] = False
                self.left_out["budget"] += 1
                continue
            for name, _limit in budgets:
                spent[name] += length

    def spans(self, shard_tokens: int) -> Iterator[ShardSpan]:
        """The split of what is taken."""
        keys: list[str] = []
        index = tokens = 0
        for key, length in compress(zip(self.keys, self.lengths, strict=True), self.taken):
            if keys and tokens + length > shard_tokens:
                yield _span(index, keys, tokens)
                keys, tokens, index = [], 0, index + 1
            keys.append(key.hex())
            tokens += length
        if keys:
            yield _span(index, keys, tokens)


def _span(index: int, keys: list[str], tokens: int) -> ShardSpan:
    return ShardSpan(index=index, examples=len(keys), tokens=tokens, keys_sha256=_keys_sha256(keys))


def _keys_sha256(keys: Iterable[str]) -> str:
    hasher = hashlib.sha256()
    for key in keys:
        hasher.update(key.encode())
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a store needs, against what the disk has."""

    tokens: int
    shards: int
    layout: StateLayout
    free_bytes: int
    margin_bytes: int

    @property
    def need_bytes(self) -> int:
        """What the files will take."""
        return self.tokens * self.layout.bytes_per_token + self.shards * _FILE_BYTES

    @property
    def fits(self) -> bool:
        """Whether it fits, with the margin left over."""
        return self.need_bytes + self.margin_bytes <= self.free_bytes

    def check(self, path: str) -> None:
        """Refuse what does not fit.

        Raises:
            DatasetError: too little space; says how much is missing and what helps.
        """
        if self.fits:
            return
        fitting = max(0, self.free_bytes - self.margin_bytes) // self.layout.bytes_per_token
        hints = ["free some", "choose another disk"]
        hints += [] if self.layout.fp8 else ["set fp8 = true (half the size)"]
        hints += [f"set max_tokens = {fitting} or less"] if fitting else []
        raise DatasetError(
            path=path,
            problem=f"{self.tokens:,} tokens need {gigabytes(self.need_bytes)} and "
            f"{gigabytes(self.margin_bytes)} of margin, but {gigabytes(self.free_bytes)} are free; "
            f"{', '.join(hints[:-1])}, or {hints[-1]}",
        )


def gigabytes(size_bytes: int) -> str:
    """Decimal units, as disks are sold: 57.34 GB."""
    return f"{size_bytes / 1e9:,.2f} GB"
