"""What an audit sees, how often it cries wolf, and what it names, on a target made by code.

The table on a real model is made by `benchmarks/audit_power.py`; this is the same at toy size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy

from audit_target import QUESTIONS, make_target, prompt_ids, sample
from quantroute.audit import (
    AuditRow,
    AuditSettings,
    CauseKind,
    EndpointReport,
    Hypothesis,
    Intake,
    Outcome,
    RowScores,
    SamplingClaim,
    Target,
    drift,
    judge_scores,
    rank_test,
    score_rows,
)

torch = pytest.importorskip("torch", reason="needs the extra `audit`")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SYSTEM = "You sell boats and nothing else"
CLAIM = Hypothesis(CauseKind.AS_CLAIMED)
HYPOTHESES = (
    CLAIM,
    Hypothesis(CauseKind.PRECISION, "nvfp4"),
    Hypothesis(CauseKind.PRECISION, "int8"),
    Hypothesis(CauseKind.SYSTEM_PROMPT, "boats"),
    Hypothesis(CauseKind.MODEL, "tuned"),
)
RIGHT = {
    "native": CauseKind.AS_CLAIMED,
    "int8": CauseKind.AS_CLAIMED,  # it holds what int4 holds
    "nvfp4": CauseKind.PRECISION,
    "hot": CauseKind.TEMPERATURE,
    "system": CauseKind.SYSTEM_PROMPT,
    "tuned": CauseKind.MODEL,
}
TOKENS = 1_000
NULL_TOKENS = 250
NULLS = 200
SETTINGS = AuditSettings(fewest_tokens=1)

Scored = Mapping[Hypothesis, Sequence[RowScores]]


@dataclass(frozen=True, slots=True)
class Served:
    """A target, another fine-tune of it, and answers of either."""

    target: Target
    tuned: Any

    def answers(self, name: str, *, rollouts: int, seed: int) -> list[list[list[int]]]:
        """To each question, end token included."""
        system = SYSTEM if name == "system" else None
        model = self.tuned if name == "tuned" else self.target.model
        with self.target.in_format(name if name in ("nvfp4", "int8") else None):
            return [
                sample(
                    model,
                    [prompt_ids(self.target, question, system)] * rollouts,
                    temperature=1.3 if name == "hot" else 1.0,
                    seed=seed + number,
                )
                for number, question in enumerate(QUESTIONS)
            ]

    def score(self, answers: list[list[list[int]]], hypothesis: Hypothesis) -> list[RowScores]:
        """Under one hypothesis; questions take turns."""
        system = SYSTEM if hypothesis.kind is CauseKind.SYSTEM_PROMPT else None
        prompts = [prompt_ids(self.target, question, system) for question in QUESTIONS]
        rows = [
            _row(prompt, answer)
            for pair in zip(*answers, strict=True)
            for prompt, answer in zip(prompts, pair, strict=True)
        ]
        model = self.tuned if hypothesis.kind is CauseKind.MODEL else self.target.model
        with self.target.in_format(
            hypothesis.name if hypothesis.kind is CauseKind.PRECISION else None
        ):
            return score_rows(model, rows, is_heated=hypothesis == CLAIM)


def _row(prompt: list[int], answer: list[int]) -> AuditRow:
    return AuditRow(
        key=("", 0),
        endpoint="",
        input_ids=np.array(prompt + answer),
        start=len(prompt),
        claim=SamplingClaim(),
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = make_target(tmp_path_factory.mktemp("target"))
    tuned = Target.load(folder).model
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in tuned.model.layers.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return Served(Target.load(folder), tuned)


@pytest.fixture(scope="module")
def scored(served: Served) -> dict[str, Scored]:
    found = {}
    for seed, name in enumerate(RIGHT):
        answers = served.answers(name, rollouts=220, seed=100 * seed)
        found[name] = {item: served.score(answers, item) for item in HYPOTHESES}
    return found


def parts_of(rows: Sequence[RowScores], tokens: int) -> Iterator[list[int]]:
    """Disjoint parts of so many tokens or a few more."""
    part, total = list[int](), 0
    for index, row in enumerate(rows):
        part.append(index)
        total += len(row)
        if total >= tokens:
            yield part
            part, total = [], 0


def judged(scores: Scored, tokens: int) -> list[EndpointReport]:
    """The audit's own verdict on each part."""
    found = []
    for part in parts_of(scores[CLAIM], tokens):
        own = {key: [rows[index] for index in part] for key, rows in scores.items()}
        nothing = [_row([0], [0]) for _ in part]  # a verdict is made from scores alone
        intake = Intake(rows=nothing, tokens=sum(map(len, own[CLAIM])))
        found += judge_scores({"one": intake}, {"one": own}, SETTINGS)
    return found


@pytest.mark.parametrize("name", ["nvfp4", "hot", "system", "tuned"])
def test_a_thousand_tokens_show_each_departure_and_its_cause(
    scored: dict[str, Scored], name: str
) -> None:
    reports = judged(scored[name], TOKENS)
    assert len(reports) >= 10
    assert np.mean([item.outcome is Outcome.FAILS for item in reports]) >= 0.9
    named = Counter(item.cause.hypothesis.kind for item in reports)
    assert named[RIGHT[name]] / len(reports) >= 0.9, named


@pytest.mark.parametrize("name", ["native", "int8"])
def test_what_answers_alike_passes(scored: dict[str, Scored], name: str) -> None:
    reports = judged(scored[name], TOKENS)
    assert sum(item.outcome is Outcome.FAILS for item in reports) <= 1


@pytest.mark.parametrize("name", ["nvfp4", "system", "tuned"])
def test_what_nobody_thought_of_is_not_called_by_another_name(
    scored: dict[str, Scored], name: str
) -> None:
    less = {key: rows for key, rows in scored[name].items() if key.kind is not RIGHT[name]}
    named = Counter(item.cause.hypothesis.kind for item in judged(less, TOKENS))
    wrong = {CauseKind.PRECISION, CauseKind.SYSTEM_PROMPT, CauseKind.MODEL}
    assert sum(named[kind] for kind in wrong) <= 0.1 * named.total(), named


def test_false_alarms_over_200_honest_samples_are_as_rare_as_promised(served: Served) -> None:
    scores: dict[Hypothesis, list[RowScores]] = {item: [] for item in HYPOTHESES}
    while len(list(parts_of(scores[CLAIM], NULL_TOKENS))) < NULLS:
        seed = 10_000 + len(scores[CLAIM])
        answers = served.answers("native", rollouts=500, seed=seed)
        for item, rows in scores.items():
            rows += served.score(answers, item)
    parts = [
        [scores[CLAIM][index] for index in part]
        for part in list(parts_of(scores[CLAIM], NULL_TOKENS))[:NULLS]
    ]
    low, high = scipy.stats.binom.interval(0.999, NULLS, 0.05)
    for ps in (
        [drift(part).p for part in parts],
        [rank_test(part, seed=seed).p for seed, part in enumerate(parts)],
    ):
        assert low <= sum(p < 0.05 for p in ps) <= high
    verdicts = judged(scores, NULL_TOKENS)[:NULLS]
    assert sum(item.outcome is Outcome.FAILS for item in verdicts) <= 0.05 * NULLS
