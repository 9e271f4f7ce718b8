"""One worker's part of work that several share: which rows or files are whose, how much of what.

A row belongs to one shard by the hash that is its key, whatever file it comes from and in whatever
order it is read; a file of states by its number. So workers need not talk about their work; only
money is shared, through the ledger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from quantroute.errors import ConfigurationError

__all__ = ["Shard"]

_MOST: int = 10_000


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`, counted from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST or not 0 <= self.index < self.count:
            raise ConfigurationError(
                f"a shard is I/N with 0 <= I < N <= {_MOST}, not {self.index}/{self.count}"
            )

    def __str__(self) -> str:
        return f"shard {self.index} of {self.count}"

    @property
    def folder(self) -> str:
        """The name of the shard's folder within its run's."""
        return f"shard-{self.index:03d}-of-{self.count:03d}"

    @classmethod
    def parse(cls, text: str, *, environment: Mapping[str, str] = os.environ) -> Self:
        """`3/8`, or `auto`: the place in a Slurm array or a Kubernetes indexed job.

        Raises:
            ConfigurationError: neither, or the scheduler does not say enough.
        """
        if text == "auto":
            return cls._of_scheduler(environment)
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None:
            raise ConfigurationError(f"a shard is written I/N, as in 3/8, or auto; not {text!r}")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def _of_scheduler(cls, environment: Mapping[str, str]) -> Self:
        if "SLURM_ARRAY_TASK_ID" in environment:
            index, first, last, count = (
                _number(environment, f"SLURM_ARRAY_TASK_{name}")
                for name in ("ID", "MIN", "MAX", "COUNT")
            )
            if last - first + 1 != count:
                raise ConfigurationError(
                    "the Slurm array has gaps; use --array=0-7 with a step of one, or --shard I/N"
                )
            return cls(index - first, count)
        if "JOB_COMPLETION_INDEX" in environment:
            return cls(
                _number(environment, "JOB_COMPLETION_INDEX"),
                _number(environment, "JOB_COMPLETIONS"),
            )
        raise ConfigurationError(
            "--shard auto needs SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX in the environment; "
            "say --shard I/N"
        )

    def owns(self, mark: bytes) -> bool:
        """Whether a row is this shard's; `mark` is the digest of its key, or its first bytes."""
        return int.from_bytes(mark[:8]) % self.count == self.index

    def has(self, number: int) -> bool:
        """Whether the piece of that number is this shard's, for work that is counted from 0."""
        return number % self.count == self.index

    def share(self, whole: int) -> int:
        """This shard's part of a whole number: all parts make up the whole, but none is below 1."""
        part, rest = divmod(whole, self.count)
        return max(1, part + (self.index < rest))


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        hint = "; set it to the job's number of completions" if name == "JOB_COMPLETIONS" else ""
        raise ConfigurationError(f"--shard auto: ${name} is not a number: {text!r}{hint}")
    return int(text)
