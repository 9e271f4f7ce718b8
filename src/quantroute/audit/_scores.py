"""What the target says about the tokens of one row: surprise, entropy, place in the ranking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["TEMPERATURE_FACTORS", "Floats", "RowScores", "joined"]

Floats = NDArray[np.float64]

#: Temperatures, as multiples of the claimed one, at which every token is scored besides. Between
#: them the curves are smooth, and a quadratic through the nearest three is exact enough.
TEMPERATURE_FACTORS: Final = (0.6, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Scores of the T generated tokens of one row, under one hypothesis about what served it.

    Attributes:
        surprise: [T] -log p(x_t), nats; infinite where the claim forbids the token.
        entropy: [T] H_t of the claimed distribution, nats.
        varentropy: [T] variance of -log p under the claim, nats^2.
        above: [T] probability of all tokens likelier than x_t.
        mass: [T] probability of x_t (with its ties).
        position: [T] place within the answer, from 0.
        heated_surprise, heated_entropy, heated_above, heated_mass: [G, T] the same at
            `TEMPERATURE_FACTORS` times the claimed temperature, among the tokens that the claim
            allows: a nucleus that moved along would select the tokens it is judged by. [0, T] if
            they were not asked for.
    """

    surprise: Floats
    entropy: Floats
    varentropy: Floats
    above: Floats
    mass: Floats
    position: Floats
    heated_surprise: Floats
    heated_entropy: Floats
    heated_above: Floats
    heated_mass: Floats

    def __len__(self) -> int:
        return int(self.surprise.shape[0])

    def head(self, tokens: int) -> RowScores:
        """The first `tokens` of them."""
        return RowScores(
            **{item.name: getattr(self, item.name)[..., :tokens] for item in fields(self)}
        )


def joined(rows: Sequence[RowScores] | Iterable[RowScores]) -> RowScores:
    """All tokens of several rows, one after the other."""
    rows = list(rows)
    return RowScores(
        **{
            item.name: np.concatenate([getattr(row, item.name) for row in rows], axis=-1)
            for item in fields(RowScores)
        }
    )
