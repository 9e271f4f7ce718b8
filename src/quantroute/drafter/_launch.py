"""A trainer's command, ready to run, and what its log lines say."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["Launch", "Measurement", "Parser"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of figures from the trainer.

    Attributes:
        step: optimizer steps done, counted over restarts.
        accuracy: per position ahead, given that all positions before were right (speculators), or
            as the trainer reports it (SpecForge).
        cumulative: per position ahead: this and all before were right; empty if not reported.
    """

    split: Literal["train", "validation"]
    step: int
    epoch: int | None
    loss: float
    accuracy: tuple[float, ...] = ()
    cumulative: tuple[float, ...] = ()
    learning_rate: float | None = None
    tokens_per_s: float | None = None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification that these figures promise: the sure one and those accepted."""
        return 1 + sum(self.cumulative) if self.cumulative else None

    def as_dict(self) -> dict[str, Any]:
        """JSON values; what is not finite is null, for which JSON has no other word."""
        return {
            "split": self.split,
            "step": self.step,
            "epoch": self.epoch,
            "loss": _finite(self.loss),
            "accuracy": [_finite(share) for share in self.accuracy],
            "cumulative": [_finite(share) for share in self.cumulative],
            "accept_length": _finite(self.accept_length),
            "learning_rate": self.learning_rate,
            "tokens_per_s": self.tokens_per_s,
        }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class Parser(Protocol):
    """Reads a trainer's log line by line; it may remember what came before."""

    def read(self, line: str) -> Measurement | None:
        """The figures in this line, None if it holds none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What will be started.

    `files` are written first (path -> content); `total_steps` is an estimate where the trainer
    packs examples, None if it cannot be told.
    """

    argv: tuple[str, ...]
    parser: Parser
    checkpoints: Path
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    total_steps: int | None = None
    notes: tuple[str, ...] = ()

    def shown(self) -> str:
        """As one would type it."""
        setting = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join((*setting, shlex.join(self.argv)))
