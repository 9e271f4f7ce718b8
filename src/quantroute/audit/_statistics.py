"""Tests of the claim "these tokens were sampled from the target", from scores alone. Pure.

If x_t is drawn from the claimed distribution p_t, then whatever came before

- `-log p_t(x_t)` has mean H_t and variance V_t, so that the sum of `D_t = -log p_t(x_t) - H_t` is a
  martingale with known variance (`drift`);
- the place of x_t among the tokens ordered by odds, drawn uniformly within x_t's own share, is
  uniform on [0, 1] and independent of the past (`rank_test`);
- tokens outside the nucleus do not occur (`outside_test`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy

from quantroute.audit._scores import TEMPERATURE_FACTORS, Floats, RowScores, joined

__all__ = [
    "Drift",
    "Outside",
    "RankTest",
    "Strata",
    "TemperatureFit",
    "combined_p",
    "drift",
    "fit_temperature",
    "holm",
    "outside_test",
    "rank_test",
    "strata_test",
    "tokens_needed",
]

_BOOTSTRAPS: Final = 1_000
_SMOOTH_ORDER: Final = 4
_HISTOGRAM_BINS: Final = 20
#: Where answers are cut to see whether an effect sits at their beginning.
_POSITIONS: Final = (0, 8, 32, 128)
_ENTROPY_STRATA: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Surprise above entropy. Positive: the tokens are less likely than the claim makes them.

    Attributes:
        mean_nats: per token; `low`, `high` its 95% interval by resampling rows.
        z: standardised by the variance that the claim itself gives.
        z_rows: standardised by the spread of the rows; bounded by the root of their number.
        p: two-sided, of `z`.
        deviation_nats: standard deviation of one token under the claim.
    """

    tokens: int
    rows: int
    mean_nats: float
    low: float
    high: float
    z: float
    z_rows: float
    p: float
    deviation_nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTest:
    """Uniformity of rank positions: Neyman's smooth test of order four.

    `components` are the standardised Legendre moments; the first says "too far down the list" (if
    positive), the second "too often at both ends".
    """

    statistic: float
    p: float
    components: tuple[float, ...]
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Tokens that the claim forbids, against the share that numerical noise may bring."""

    count: int
    tokens: int
    allowed_share: float
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureFit:
    """The multiple of the claimed temperature under which the tokens are likeliest.

    `low`, `high`: 95% interval, by the spread of the rows. `gain_nats`: log likelihood above that
    at the claimed temperature. `is_at_edge`: beyond the temperatures that were scored.
    """

    factor: float
    low: float
    high: float
    gain_nats: float
    is_at_edge: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """Drift within groups of tokens, after the temperature was fitted.

    `z`: of each group; `p`: chi-squared over them, one degree lost if there was a fit.
    """

    edges: tuple[float, ...]
    means_nats: tuple[float, ...]
    z: tuple[float, ...]
    p: float


def drift(rows: Sequence[RowScores], *, seed: int = 0) -> Drift:
    """The martingale test over the tokens the claim allows."""
    sums, variances, counts = (np.array(part) for part in zip(*map(_row_sums, rows), strict=True))
    tokens, total = int(counts.sum()), float(sums.sum())
    variance, spread = float(variances.sum()), float(np.square(sums).sum())
    z = total / math.sqrt(variance) if variance > 0 else 0.0
    low, high = _interval(sums, counts, seed=seed)
    return Drift(
        tokens=tokens,
        rows=len(rows),
        mean_nats=total / max(1, tokens),
        low=low,
        high=high,
        z=z,
        z_rows=total / math.sqrt(spread) if spread > 0 else 0.0,
        p=float(2 * scipy.stats.norm.sf(abs(z))),
        deviation_nats=math.sqrt(variance / max(1, tokens)),
    )


def rank_test(rows: Sequence[RowScores], *, factor: float = 1.0, seed: int = 0) -> RankTest:
    """The omnibus test of rank positions; `seed` draws the place within each token's own share.

    Args:
        factor: test the claim at this multiple of its temperature.
    """
    every = joined(rows)
    allowed = np.isfinite(every.surprise)
    above, mass = every.above[allowed], every.mass[allowed]
    if factor != 1.0:
        above = _at(every.heated_above[:, allowed], factor)
        mass = _at(every.heated_mass[:, allowed], factor)
    places = np.clip(above + mass * np.random.default_rng(seed).random(mass.shape), 0.0, 1.0)
    centred = 2 * places - 1
    moments = [
        math.sqrt(2 * order + 1) * float(np.polynomial.Legendre.basis(order)(centred).sum())
        for order in range(1, _SMOOTH_ORDER + 1)
    ]
    components = tuple(moment / math.sqrt(max(1, places.size)) for moment in moments)
    statistic = sum(component**2 for component in components)
    histogram, _ = np.histogram(places, bins=_HISTOGRAM_BINS, range=(0, 1))
    return RankTest(
        statistic=statistic,
        p=float(scipy.stats.chi2.sf(statistic, _SMOOTH_ORDER)),
        components=components,
        histogram=tuple(int(count) for count in histogram),
    )


def outside_test(rows: Sequence[RowScores], *, allowed_share: float) -> Outside:
    """Whether more tokens are forbidden than noise at the nucleus' edge explains."""
    surprise = np.concatenate([row.surprise for row in rows])
    count = int(np.isinf(surprise).sum())
    return Outside(
        count=count,
        tokens=int(surprise.size),
        allowed_share=allowed_share,
        p=float(scipy.stats.binom.sf(count - 1, surprise.size, allowed_share)) if count else 1.0,
    )


def fit_temperature(rows: Sequence[RowScores]) -> TemperatureFit:
    """Maximum likelihood over the scored temperatures, by a quadratic through the best three."""
    factors = np.array(TEMPERATURE_FACTORS)
    curves = np.stack(
        [-row.heated_surprise[:, np.isfinite(row.surprise)].sum(-1) for row in rows]
    )  # [R, G]
    total = curves.sum(0)
    claimed = float(total[TEMPERATURE_FACTORS.index(1.0)])
    best = int(total.argmax())
    if total[best] == claimed:  # at the claim, or every temperature is as good: nothing was learnt
        best = TEMPERATURE_FACTORS.index(1.0)
    middle = min(max(best, 1), len(factors) - 2)
    near = slice(middle - 1, middle + 2)
    rise = np.polyfit(factors[near], curves[:, near].T, 2)  # [3, R]
    curvature = 2 * float(rise[0].sum())
    if curvature >= 0:  # no maximum inside: the edge is all that can be said
        factor = float(factors[best])
        return TemperatureFit(
            factor=factor,
            low=factor,
            high=factor,
            gain_nats=float(total[best]) - claimed,
            is_at_edge=best in (0, len(factors) - 1),
        )
    peak = -float(rise[1].sum()) / curvature
    factor = float(np.clip(peak, factors[0], factors[-1]))
    slopes = 2 * rise[0] * factor + rise[1]
    error = math.sqrt(float(np.square(slopes).sum())) / -curvature
    at_peak = float(np.polyval(rise.sum(-1), factor))
    return TemperatureFit(
        factor=factor,
        low=factor - 1.96 * error,
        high=factor + 1.96 * error,
        gain_nats=max(0.0, at_peak - claimed),
        is_at_edge=best in (0, len(factors) - 1),
    )


def strata_test(rows: Sequence[RowScores], *, factor: float, by: str) -> Strata:
    """What a change of temperature does not explain, by the tokens' `entropy` or `position`.

    At the fitted temperature the drift is zero over all tokens together, for any cause; a mere
    change of temperature leaves it zero within every group as well. A `factor` of exactly 1 is the
    claim itself: nothing was fitted, and no degree of freedom is lost.
    """
    every = joined(rows)
    allowed = np.isfinite(every.surprise)
    surprise = _at(every.heated_surprise[:, allowed], factor)
    gap = surprise - _at(every.heated_entropy[:, allowed], factor)
    key = (every.position if by == "position" else every.entropy)[allowed]
    if by == "position":
        edges = np.array(_POSITIONS, dtype=np.float64)
    elif not key.size:
        edges = np.zeros(1)
    else:
        edges = np.unique(np.quantile(key, np.linspace(0, 1, _ENTROPY_STRATA + 1)[:-1]))
    group = np.searchsorted(edges, key, side="right") - 1
    sums = np.bincount(group, weights=gap, minlength=edges.size)
    squares = np.bincount(group, weights=np.square(gap), minlength=edges.size)
    counts = np.bincount(group, minlength=edges.size)
    z = sums / np.sqrt(np.maximum(squares, 1e-12))
    freedom = max(1, int((counts > 0).sum()) - (factor != 1.0))
    return Strata(
        edges=tuple(map(float, edges)),
        means_nats=tuple(map(float, sums / np.maximum(counts, 1))),
        z=tuple(map(float, z)),
        p=float(scipy.stats.chi2.sf(float(np.square(z).sum()), freedom)),
    )


def combined_p(parts: Sequence[float]) -> float:
    """One p-value from several that may depend on each other (Cauchy combination).

    Source: Liu and Xie, JASA 115 (2020). A p-value of one would outweigh any other: it counts as
    0.999.
    """
    clipped = np.clip(np.array(parts, dtype=np.float64), 1e-300, 0.999)
    small = clipped < 1e-15
    terms = np.where(small, 1 / (clipped * np.pi), np.tan((0.5 - clipped) * np.pi))
    return float(scipy.stats.cauchy.sf(terms.mean()))


def holm(parts: Sequence[float]) -> tuple[float, ...]:
    """p-values adjusted for their number (Holm), in the order given."""
    values = np.array(parts, dtype=np.float64)
    order = values.argsort(kind="stable")
    adjusted = np.empty_like(values)
    weights = np.arange(values.size, 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, values[order] * weights))
    return tuple(map(float, adjusted))


def tokens_needed(
    effect_nats: float, deviation_nats: float, *, power: float = 0.9, alpha: float = 0.05
) -> int:
    """Tokens for a two-sided drift test at level `alpha` to see `effect_nats` with that power."""
    if effect_nats == 0:
        raise ValueError("no number of tokens shows an effect of zero")
    quantiles = scipy.stats.norm.isf(alpha / 2) + scipy.stats.norm.isf(1 - power)
    return math.ceil(float(quantiles * deviation_nats / effect_nats) ** 2)


def _row_sums(row: RowScores) -> tuple[float, float, int]:
    allowed = np.isfinite(row.surprise)
    gap = row.surprise[allowed] - row.entropy[allowed]
    return float(gap.sum()), float(row.varentropy[allowed].sum()), int(allowed.sum())


def _interval(sums: Floats, counts: Floats, *, seed: int) -> tuple[float, float]:
    """95% interval of the mean per token, resampling rows."""
    rng = np.random.default_rng(seed)
    means = np.empty(_BOOTSTRAPS)
    for number in range(_BOOTSTRAPS):  # one after the other: all at once they take gigabytes
        chosen = rng.integers(0, sums.size, size=sums.size)
        means[number] = sums[chosen].sum() / max(1, counts[chosen].sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _at(heated: Floats, factor: float) -> Floats:
    """A curve [G, T] between the scored temperatures, by Lagrange through the nearest three."""
    factors = TEMPERATURE_FACTORS
    nearest = min(range(len(factors)), key=lambda index: abs(factors[index] - factor))
    middle = min(max(nearest, 1), len(factors) - 2)
    found = np.zeros(heated.shape[-1])
    for index in range(middle - 1, middle + 2):
        others = [other for other in range(middle - 1, middle + 2) if other != index]
        weight = math.prod(
            (factor - factors[other]) / (factors[index] - factors[other]) for other in others
        )
        if weight != 0:
            found = found + weight * heated[index]
    return found
