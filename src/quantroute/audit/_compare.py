"""Two endpoints against each other: what both have in common is no fault of either. Pure.

Another engine's rounding, and answers whose tokens were guessed from their text, move every
endpoint alike. A trusted endpoint's answers, scored in the same way, show by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy

from quantroute.audit._statistics import Drift, RankTest

__all__ = ["Gap", "drift_gap", "rank_gap_p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Drift of one endpoint above that of another, nats per token, with its 95% interval.

    The interval joins those that resampling rows gives for either (Newcombe's square-and-add); `p`
    goes by the claim's own variances, which are exact if both tell the truth.
    """

    mean_nats: float
    low: float
    high: float
    p: float


def drift_gap(found: Drift, reference: Drift) -> Gap:
    """Whether two endpoints drift alike; the claim's own variances are the yardstick."""
    error = math.hypot(_error(found), _error(reference))
    gap = found.mean_nats - reference.mean_nats
    return Gap(
        mean_nats=gap,
        low=gap - math.hypot(found.mean_nats - found.low, reference.high - reference.mean_nats),
        high=gap + math.hypot(found.high - found.mean_nats, reference.mean_nats - reference.low),
        p=float(2 * scipy.stats.norm.sf(abs(gap) / error)) if error > 0 else 1.0,
    )


def rank_gap_p(found: RankTest, reference: RankTest) -> float:
    """Whether two endpoints' rank positions have the same smooth moments (Neyman, two samples)."""
    sizes = sum(found.histogram), sum(reference.histogram)
    if not all(sizes):
        return 1.0
    error = math.sqrt(1 / sizes[0] + 1 / sizes[1])
    gaps = [
        (one / math.sqrt(sizes[0]) - other / math.sqrt(sizes[1])) / error
        for one, other in zip(found.components, reference.components, strict=True)
    ]
    return float(scipy.stats.chi2.sf(sum(gap**2 for gap in gaps), len(gaps)))


def _error(drift: Drift) -> float:
    return drift.deviation_nats / math.sqrt(max(1, drift.tokens))
