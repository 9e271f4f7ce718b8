"""How many tokens an audit takes, how often it cries wolf, and whether it names the cause.

    python benchmarks/audit_power.py --cache FOLDER     # an hour on two busy cores the first time
    python benchmarks/audit_power.py --quick            # arithmetic of the table on made-up scores

A small model (see `_audit_rows.py`) answers 32 prompts as claimed and in five other ways. Samples
of whole rows, up to a number of tokens, are tested by the audit's three statistics and, beside
them, by the string test that needs no weights. Needs the extra `quantroute[audit]`.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from quantroute.audit import (
    AuditRow,
    CauseKind,
    Hypothesis,
    RowScores,
    SamplingClaim,
    combined_p,
    drift,
    name_cause,
    rank_test,
    score_rows,
    string_test,
)

SIZES = (100, 250, 500, 1_000, 2_500)
REPLICATES = 100
LEVEL = 0.05
#: Rows of a batch that are scored under every hypothesis.
PART = [row for row in range(96) if row % 5 < 2]
#: Rows stand in the same order everywhere, three to a prompt.
PROMPTS_OF_PART = [row // 3 for row in PART]
NULLS = 200
CAUSE_TOKENS = 1_000
CLAIM = Hypothesis(CauseKind.AS_CLAIMED)
#: Which cause is right for each way of serving.
RIGHT = {
    "native": CauseKind.AS_CLAIMED,
    "nvfp4": CauseKind.PRECISION,
    "int8": CauseKind.PRECISION,
    "hot": CauseKind.TEMPERATURE,
    "system": CauseKind.SYSTEM_PROMPT,
    "tuned": CauseKind.MODEL,
}

Scored = dict[Hypothesis, list[RowScores]]


def audit_row(prompt: list[int], tokens: np.ndarray) -> AuditRow:
    """One answer after its prompt."""
    answer = [int(token) for token in tokens if token >= 0]
    return AuditRow(
        key=("", 0),
        endpoint="",
        input_ids=np.array(prompt + answer),
        start=len(prompt),
        claim=SamplingClaim(),
    )


def scored(
    served: Any, name: str, hypothesis: Hypothesis, *, batch: int = 0, is_whole: bool = False
) -> list[RowScores]:
    """A batch of a variant's answers, or `PART` of it, under one hypothesis; kept in the cache."""
    from _audit_rows import HIDDEN_SYSTEM, NATIVE, VARIANTS, generate

    what = f"{hypothesis.kind.name}-{hypothesis.name}{'-whole' if is_whole else ''}"
    path = served.cache / f"scores-{name}-{batch}-{what}.pkl"
    if path.exists():
        return list(pickle.loads(path.read_bytes()))
    variant = next(item for item in VARIANTS if item.name == name)
    answers = generate(served, variant, batch=batch)
    system = HIDDEN_SYSTEM if hypothesis.kind is CauseKind.SYSTEM_PROMPT else None
    rows = [
        audit_row(served.prompt_ids(int(prompt), system), tokens)
        for prompt, tokens in zip(answers.prompts, answers.tokens, strict=True)
    ]
    rows = rows if is_whole else [rows[index] for index in PART]
    supposed = replace(
        NATIVE,
        form=hypothesis.name if hypothesis.kind is CauseKind.PRECISION else None,
        is_tuned=hypothesis.kind is CauseKind.MODEL,
    )
    with served.as_variant(supposed) as model:
        found = score_rows(model, rows, is_heated=hypothesis == CLAIM)
    path.write_bytes(pickle.dumps(found))
    return found


def sample_of(lengths: Sequence[int], tokens: int, rng: np.random.Generator) -> list[int]:
    """Rows in random order until they hold so many tokens."""
    found, total = [], 0
    for index in rng.permutation(len(lengths)):
        found.append(int(index))
        total += lengths[index]
        if total >= tokens:
            break
    return found


def p_values(scores: Scored, chosen: Sequence[int]) -> dict[str, float]:
    """The audit's statistics on some rows; the likelihood test where hypotheses were scored."""
    rows = [scores[CLAIM][index] for index in chosen]
    one, other = drift(rows).p, rank_test(rows).p
    found = {"drift": one, "ranks": other, "both": combined_p([one, other])}
    if len(scores) > 1:
        parts = {key: [value[index] for index in chosen] for key, value in scores.items()}
        found["likelihood"] = name_cause(parts).claim_p
    return found


def power(
    scores: Scored, texts: list[str], honest: list[str], tokens: int, *, replicates: int
) -> dict[str, float]:
    """Share of samples that are rejected at `LEVEL`, by statistic."""
    rng = np.random.default_rng(tokens)
    lengths = [len(row) for row in scores[CLAIM]]
    if sum(lengths) < tokens:
        return {}
    hits: dict[str, list[bool]] = {}
    for number in range(replicates):
        chosen = sample_of(lengths, tokens, rng)
        for name, p in p_values(scores, chosen).items():
            hits.setdefault(name, []).append(p < LEVEL)
        if texts and number < replicates // 4:  # the string test is the slow one
            prompts = [PROMPTS_OF_PART[index] for index in chosen]
            test = string_test(
                [texts[index] for index in chosen],
                [honest[index] for index in chosen],
                prompts=(prompts, prompts),
                permutations=200,
                seed=number,
            )
            hits.setdefault("strings", []).append(test.p < LEVEL)
    return {name: float(np.mean(seen)) for name, seen in hits.items()}


def false_positives(rows: Sequence[RowScores], *, parts: int) -> tuple[int, dict[str, int]]:
    """Rejections among disjoint parts of honest rows, and how many parts there were."""
    per_part = sum(map(len, rows)) // parts
    groups, group, total = [], list[RowScores](), 0
    for row in rows:
        group.append(row)
        total += len(row)
        if total >= per_part:
            groups.append(group)
            group, total = [], 0
    hits = {"drift": 0, "ranks": 0, "both": 0}
    for seed, part in enumerate(groups):
        one, other = drift(part).p, rank_test(part, seed=seed).p
        for name, p in (("drift", one), ("ranks", other), ("both", combined_p([one, other]))):
            hits[name] += p < LEVEL
    return len(groups), hits


def causes(scores: Scored, *, tokens: int, samples: int) -> list[CauseKind]:
    """The cause that is named for each of some samples."""
    rng = np.random.default_rng(1)
    lengths = [len(row) for row in scores[CLAIM]]
    found = []
    for _ in range(samples):
        chosen = sample_of(lengths, tokens, rng)
        parts = {key: [value[index] for index in chosen] for key, value in scores.items()}
        named = name_cause(parts)
        p = min(p_values(scores, chosen)["both"], named.claim_p)
        # As the audit does: what is not rejected has no cause.
        kind = named.hypothesis.kind if 2 * p < LEVEL else CauseKind.AS_CLAIMED
        found.append(kind)
    return found


def show(name: str, scores: Scored, texts: list[str], honest: list[str], replicates: int) -> None:
    """One variant's lines of the table."""
    whole = drift(scores[CLAIM])
    print(
        f"\n{name}: {whole.tokens} tokens in {whole.rows} rows, drift {whole.mean_nats:+.3f} nats "
        f"(z {whole.z:+.1f}), deviation {whole.deviation_nats:.2f}"
    )
    for tokens in SIZES:
        found = power(scores, texts, honest, tokens, replicates=replicates)
        if found:
            parts = "  ".join(f"{key} {share:.2f}" for key, share in found.items())
            print(f"  {tokens:>5} tokens: {parts}")
    if name in RIGHT and len(scores) > 1:
        named = causes(scores, tokens=CAUSE_TOKENS, samples=20)
        right = sum(kind is RIGHT[name] for kind in named)
        others = sorted({kind.value for kind in named if kind is not RIGHT[name]})
        print(f"  cause at {CAUSE_TOKENS} tokens: {right} of 20 right; else {others}", flush=True)


def show_nulls(rows: Sequence[RowScores], parts: int) -> None:
    """False positives, with the interval that the nominal rate allows."""
    found, hits = false_positives(rows, parts=parts)
    low, high = stats.binom.interval(0.99, found, LEVEL)
    size = sum(map(len, rows)) // found
    print(
        f"\nfalse positives at {LEVEL:.0%} among {found} disjoint honest parts of about {size} "
        f"tokens ({low:.0f} to {high:.0f} are within chance): {hits}",
        flush=True,
    )


def quick() -> None:
    """The table's arithmetic on made-up scores: normal surprises around their entropy."""
    rng = np.random.default_rng(0)

    def rows(shift: float) -> list[RowScores]:
        found = []
        for _ in range(120):
            above = rng.random(60)
            surprise = rng.normal(3 + shift, 2, size=60)
            curve = np.tile(surprise, (7, 1))
            found.append(
                RowScores(
                    surprise=surprise,
                    entropy=np.full(60, 3.0),
                    varentropy=np.full(60, 4.0),
                    above=above**2 if shift else above,
                    mass=np.zeros(60),
                    position=np.arange(60.0),
                    heated_surprise=curve,
                    heated_entropy=np.full((7, 60), 3.0),
                    heated_above=np.tile(above, (7, 1)),
                    heated_mass=np.zeros((7, 60)),
                )
            )
        return found

    honest, shifted = rows(0.0), rows(0.5)
    for name, found in (("honest", honest), ("shifted", shifted)):
        show(name, {CLAIM: found}, [], [], replicates=20)
    show_nulls(honest, 50)
    assert power({CLAIM: shifted}, [], [], 1_000, replicates=20)["drift"] > 0.9
    assert power({CLAIM: honest}, [], [], 250, replicates=20)["both"] < 0.5


def full(cache: Path, batches: int) -> None:
    """Generate, score, and print the table."""
    import torch
    from _audit_rows import VARIANTS, Served, generate

    torch.set_num_threads(1)
    cache.mkdir(parents=True, exist_ok=True)
    served = Served(cache)
    hypotheses = [
        CLAIM,
        Hypothesis(CauseKind.PRECISION, "nvfp4"),
        Hypothesis(CauseKind.PRECISION, "int8"),
        Hypothesis(CauseKind.SYSTEM_PROMPT, "agency"),
        Hypothesis(CauseKind.MODEL, "tuned"),
    ]

    def texts(name: str, batch: int = 0) -> list[str]:
        variant = next(item for item in VARIANTS if item.name == name)
        rows = generate(served, variant, batch=batch).tokens
        return [served.tokenizer.decode(rows[index][rows[index] >= 0]) for index in PART]

    honest = texts("native")
    for name in RIGHT:
        scores = {item: scored(served, name, item) for item in hypotheses}
        show(name, scores, texts(name, batch=int(name == "native")), honest, REPLICATES)
    every = [
        row
        for batch in range(batches)
        for row in scored(served, "native", CLAIM, batch=batch, is_whole=True)
    ]
    show_nulls(every, NULLS)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache", type=Path, help="folder for weights, answers and scores")
    parser.add_argument("--batches", type=int, default=4, help="of honest answers, 96 rows each")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        quick()
    elif args.cache is None:
        parser.error("--cache FOLDER is needed; it takes some 600 MB")
    else:
        full(args.cache, args.batches)


if __name__ == "__main__":
    main()
