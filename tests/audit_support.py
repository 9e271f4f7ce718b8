"""Synthetic targets for tests of the audit: logits made by a seed, tokens drawn from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the extra `audit`")
pytest.importorskip("torch", reason="needs the extra `audit`")

import torch

from quantroute.audit import RowScores, SamplingClaim, score_logits

VOCABULARY = 40
PLAIN = SamplingClaim()


def logits_of(tokens: int, *, seed: int) -> Any:
    """Logits [T, V], float32, some places sure of themselves and some not."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.3, 4.0, size=(tokens, 1))
    return torch.tensor(rng.normal(size=(tokens, VOCABULARY)) * scale, dtype=torch.float32)


def allowed_odds(logits: np.ndarray, claim: SamplingClaim) -> np.ndarray:
    """The claimed distribution of one place, [V], computed token by token."""

    def softmax(values: np.ndarray) -> np.ndarray:
        raised = np.exp(values - values.max())
        odds: np.ndarray = raised / raised.sum()
        return odds

    values = logits.astype(np.float64) / claim.temperature
    if claim.top_k:
        least = np.sort(values)[::-1][min(claim.top_k, len(values)) - 1]
        values = np.where(values >= least, values, -np.inf)
    if claim.top_p < 1:
        odds, before, kept = softmax(values), 0.0, set[int]()
        for token in np.argsort(-odds, kind="stable"):
            if before >= claim.top_p:
                break
            kept.add(int(token))
            before += odds[token]
        values = np.array([v if t in kept else -np.inf for t, v in enumerate(values)])
    if claim.min_p:
        odds = softmax(values)
        values = np.where(odds >= claim.min_p * odds.max(), values, -np.inf)
    return softmax(values)


def drawn(logits: Any, claim: SamplingClaim, *, seed: int) -> Any:
    """One token per place, int64 [T], drawn under the claim."""
    odds = np.stack([allowed_odds(row, claim) for row in logits.numpy()])
    places = np.random.default_rng(seed).random((len(odds), 1))
    tokens = (odds.cumsum(-1) < places).sum(-1).clip(0, odds.shape[-1] - 1)
    return torch.tensor(tokens)


def honest_rows(
    rows: int,
    tokens: int,
    *,
    seed: int,
    served: SamplingClaim = PLAIN,
    claim: SamplingClaim = PLAIN,
) -> list[RowScores]:
    """Rows drawn as `served`, scored under `claim`."""
    found = []
    for number in range(rows):
        logits = logits_of(tokens, seed=10_000 * seed + number)
        found.append(score_logits(logits, drawn(logits, served, seed=number + seed), claim))
    return found


def noisy_rows(
    rows: int, tokens: int, *, seed: int, noise: float, scored_noise: float = 0.0
) -> list[RowScores]:
    """Rows drawn from logits that were disturbed, scored by those that were less so."""
    found = []
    for number in range(rows):
        logits = logits_of(tokens, seed=10_000 * seed + number)
        disturbance = torch.tensor(
            np.random.default_rng(number).normal(size=logits.shape), dtype=torch.float32
        )
        ids = drawn(logits + noise * disturbance, PLAIN, seed=number + seed)
        found.append(score_logits(logits + scored_noise * disturbance, ids, PLAIN))
    return found


def mixed_rows(rows: int, tokens: int, *, seed: int, share: float) -> list[RowScores]:
    """Rows in which a share of the tokens has nothing to do with the target."""
    found = []
    for number in range(rows):
        logits = logits_of(tokens, seed=10_000 * seed + number)
        rng = np.random.default_rng(number)
        ids = drawn(logits, PLAIN, seed=number + seed)
        others = torch.tensor(rng.integers(0, VOCABULARY, size=tokens))
        ids = torch.where(torch.tensor(rng.random(tokens) < share), others, ids)
        found.append(score_logits(logits, ids, PLAIN))
    return found
