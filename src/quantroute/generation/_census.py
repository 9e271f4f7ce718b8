"""Counting the prompts of a run before money is spent: rows, bytes, duplicates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quantroute._version import __version__
from quantroute.client import input_bound_tokens
from quantroute.domain import canonical_json
from quantroute.errors import DatasetError
from quantroute.generation._config import RunConfig
from quantroute.generation._prompts import Prompt
from quantroute.generation._records import digest
from quantroute.generation._rows import RowStore
from quantroute.generation._spec import DatasetSpec

__all__ = ["Census", "known_census", "note_census", "take_census"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What one dataset would ask.

    `prompts` counts the file's lines. `rows` are those that no line before it and no dataset before
    this one has: prompts times rollouts, without duplicates. The sums are over those rows, and over
    all turns of each, since a turn sends what came before it again; `replayed_answers` counts the
    earlier answers among that, whose length nobody knows yet.
    Units: UTF-8 bytes; tokens (`input_bound_tokens`: the bound that reservations rest on, earlier
    answers not included).
    """

    dataset: str
    prompts: int = 0
    duplicates_within: int = 0
    duplicates_across: int = 0
    rows: int = 0
    requests: int = 0
    input_bytes: int = 0
    input_bound_tokens: int = 0
    longest_bound_tokens: int = 0
    replayed_answers: int = 0


def take_census(datasets: Sequence[DatasetSpec], config: RunConfig) -> tuple[Census, ...]:
    """Read every prompt once; each different one takes some 130 bytes of memory.

    Two lines are duplicates if their rows have the same key: same messages and same sampling.
    Rollouts of one prompt have keys of their own.
    Raises:
        DatasetError: a line cannot be used (how many more there are is said), or a file is empty.
    """
    problems: list[DatasetError] = []
    rollouts_of: dict[bytes, int] = {}
    found = []
    for item in datasets:
        counter = _Counter(dataset=item.name, rollouts=item.rollouts)
        own = config.of(item.name)
        mine: set[bytes] = set()
        try:
            for prompt in item.read(on_error=problems.append):
                counter.count(prompt, digest(own.row_key(prompt, 0)), mine, rollouts_of)
        except DatasetError as error:  # the file as a whole
            problems.append(error)
        if not counter.prompts and not problems:
            raise DatasetError(path=str(item.prompts), problem="there is no prompt in it")
        found.append(counter.census())
    if problems:
        first, more = problems[0], len(problems) - 1
        also = f" ({more:,} more problems like this)" if more else ""
        raise DatasetError(path=first.path, line=first.line, problem=f"{first.problem}{also}")
    return tuple(found)


async def known_census(
    rows: RowStore, datasets: Sequence[DatasetSpec], config: RunConfig
) -> tuple[Census, ...] | None:
    """The census that was noted of the same files with the same settings, if there is one."""
    found = await rows.census(_key(datasets, config))
    return None if found is None else tuple(Census(**item) for item in json.loads(found))


async def note_census(
    rows: RowStore,
    datasets: Sequence[DatasetSpec],
    config: RunConfig,
    census: Sequence[Census],
) -> None:
    """Spare later starts the reading of every prompt."""
    noted = canonical_json([asdict(item) for item in census])
    await rows.note_census(_key(datasets, config), noted)


def _key(datasets: Sequence[DatasetSpec], config: RunConfig) -> str:
    """A hash of what a census depends on: contents, their order, what makes a row, this code."""
    basis = [
        __version__,
        config.config_hash(),
        [[item.name, item.rollouts, item.prompts and item.prompts.suffix] for item in datasets],
        [[source.name, source.sha256] for source in config.sources],
    ]
    return hashlib.sha256(canonical_json(basis).encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class _Counter:
    dataset: str
    rollouts: int
    prompts: int = 0
    within: int = 0
    across: int = 0
    rows: int = 0
    requests: int = 0
    input_bytes: int = 0
    bound_tokens: int = 0
    longest_tokens: int = 0
    replayed: int = 0

    def count(
        self, prompt: Prompt, mark: bytes, mine: set[bytes], rollouts_of: dict[bytes, int]
    ) -> None:
        """Count one line; `rollouts_of` are the rollouts per key that are spoken for."""
        self.prompts += 1
        if mark in mine:
            self.within += 1
            return
        mine.add(mark)
        taken = rollouts_of.get(mark, 0)
        self.across += taken > 0
        new_rows = max(0, self.rollouts - taken)
        if new_rows:
            rollouts_of[mark] = self.rollouts
            self._add(prompt, new_rows)

    def _add(self, prompt: Prompt, rows: int) -> None:
        turns = len(prompt.turns)
        messages = list(prompt.messages())
        first = len(messages) - turns
        self.rows += rows
        self.requests += rows * turns
        self.replayed += rows * turns * (turns - 1) // 2
        sizes = [len(message["content"].encode()) for message in messages]
        for turn in range(turns):
            # Earlier answers are counted as empty messages: their frame, not yet their text.
            asked = [*messages[: first + turn + 1], *[{"role": "assistant", "content": ""}] * turn]
            bound = input_bound_tokens(asked)
            self.input_bytes += rows * sum(sizes[: first + turn + 1])
            self.bound_tokens += rows * bound
            self.longest_tokens = max(self.longest_tokens, bound)

    def census(self) -> Census:
        """The frozen result."""
        return Census(
            dataset=self.dataset,
            prompts=self.prompts,
            duplicates_within=self.within,
            duplicates_across=self.across,
            rows=self.rows,
            requests=self.requests,
            input_bytes=self.input_bytes,
            input_bound_tokens=self.bound_tokens,
            longest_bound_tokens=self.longest_tokens,
            replayed_answers=self.replayed,
        )
