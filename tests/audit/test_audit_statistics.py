"""Scores and tests on synthetic logits: exact under the claim, strong against departures."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from audit_support import (
    PLAIN,
    VOCABULARY,
    allowed_odds,
    drawn,
    honest_rows,
    logits_of,
    mixed_rows,
    noisy_rows,
)
from property_support import examples

pytest.importorskip("torch")

import torch

from quantroute.audit import (
    AuditRow,
    AuditSettings,
    CauseKind,
    Hypothesis,
    Intake,
    Outcome,
    SamplingClaim,
    combined_p,
    drift,
    drift_gap,
    fit_temperature,
    holm,
    judge_scores,
    outside_test,
    rank_gap_p,
    rank_test,
    score_logits,
    strata_test,
    tokens_needed,
)
from quantroute.audit._scores import joined
from quantroute.audit._statistics import _interval
from quantroute.errors import ConfigurationError

claims = st.builds(
    SamplingClaim,
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    top_k=st.sampled_from([0, 1, 3, 20, 100]),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(max_examples=examples(40), deadline=None)
@given(claim=claims, seed=st.integers(0, 10_000))
def test_scores_agree_with_a_token_by_token_reference(claim: SamplingClaim, seed: int) -> None:
    logits = logits_of(6, seed=seed)
    for token in (int(logits[0].argmax()), seed % VOCABULARY):
        scores = score_logits(logits, torch.full((6,), token), claim)
        for place in range(6):
            odds = allowed_odds(logits[place].numpy(), claim)
            own = odds[token]
            surprise = -math.log(own) if own > 0 else math.inf
            logs = np.log(odds, where=odds > 0, out=np.zeros_like(odds))
            entropy = -(odds * logs).sum()
            assert scores.surprise[place] == pytest.approx(surprise, abs=1e-4)
            assert scores.entropy[place] == pytest.approx(entropy, abs=1e-4)
            spread = (odds * logs**2).sum() - entropy**2
            assert scores.varentropy[place] == pytest.approx(spread, abs=1e-3)
            if own > 0:
                assert scores.above[place] == pytest.approx(odds[odds > own].sum(), abs=1e-4)
                assert scores.mass[place] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize(
    "claim",
    [
        PLAIN,
        SamplingClaim(temperature=0.7, top_p=0.9),
        SamplingClaim(top_k=5),
        SamplingClaim(min_p=0.1),
    ],
    ids=["plain", "top_p", "top_k", "min_p"],
)
def test_honest_tokens_give_uniform_p_values(claim: SamplingClaim) -> None:
    found = [honest_rows(3, 40, seed=seed, served=claim, claim=claim) for seed in range(60)]
    for values in (
        [drift(rows).p for rows in found],
        [rank_test(rows, seed=seed).p for seed, rows in enumerate(found)],
    ):
        # Of 60 uniform values, 24 or more under 0.2 come up once in 10,000 times.
        assert sum(p < 0.2 for p in values) < 24
        assert sum(p < 0.5 for p in values) > 15
        assert 0.3 < np.mean(values) < 0.7
    assert all(outside_test(rows, allowed_share=0.01).count == 0 for rows in found)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.1, 1.3])
def test_the_temperature_is_recovered_and_explains_what_is_seen(factor: float) -> None:
    rows = honest_rows(20, 150, seed=3, served=SamplingClaim(temperature=factor))
    fit = fit_temperature(rows)
    assert fit.low < factor < fit.high
    assert fit.high - fit.low < 0.2
    assert (drift(rows).p < 1e-4) == (factor != 1.0)
    assert strata_test(rows, factor=fit.factor, by="entropy").p > 1e-3


def test_foreign_tokens_are_seen_and_no_temperature_explains_them() -> None:
    rows = mixed_rows(20, 100, seed=5, share=0.4)
    assert drift(rows).z > 8
    assert rank_test(rows).p < 1e-9
    fit = fit_temperature(rows)
    assert fit.gain_nats > 20
    assert rank_test(rows, factor=fit.factor).p < 1e-6


def test_early_departures_show_by_position() -> None:
    rows = [
        joined([one, replace(other, position=other.position + 32)])
        for one, other in zip(
            mixed_rows(20, 32, seed=11, share=0.5), honest_rows(20, 60, seed=12), strict=True
        )
    ]
    strata = strata_test(rows, factor=1.0, by="position")
    assert strata.p < 1e-9
    assert max(abs(z) for z in strata.z[2:]) < 4 < strata.z[1]


def test_a_wider_nucleus_leaves_tokens_outside() -> None:
    rows = honest_rows(5, 100, seed=9, claim=SamplingClaim(top_p=0.8))
    outside = outside_test(rows, allowed_share=0.005)
    assert outside.count > 20
    assert outside.p < 1e-9
    assert math.isfinite(drift(rows).z)


def test_two_endpoints_with_the_same_disturbance_do_not_differ() -> None:
    one, other = (noisy_rows(15, 80, seed=seed, noise=1.5) for seed in (21, 22))
    honest = honest_rows(15, 80, seed=23)
    assert drift(one).p < 1e-3
    assert drift_gap(drift(one), drift(other)).p > 0.01
    assert rank_gap_p(rank_test(one), rank_test(other)) > 0.01
    assert drift_gap(drift(one), drift(honest)).p < 1e-3
    assert rank_gap_p(rank_test(one), rank_test(honest)) < 0.05


@settings(max_examples=examples(10), deadline=None)
@given(effect=st.floats(0.05, 1.0), deviation=st.floats(0.5, 3.0), seed=st.integers(0, 100))
def test_tokens_needed_gives_the_promised_power(effect: float, deviation: float, seed: int) -> None:
    needed = tokens_needed(effect, deviation, power=0.9)
    sums = np.random.default_rng(seed).normal(
        effect * needed, deviation * math.sqrt(needed), size=4_000
    )
    share = np.mean(2 * scipy.stats.norm.sf(abs(sums) / deviation / math.sqrt(needed)) < 0.05)
    assert 0.87 < share < 0.999


def test_tokens_needed_is_the_textbook_value() -> None:
    # (1.959964 + 1.281552)^2 * (2.65 / 0.463)^2
    assert tokens_needed(0.463, 2.65) == 345
    with pytest.raises(ValueError, match="zero"):
        tokens_needed(0.0, 1.0)


def test_holm_is_the_textbook_procedure() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert holm([0.9, 0.8]) == pytest.approx((1.0, 1.0))
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_monotone_and_never_below(values: list[float]) -> None:
    adjusted = holm(values)
    assert all(after >= before for before, after in zip(values, adjusted, strict=True))
    ranked = sorted(zip(values, adjusted, strict=True))
    assert [item[1] for item in ranked] == sorted(adjusted)


def test_combined_p_against_known_values() -> None:
    assert combined_p([0.03]) == pytest.approx(0.03)
    assert combined_p([0.2, 0.2]) == pytest.approx(0.2)
    # mean of cot(pi p) for 0.01 and 0.5 is 15.9103; its Cauchy tail is 0.0199803
    assert combined_p([0.01, 0.5]) == pytest.approx(0.0199803, rel=1e-4)
    assert combined_p([1e-200, 0.5]) == pytest.approx(2e-200, rel=1e-3)
    assert combined_p([1e-6, 1.0]) < 1e-5  # a certain miss must not drown a hit


def test_the_interval_of_many_rows_takes_little_memory() -> None:
    sums = np.random.default_rng(1).normal(size=4_000)
    tracemalloc.start()
    low, high = _interval(sums, np.ones(4_000), seed=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert low < sums.mean() < high
    assert peak_bytes < 1e6  # 1,000 resamplings of them at once are 32 MB each array


def test_no_tokens_hold_no_evidence() -> None:
    row = replace(honest_rows(1, 4, seed=1)[0])
    empty = row.head(0)
    assert drift([empty]).p == 1.0
    assert rank_test([empty]).p == 1.0
    assert strata_test([empty], factor=1.0, by="entropy").p == 1.0
    assert fit_temperature([empty]).factor == 1.0


def test_answers_of_forbidden_tokens_alone_fail_and_break_nothing() -> None:
    claim = SamplingClaim(top_k=1)
    logits = logits_of(6, seed=1)
    rows = [score_logits(logits, logits.argmin(-1), claim)]
    ids = np.zeros(7, dtype=np.int64)
    asked = AuditRow(key=("k", 0), endpoint="e", input_ids=ids, start=1, claim=claim)
    scores = {"e": {Hypothesis(CauseKind.AS_CLAIMED): rows}}
    (found,) = judge_scores({"e": Intake(rows=[asked], tokens=6)}, scores, AuditSettings())
    assert (found.outcome, found.outside.count) == (Outcome.FAILS, 6)


def test_a_likelihood_that_bends_the_wrong_way_still_has_its_gain() -> None:
    logits = [logits_of(40, seed=number) for number in range(20)]
    fit = fit_temperature([score_logits(item, item.argmax(-1), PLAIN) for item in logits])
    assert (fit.factor, fit.is_at_edge) == (0.6, True)
    assert fit.gain_nats > 100
    only = SamplingClaim(top_k=1)  # one token, certain at any temperature
    fit = fit_temperature([score_logits(item, item.argmax(-1), only) for item in logits])
    assert (fit.factor, fit.gain_nats, fit.is_at_edge) == (1.0, 0.0, False)


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"temperature": 0}, "above 0"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_audited_is_refused(sampling: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SamplingClaim.of(sampling)


def test_neutral_penalties_are_no_obstacle() -> None:
    claim = SamplingClaim.of({"repetition_penalty": 1.0, "presence_penalty": 0, "top_p": None})
    assert claim == PLAIN
    assert drawn(logits_of(2, seed=1), claim, seed=1).shape == (2,)
