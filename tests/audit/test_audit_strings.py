"""Two-sample tests on text."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("scipy", reason="needs the extra `audit`")

from quantroute.audit import greedy_agreement, string_test
from quantroute.errors import ConfigurationError


def answers(count: int, *, letters: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(letters, k=40)) for _ in range(count)]


def test_equal_sources_give_uniform_p_values() -> None:
    seen = []
    for seed in range(60):
        one, other = (answers(12, letters="abcdef", seed=seed + part) for part in (0, 1_000))
        seen.append(string_test(one, other, permutations=99, seed=seed).p)
    assert sum(p <= 0.2 for p in seen) < 24
    assert 0.3 < sum(seen) / len(seen) < 0.7


def test_another_source_is_seen() -> None:
    one = answers(20, letters="aaaabcdef", seed=1)
    other = answers(20, letters="abcdefff", seed=2)
    assert string_test(one, other, permutations=199).p <= 0.01


def test_only_answers_to_the_same_prompt_are_compared() -> None:
    prompts = [n % 2 for n in range(40)]
    one = [("x" * 20 if n % 2 else "y" * 20) for n in prompts]
    seen = string_test(one, one[:], prompts=(prompts, prompts), permutations=99)
    assert seen.discrepancy == pytest.approx(0)
    assert seen.p == 1.0
    with pytest.raises(ConfigurationError, match="no prompt"):
        string_test(["a"], ["b"], prompts=([1], [2]))


def test_greedy_agreement_counts_the_common_beginning() -> None:
    seen = greedy_agreement(["abcd", "abcd", "abxx"], ["abcd", "abcd", "abyy"])
    assert seen.equal_share == pytest.approx(2 / 3)
    assert seen.prefix_share == 1.0
    assert greedy_agreement(["abxx"], ["abyy"]).prefix_share == 0.5
    assert greedy_agreement([""], [""]).equal_share == 1.0
    with pytest.raises(ConfigurationError, match="greedy"):
        greedy_agreement(["a"], [])
