"""Why an endpoint departs from its claim: named hypotheses, compared by likelihood. Pure.

A hypothesis is anything under which the same tokens can be scored: the target as claimed, the
target with its weights rounded once more, another temperature, a system prompt before the
conversation, another model. The likelihood ratio of two of them is the sharpest test there is, and
each one can itself be tested like the claim. So a cause is named only if it both beats the others
and stands its own test; else the finding is "none of these".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantroute.audit._scores import Floats, RowScores
from quantroute.audit._statistics import (
    combined_p,
    drift,
    fit_temperature,
    rank_test,
    strata_test,
)

__all__ = ["Cause", "CauseKind", "Hypothesis", "name_cause"]

#: A hypothesis whose own test is below this does not explain the tokens.
_FITS_ABOVE = 1e-3


class CauseKind(enum.Enum):
    """What may be behind a departure."""

    AS_CLAIMED = "as claimed"
    PRECISION = "precision"
    TEMPERATURE = "temperature"
    SYSTEM_PROMPT = "system prompt"
    TEMPLATE = "template"
    MODEL = "another model"
    NOISE = "engine noise"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Something that may have served the tokens, e.g. PRECISION, "nvfp4"."""

    kind: CauseKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.name}" if self.name else self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The finding for one endpoint.

    Attributes:
        confidence: posterior weight of `hypothesis` among all compared, equal odds before.
        fit_p: its own test; a cause that fails it is reported as UNKNOWN with `nearest` said.
        log_ratios: log likelihood of each hypothesis above the claim's, nats, penalties included.
    """

    hypothesis: Hypothesis
    confidence: float
    fit_p: float
    nearest: Hypothesis
    log_ratios: Mapping[str, float]


def name_cause(
    scores: Mapping[Hypothesis, Sequence[RowScores]], *, noise_nats: float = 0.0
) -> Cause:
    """Compare hypotheses on the same rows.

    Args:
        scores: of the same tokens under every hypothesis; AS_CLAIMED must be among them.
            Another temperature is always compared besides, fitted from the claim's own scores.
        noise_nats: drift per token that two honest endpoints show; smaller ones are engine noise.
    """
    claim = Hypothesis(CauseKind.AS_CLAIMED)
    rows = scores[claim]
    base = _log_likelihood(rows)
    ratios = {
        hypothesis: _above(_log_likelihood(found), base) for hypothesis, found in scores.items()
    }
    fit = fit_temperature(rows)
    tokens = sum(len(row) for row in rows)
    heated = Hypothesis(CauseKind.TEMPERATURE, f"{fit.factor:.3g}x the claimed one")
    ratios[heated] = fit.gain_nats - 0.5 * math.log(max(2, tokens))  # one parameter fitted
    nearest = max(ratios, key=ratios.__getitem__)
    if nearest.kind is CauseKind.TEMPERATURE:
        fit_p = strata_test(rows, factor=fit.factor, by="entropy").p
    else:
        fit_p = fit_of(scores[nearest])
    found = nearest if fit_p >= _FITS_ABOVE else Hypothesis(CauseKind.UNKNOWN)
    if found.kind is not CauseKind.AS_CLAIMED and abs(drift(rows).mean_nats) < noise_nats:
        found = Hypothesis(CauseKind.NOISE)
    return Cause(
        hypothesis=found,
        confidence=_weight(ratios, nearest),
        fit_p=fit_p,
        nearest=nearest,
        log_ratios={str(hypothesis): ratio for hypothesis, ratio in ratios.items()},
    )


def fit_of(rows: Sequence[RowScores]) -> float:
    """One p-value for "these tokens were sampled from this": drift and rank positions together."""
    return combined_p([drift(rows).p, rank_test(rows).p])


def _log_likelihood(rows: Sequence[RowScores]) -> Floats:
    """Of every token, [T]; a forbidden token counts as one in a million rather than zero, since
    rounding at the nucleus' edge must not veto a hypothesis."""
    surprise = np.concatenate([row.surprise for row in rows])
    floored: Floats = -np.minimum(surprise, math.log(1e6))
    return floored


def _above(found: Floats, base: Floats) -> float:
    return float((found - base).sum())


def _weight(ratios: Mapping[Hypothesis, float], chosen: Hypothesis) -> float:
    most = ratios[chosen]
    return 1 / sum(math.exp(ratio - most) for ratio in ratios.values())
