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
from typing import Final

import numpy as np

from quantroute.audit._compare import drift_gap, rank_gap_p
from quantroute.audit._scores import TEMPERATURE_FACTORS, Floats, RowScores
from quantroute.audit._statistics import (
    combined_p,
    drift,
    fit_temperature,
    rank_test,
    strata_test,
)
from quantroute.errors import ConfigurationError

__all__ = ["Cause", "CauseKind", "Hypothesis", "fit_of", "name_cause"]

#: A hypothesis whose own test is below this does not explain the tokens.
_FITS_ABOVE: Final = 1e-3
#: Odds of a token that a hypothesis forbids.
_FORBIDDEN: Final = 1e-6


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
        claim_p: of the claim against all the others: one over the mean of their likelihood ratios,
            which is at least as large as a p-value has to be, whatever the number of tokens.
        log_ratios: log likelihood of each hypothesis above the claim's, nats, penalties included.
    """

    hypothesis: Hypothesis
    confidence: float
    fit_p: float
    claim_p: float
    nearest: Hypothesis
    log_ratios: Mapping[str, float]


def name_cause(
    scores: Mapping[Hypothesis, Sequence[RowScores]],
    *,
    reference: Sequence[RowScores] | None = None,
) -> Cause:
    """Compare hypotheses on the same rows.

    Args:
        scores: of the same tokens under every hypothesis; AS_CLAIMED must be among them.
            Another temperature is always compared besides, fitted from the claim's own scores.
        reference: answers of a trusted endpoint, scored as claimed. A cause then has to fit as well
            as the claim fits those, which spares what all endpoints have in common.
    Raises:
        ConfigurationError: AS_CLAIMED is not among them.
    """
    claim = Hypothesis(CauseKind.AS_CLAIMED)
    if claim not in scores:
        raise ConfigurationError("causes are compared with tokens scored as claimed; score them so")
    rows = scores[claim]
    base = _log_likelihood(rows)
    ratios = {
        hypothesis: _above(_log_likelihood(found), base) for hypothesis, found in scores.items()
    }
    claim_p = _claim_p(rows, [ratio for key, ratio in ratios.items() if key != claim])
    fit = fit_temperature(rows)
    tokens = sum(len(row) for row in rows)
    heated = Hypothesis(CauseKind.TEMPERATURE, f"{fit.factor:.3g}x the claimed one")
    ratios[heated] = fit.gain_nats - 0.5 * math.log(max(2, tokens))  # one parameter fitted
    nearest = max(ratios, key=ratios.__getitem__)
    if nearest.kind is CauseKind.TEMPERATURE:
        fit_p = _heated_fit(rows, fit.factor, reference)
    else:
        fit_p = fit_of(scores[nearest], reference=reference)
    return Cause(
        hypothesis=nearest if fit_p >= _FITS_ABOVE else Hypothesis(CauseKind.UNKNOWN),
        confidence=_weight(ratios, nearest),
        fit_p=fit_p,
        claim_p=claim_p,
        nearest=nearest,
        log_ratios={str(hypothesis): ratio for hypothesis, ratio in ratios.items()},
    )


def fit_of(rows: Sequence[RowScores], *, reference: Sequence[RowScores] | None = None) -> float:
    """One p-value for "these tokens were sampled from this": drift and rank positions together.

    With a `reference`: for "they depart from it no more than the reference's depart from theirs".
    """
    found, ranks = drift(rows), rank_test(rows)
    if reference is None:
        return combined_p([found.p, ranks.p])
    return combined_p(
        [drift_gap(found, drift(reference)).p, rank_gap_p(ranks, rank_test(reference))]
    )


def _heated_fit(
    rows: Sequence[RowScores], factor: float, reference: Sequence[RowScores] | None
) -> float:
    ranks = rank_test(rows, factor=factor)
    if reference is not None:
        return rank_gap_p(ranks, rank_test(reference))
    return combined_p([strata_test(rows, factor=factor, by="entropy").p, ranks.p])


def _log_likelihood(rows: Sequence[RowScores]) -> Floats:
    """Of every token, [T]; a forbidden token counts as one in a million rather than zero, since
    rounding at the nucleus' edge must not veto a hypothesis."""
    surprise = np.concatenate([row.surprise for row in rows])
    floored: Floats = -np.where(np.isinf(surprise), -math.log(_FORBIDDEN), surprise)
    return floored


def _claim_p(rows: Sequence[RowScores], ratios: Sequence[float]) -> float:
    """Under the claim each likelihood ratio has mean one, hence their mean too, and it exceeds 1/p
    with probability p at most (Markov). Other temperatures count as one alternative, their mean."""
    allowed = [np.isfinite(row.surprise) for row in rows]
    heated = -sum(
        row.heated_surprise[:, keep].sum(-1) - row.surprise[keep].sum()
        for row, keep in zip(rows, allowed, strict=True)
    )
    curves = [
        float(curve)
        for curve, factor in zip(heated, TEMPERATURE_FACTORS, strict=True)
        if factor != 1.0
    ]
    return min(1.0, math.exp(min(0.0, -_log_mean([*ratios, _log_mean(curves)]))))


def _log_mean(logs: Sequence[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(item - most) for item in logs) / len(logs))


def _above(found: Floats, base: Floats) -> float:
    return float((found - base).sum())


def _weight(ratios: Mapping[Hypothesis, float], chosen: Hypothesis) -> float:
    most = ratios[chosen]
    return 1 / sum(math.exp(ratio - most) for ratio in ratios.values())
