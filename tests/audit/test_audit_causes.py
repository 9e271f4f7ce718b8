"""Which cause is named, and what the weights' formats do to weights."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit_support import honest_rows, mixed_rows, noisy_rows
from property_support import examples

pytest.importorskip("torch")

import torch

from quantroute.audit import CauseKind, Hypothesis, SamplingClaim, name_cause, rounded, served_as
from quantroute.errors import ConfigurationError

CLAIM = Hypothesis(CauseKind.AS_CLAIMED)
FP4 = Hypothesis(CauseKind.PRECISION, "nvfp4")


def test_the_right_cause_is_named() -> None:
    served_noisy = {
        CLAIM: noisy_rows(10, 60, seed=1, noise=1.0),
        FP4: noisy_rows(10, 60, seed=1, noise=1.0, scored_noise=1.0),
    }
    cause = name_cause(served_noisy)
    assert cause.hypothesis == FP4
    assert cause.confidence > 0.99
    assert cause.claim_p < 1e-6


def test_honest_tokens_are_as_claimed() -> None:
    scores = {
        CLAIM: noisy_rows(10, 60, seed=2, noise=0.0),
        FP4: noisy_rows(10, 60, seed=2, noise=0.0, scored_noise=1.0),
    }
    cause = name_cause(scores)
    assert cause.hypothesis == CLAIM
    assert cause.claim_p == 1.0


def test_another_temperature_is_no_precision() -> None:
    rows = honest_rows(20, 100, seed=4, served=SamplingClaim(temperature=1.15))
    cause = name_cause({CLAIM: rows, FP4: noisy_rows(20, 100, seed=4, noise=0, scored_noise=1.0)})
    assert cause.hypothesis.kind is CauseKind.TEMPERATURE


def test_what_nothing_explains_stays_unknown() -> None:
    cause = name_cause({CLAIM: mixed_rows(20, 100, seed=6, share=0.4)})
    assert cause.hypothesis.kind is CauseKind.UNKNOWN
    assert cause.fit_p < 1e-3


def test_the_claim_is_rarely_rejected_by_likelihood() -> None:
    seen = []
    for seed in range(40):
        scores = {
            CLAIM: noisy_rows(2, 20, seed=seed, noise=0.0),
            FP4: noisy_rows(2, 20, seed=seed, noise=0.0, scored_noise=0.3),
        }
        seen.append(name_cause(scores).claim_p)
    assert sum(p < 0.05 for p in seen) <= 7  # 0.05 each at most: 8 or more once in 1,000


@pytest.mark.parametrize("form", ["int4", "int8", "nvfp4", "mxfp4", "fp8"])
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_format_holds_its_own_values(form: str, seed: int) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    once = rounded(weight, form)
    twice = rounded(once, form)
    assert once.shape == weight.shape
    # nvfp4's scales are floats of 8 bits: a maximum that was rounded up may choose another one.
    assert (twice - once).abs().max() <= (0.26 if form == "nvfp4" else 1e-6) * weight.abs().max()
    assert (once - weight).abs().max() < 0.3 * weight.abs().max()


def test_the_grids_are_exact() -> None:
    row = torch.tensor([[6.0, 5.1, 4.9, 2.4, 1.7, 0.8, 0.3, 0.2] + [0.0] * 8])
    assert rounded(row * 448, "nvfp4").tolist()[0][:8] == [
        value * 448 for value in (6, 6, 4, 2, 1.5, 1, 0.5, 0)
    ]
    ints = torch.arange(-7, 8).float().repeat(3)[:32][None]
    assert torch.equal(rounded(ints, "int4"), ints)


def test_weights_come_back_and_the_head_is_left_alone() -> None:
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(32, 4, bias=False), "lm_head": torch.nn.Linear(32, 4)}
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(InterruptedError), served_as(model, "int4"):
        assert not torch.equal(model["body"].weight, before["body.weight"])
        assert torch.equal(model["lm_head"].weight, before["lm_head.weight"])
        raise InterruptedError
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize(("form", "problem"), [("int3", "known"), ("int4", "divide")])
def test_impossible_formats_are_refused(form: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        rounded(torch.zeros(2, 20), form)


def test_a_claim_is_needed_to_compare_with() -> None:
    with pytest.raises(ConfigurationError, match="as claimed"):
        name_cause({FP4: honest_rows(1, 5, seed=1)})
