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
from dataclasses import dataclass, replace
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
NULLS = 100
CAUSE_TOKENS = 500
#: Rows stand in the same order everywhere, three to a prompt. `PART` of a batch is scored as
#: claimed, `FEW` under every hypothesis.
EVERY = tuple(range(96))
PART = tuple(row for row in EVERY if row % 5 < 2)
FEW = PART[::2]
PROMPTS_OF_PART = [row // 3 for row in PART]
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

HYPOTHESES = (
    CLAIM,
    Hypothesis(CauseKind.PRECISION, "nvfp4"),
    Hypothesis(CauseKind.PRECISION, "int8"),
    Hypothesis(CauseKind.SYSTEM_PROMPT, "agency"),
    Hypothesis(CauseKind.MODEL, "tuned"),
)

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


@dataclass(frozen=True, slots=True)
class Job:
    """Answers to score under one hypothesis: a batch of a variant, or some rows of it."""

    name: str
    hypothesis: Hypothesis
    rows: tuple[int, ...] = EVERY
    batch: int = 0

    def path(self, cache: Path) -> Path:
        """Where the scores are kept."""
        what = f"{self.hypothesis.kind.name}-{self.hypothesis.name}-{len(self.rows)}"
        return cache / f"scores-{self.name}-{self.batch}-{what}.pkl"


def score(served: Any, jobs: Sequence[Job]) -> None:
    """Score what the cache lacks; the weights are changed once per hypothesis."""
    from _audit_rows import NATIVE

    missing = [job for job in jobs if not job.path(served.cache).exists()]
    for hypothesis in dict.fromkeys(job.hypothesis for job in missing):
        supposed = replace(
            NATIVE,
            form=hypothesis.name if hypothesis.kind is CauseKind.PRECISION else None,
            is_tuned=hypothesis.kind is CauseKind.MODEL,
        )
        with served.as_variant(supposed) as model:
            for job in missing:
                if job.hypothesis == hypothesis:
                    rows = rows_of(served, job)
                    found = score_rows(model, rows, is_heated=hypothesis == CLAIM)
                    job.path(served.cache).write_bytes(pickle.dumps(found))
                    print(f"# scored {job.name} {job.batch}: {hypothesis}", flush=True)


def rows_of(served: Any, job: Job) -> list[AuditRow]:
    """The answers behind the prompts that the hypothesis supposes."""
    from _audit_rows import HIDDEN_SYSTEM, VARIANTS, generate

    variant = next(item for item in VARIANTS if item.name == job.name)
    answers = generate(served, variant, batch=job.batch)
    system = HIDDEN_SYSTEM if job.hypothesis.kind is CauseKind.SYSTEM_PROMPT else None
    return [
        audit_row(served.prompt_ids(int(answers.prompts[row]), system), answers.tokens[row])
        for row in job.rows
    ]


def scores_of(served: Any, job: Job) -> list[RowScores]:
    """From the cache."""
    return list(pickle.loads(job.path(served.cache).read_bytes()))


def sample_of(lengths: Sequence[int], tokens: int, rng: np.random.Generator) -> list[int]:
    """Rows in random order until they hold so many tokens."""
    found, total = [], 0
    for index in rng.permutation(len(lengths)):
        found.append(int(index))
        total += lengths[index]
        if total >= tokens:
            break
    return found


def p_values(rows: Sequence[RowScores]) -> dict[str, float]:
    """The audit's statistics that need nothing but the claim."""
    one, other = drift(rows).p, rank_test(rows).p
    return {"drift": one, "ranks": other, "both": combined_p([one, other])}


def at(scores: Scored, chosen: Sequence[int]) -> Scored:
    """Some rows under every hypothesis."""
    return {key: [rows[index] for index in chosen] for key, rows in scores.items()}


def power(rows: Sequence[RowScores], tokens: int, *, replicates: int) -> dict[str, float]:
    """Share of samples that are rejected at `LEVEL`, by statistic."""
    hits: dict[str, list[bool]] = {}
    for chosen in samples_of(rows, tokens, replicates):
        for name, p in p_values([rows[index] for index in chosen]).items():
            hits.setdefault(name, []).append(p < LEVEL)
    return {name: float(np.mean(seen)) for name, seen in hits.items()}


def power_of_likelihood(scores: Scored, tokens: int, *, replicates: int) -> dict[str, float]:
    """The same, of the test against the hypotheses."""
    seen = [
        name_cause(at(scores, chosen)).claim_p < LEVEL
        for chosen in samples_of(scores[CLAIM], tokens, replicates)
    ]
    return {"likelihood": float(np.mean(seen))} if seen else {}


def power_of_strings(
    rows: Sequence[RowScores], texts: list[str], honest: list[str], tokens: int, *, replicates: int
) -> dict[str, float]:
    """The same, of the string test on the same answers, against as many honest ones."""
    seen = []
    for number, chosen in enumerate(samples_of(rows, tokens, replicates)):
        prompts = [PROMPTS_OF_PART[index] for index in chosen]
        test = string_test(
            [texts[index] for index in chosen],
            [honest[index] for index in chosen],
            prompts=(prompts, prompts),
            permutations=200,
            seed=number,
        )
        seen.append(test.p < LEVEL)
    return {"strings": float(np.mean(seen))} if seen else {}


def samples_of(rows: Sequence[RowScores], tokens: int, replicates: int) -> list[list[int]]:
    """Samples of whole rows; none where there are not so many tokens."""
    lengths = [len(row) for row in rows]
    rng = np.random.default_rng(tokens)
    count = replicates if sum(lengths) >= tokens else 0
    return [sample_of(lengths, tokens, rng) for _ in range(count)]


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


def causes(scores: Scored, *, tokens: int, replicates: int) -> list[CauseKind]:
    """The cause that is named for each of some samples."""
    found = []
    for chosen in samples_of(scores[CLAIM], tokens, replicates):
        parts = at(scores, chosen)
        named = name_cause(parts)
        # As the audit does: what is not rejected has no cause.
        p = 2 * min(p_values(parts[CLAIM])["both"], named.claim_p)
        found.append(named.hypothesis.kind if p < LEVEL else CauseKind.AS_CLAIMED)
    return found


def show(
    name: str,
    rows: Sequence[RowScores],
    few: Scored | None = None,
    texts: tuple[list[str], list[str]] | None = None,
    *,
    replicates: int = REPLICATES,
) -> None:
    """One variant's lines of the table."""
    whole = drift(rows)
    print(
        f"\n{name}: {whole.tokens} tokens in {whole.rows} rows, drift {whole.mean_nats:+.3f} nats "
        f"(z {whole.z:+.1f}), deviation {whole.deviation_nats:.2f}"
    )
    for tokens in SIZES:
        found = power(rows, tokens, replicates=replicates)
        if few is not None:
            found |= power_of_likelihood(few, tokens, replicates=replicates)
        if texts is not None:
            found |= power_of_strings(rows, *texts, tokens, replicates=replicates // 4)
        if found:
            parts = "  ".join(f"{key} {share:.2f}" for key, share in found.items())
            print(f"  {tokens:>5} tokens: {parts}")
    if few is not None:
        named = causes(few, tokens=CAUSE_TOKENS, replicates=20)
        right = sum(kind is RIGHT[name] for kind in named)
        others = sorted({kind.value for kind in named if kind is not RIGHT[name]})
        print(f"  cause at {CAUSE_TOKENS} tokens: {right} of {len(named)} right; else {others}")


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
    show("honest", honest, replicates=20)
    show("shifted", shifted, replicates=20)
    show_nulls(honest, 50)
    assert power(shifted, 1_000, replicates=20)["drift"] > 0.9
    assert power(honest, 250, replicates=20)["both"] < 0.5


def full(cache: Path, batches: int) -> None:
    """Generate, score, and print the table."""
    import torch
    from _audit_rows import VARIANTS, Served, generate

    torch.set_num_threads(1)
    cache.mkdir(parents=True, exist_ok=True)
    served = Served(cache)
    for variant in VARIANTS:
        generate(served, variant, batch=0)
    score(served, jobs_of(batches))

    def texts(name: str, batch: int) -> list[str]:
        variant = next(item for item in VARIANTS if item.name == name)
        tokens = generate(served, variant, batch=batch).tokens
        return [served.tokenizer.decode(tokens[row][tokens[row] >= 0]) for row in PART]

    honest = texts("native", 0)
    for name in RIGHT:
        few = {item: scores_of(served, Job(name, item, FEW)) for item in HYPOTHESES}
        rows = scores_of(served, Job(name, CLAIM, PART))
        # Against honest answers with other seeds, also where the answers are honest.
        show(name, rows, few, (texts(name, int(name == "native")), honest))
    every = [
        row
        for batch in range(batches)
        for row in scores_of(served, Job("native", CLAIM, batch=batch))
    ]
    show_nulls(every, NULLS)


def jobs_of(batches: int) -> list[Job]:
    """All that the table needs."""
    return [
        *(Job(name, CLAIM, PART) for name in RIGHT),
        *(Job(name, item, FEW) for item in HYPOTHESES for name in RIGHT),
        *(Job("native", CLAIM, batch=batch) for batch in range(batches)),
    ]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache", type=Path, help="folder for weights, answers and scores")
    parser.add_argument("--batches", type=int, default=2, help="of honest answers, 96 rows each")
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
