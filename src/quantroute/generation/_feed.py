"""What feeds a run: the rows of one dataset, until its target is reached or its money is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from quantroute.errors import BudgetExceeded, ConfigurationError
from quantroute.generation._prompts import Prompt
from quantroute.generation._records import RowId, RowState, TurnRecord

__all__ = ["Feed", "FeedProgress", "Purse", "Target"]

#: The expectation a target begins with weighs as much as so many rows that have ended.
_PRIOR_ROWS: Final = 8


class Purse(Protocol):
    """Who gives a dataset its money; called by the run on its event loop."""

    async def more(self, dataset: str, *, above_pusd: int) -> bool:
        """Wait until a dataset's own cap is above the one that refused it; False: never."""

    async def close(self, dataset: str) -> None:
        """The dataset spends nothing any more; what it leaves is for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much of a dataset is wanted: accepted output tokens, or accepted rows.

    A row is accepted if it is whole and good. `expected_tokens` is what one row may be expected to
    bring before any has ended (tokens; 0 if nobody knows). Rows under way count for what they are
    expected to bring: else two thousand rows in flight would overshoot by two thousand rows.
    """

    output_tokens: int | None = None
    rows: int | None = None
    expected_tokens: float = 0.0

    def __post_init__(self) -> None:
        goals = [goal for goal in (self.output_tokens, self.rows) if goal is not None]
        if len(goals) != 1 or goals[0] < 1:
            raise ConfigurationError(
                "a target is a number of output tokens or of rows, one of them"
            )

    def missing(self, *, rows: int, output_tokens: int) -> int:
        """What is missing with so much accepted; not negative."""
        if self.rows is not None:
            return max(0, self.rows - rows)
        assert self.output_tokens is not None
        return max(0, self.output_tokens - output_tokens)

    def expected_per_row(self, *, ended: int, rows: int, output_tokens: int) -> float:
        """What one more row may be expected to bring, in the target's unit.

        Args:
            ended: rows that ended in this start.
            rows, output_tokens: what of them was accepted.
        """
        prior, brought = (
            (1.0, rows) if self.rows is not None else (self.expected_tokens, output_tokens)
        )
        weight = _PRIOR_ROWS if prior else 0
        return (prior * weight + brought) / (weight + ended) if weight + ended else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedProgress:
    """A feed in one moment. `accepted_*` count earlier starts too; the rest is of this one."""

    dataset: str | None
    target: Target | None
    accepted_rows: int
    accepted_tokens: int
    answers: int
    output_tokens: int
    ended: int
    live: int
    is_over: bool
    is_reached: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Feed:
    """Prompts that a run reads at its own pace, with what has come of them.

    Args:
        prompts: read once, lazily.
        dataset: the dataset of all of them; needed with a purse.
        target: where to stop; None reads to the end.
        rollouts: only the first so many answers per prompt; None for what is configured.
        source: a name for exactly what `prompts` yields, such as the hash of a file that is read
            whole. Once all its rows are done, a later start of the same run with the same settings
            does not read it again. None: it is always read.
        purse: asked when the dataset's own cap is reached; without one that ends the dataset.
        accepted_rows, accepted_tokens: what earlier starts have brought.
        planned_rows: rows to end in this start, if there is no target; for deadlines.
        is_redo: rows are had anew, whether the target is reached or not.
    """

    prompts: Iterable[Prompt]
    dataset: str | None = None
    target: Target | None = None
    purse: Purse | None = None
    rollouts: int | None = None
    source: str | None = None
    accepted_rows: int = 0
    accepted_tokens: int = 0
    planned_rows: int | None = None
    is_redo: bool = False
    answers: int = field(default=0, init=False)
    output_tokens: int = field(default=0, init=False)
    ended: int = field(default=0, init=False)
    live: int = field(default=0, init=False)
    is_read: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)
    shortage: BudgetExceeded | None = field(default=None, init=False)
    unpaid: deque[RowId] = field(default_factory=deque, init=False)
    """Rows that did not fit under the dataset's cap: next in turn if there is more money."""
    rows: int = field(default=0, init=False)
    """Distinct rows that its prompts gave, done before or not."""
    duplicates: int = field(default=0, init=False)
    _missed: int = field(default=0, init=False)
    _new_rows: int = field(default=0, init=False)
    _new_tokens: int = field(default=0, init=False)
    _row_ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        if self.purse is not None and self.dataset is None:
            raise ConfigurationError("a feed with a purse needs a dataset")

    @property
    def is_reached(self) -> bool:
        """Whether the target is reached."""
        return self.target is not None and not self._missing(self.target)

    @property
    def has_enough(self) -> bool:
        """Whether no further row is wanted."""
        return self.is_reached and not self.is_redo

    @property
    def has_all(self) -> bool:
        """Whether every row of its prompts has an end of its own, be it a refusal."""
        return self.is_read and not (self.live or self._missed or self.unpaid)

    @property
    def wants_more(self) -> bool:
        """Whether the target needs more rows than those under way can be expected to bring."""
        if self.target is None or self.is_redo:
            return True
        missing = self._missing(self.target)
        expected = self.target.expected_per_row(
            ended=self.ended, rows=self._new_rows, output_tokens=self._new_tokens
        )
        return missing > self.live * expected

    @property
    def remaining_rows(self) -> float | None:
        """Rows that have yet to end, those under way included; None if nobody knows."""
        if self.is_over or self.is_read:
            return float(self.live)
        if self.target is not None and not self.is_redo:
            per_row = self.target.expected_per_row(
                ended=self.ended, rows=self._new_rows, output_tokens=self._new_tokens
            )
            if per_row:
                return self._missing(self.target) / per_row
        return None if self.planned_rows is None else max(0.0, self.planned_rows - self.ended)

    def count_answer(self, record: TurnRecord) -> None:
        """An answer came in."""
        self.answers += 1
        self.output_tokens += record.output_tokens or 0

    def count_end(self, end: RowState, accepted_tokens: int | None) -> None:
        """A row ended; `accepted_tokens` is None unless it is whole and good."""
        self.ended += 1
        self._missed += end is RowState.GAVE_UP
        if end is RowState.FINISHED and accepted_tokens is not None:
            self.accepted_rows += 1
            self.accepted_tokens += accepted_tokens
            self._new_rows += 1
            self._new_tokens += accepted_tokens

    def count_missed(self) -> None:
        """A row is not had in this start: no money, or something stopped it."""
        self._missed += 1

    def begin_row(self) -> None:
        """A row is under way."""
        self.live += 1

    def end_row(self) -> None:
        """A row is no longer under way, however it ended."""
        self.live -= 1
        self._row_ended.set()

    async def row_ended(self) -> None:
        """Wait until the next row ends."""
        self._row_ended.clear()
        await self._row_ended.wait()

    def progress(self) -> FeedProgress:
        """A frozen copy."""
        return FeedProgress(
            dataset=self.dataset,
            target=self.target,
            accepted_rows=self.accepted_rows,
            accepted_tokens=self.accepted_tokens,
            answers=self.answers,
            output_tokens=self.output_tokens,
            ended=self.ended,
            live=self.live,
            is_over=self.is_over,
            is_reached=self.is_reached,
        )

    def _missing(self, target: Target) -> int:
        return target.missing(rows=self.accepted_rows, output_tokens=self.accepted_tokens)
