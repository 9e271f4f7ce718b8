"""How many tokens an audit takes, how often it cries wolf, and whether it names the cause.

    python benchmarks/audit_power.py --cache FOLDER     # half an hour of CPU at first
    python benchmarks/audit_power.py --small            # honest against nvfp4 alone, some minutes
    python benchmarks/audit_power.py --quick            # arithmetic of the table on made-up scores

A small model (see `_audit_rows.py`) answers 20 prompts ten times as claimed, and in six other ways.
Samples of whole rows, up to a number of tokens, are judged as the audit judges; beside them stands
the string test that needs no weights, on as many tokens of whole prompts. Answers and scores are
kept in FOLDER, and a rerun goes on from there. Needs the extra `quantroute[audit]`.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from quantroute.audit import (
    AuditRow,
    Cause,
    CauseKind,
    Hypothesis,
    RowScores,
    SamplingClaim,
    combined_p,
    drift,
    fit_temperature,
    name_cause,
    rank_test,
    score_rows,
    string_test,
)

SIZES = (100, 250, 500, 1_000, 2_500, 5_000)
REPLICATES = 100
LEVEL = 0.05
LOOKS = 3  # as the audit counts: departure, likelihood, forbidden tokens (of which there are none)
NULL_SIZES = (250, 500, 1_000)
CAUSE_TOKENS = 1_000
CLAIM = Hypothesis(CauseKind.AS_CLAIMED)
#: Which cause is right for each way of serving. int8 holds what int4 holds: nothing to be seen.
RIGHT = {
    "native": CauseKind.AS_CLAIMED,
    "engine": CauseKind.AS_CLAIMED,
    "int8": CauseKind.AS_CLAIMED,
    "nvfp4": CauseKind.PRECISION,
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

Scored = Mapping[Hypothesis, Sequence[RowScores]]


# -- answers and their scores, from the cache or made ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A batch of a variant's answers, to score under one hypothesis."""

    name: str
    hypothesis: Hypothesis
    batch: int = 0

    def path(self, cache: Path) -> Path:
        """Where the scores are kept."""
        what = f"{self.hypothesis.kind.name}-{self.hypothesis.name}"
        return cache / f"scores-{self.name}-{self.batch}-{what}.pkl"


def jobs_of(batches: int) -> list[Job]:
    """All that the tables need; honest answers in several batches."""
    return [
        *(Job(name, item) for item in HYPOTHESES for name in RIGHT),
        *(Job("native", item, batch) for item in HYPOTHESES for batch in range(1, batches)),
    ]


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
                    found = score_rows(model, rows_of(served, job), is_heated=hypothesis == CLAIM)
                    job.path(served.cache).write_bytes(pickle.dumps(found))
                    print(f"# scored {job.name} {job.batch}: {hypothesis}", flush=True)


def rows_of(served: Any, job: Job) -> list[AuditRow]:
    """The answers behind the prompts that the hypothesis supposes."""
    from _audit_rows import HIDDEN_SYSTEM

    answers = answers_of(served, job.name, job.batch)
    system = HIDDEN_SYSTEM if job.hypothesis.kind is CauseKind.SYSTEM_PROMPT else None
    return [
        audit_row(served.prompt_ids(int(prompt), system), tokens)
        for prompt, tokens in zip(answers.prompts, answers.tokens, strict=True)
    ]


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


def answers_of(served: Any, name: str, batch: int) -> Any:
    """Generated, or from the cache."""
    from _audit_rows import VARIANTS, generate

    variant = next(item for item in VARIANTS if item.name == name)
    return generate(served, variant, batch=batch)


def texts_of(served: Any, name: str, batch: int) -> list[str]:
    """Of every answer."""
    tokens = answers_of(served, name, batch).tokens
    return [served.tokenizer.decode(row[row >= 0]) for row in tokens]


def scored(served: Any, name: str, batch: int = 0) -> Scored:
    """A batch under every hypothesis."""
    return {item: scores_of(served, Job(name, item, batch)) for item in HYPOTHESES}


def scores_of(served: Any, job: Job) -> list[RowScores]:
    """From the cache."""
    return list(pickle.loads(job.path(served.cache).read_bytes()))


# -- one sample ------------------------------------------------------------------------------------


def at(scores: Scored, chosen: Sequence[int]) -> Scored:
    """Some rows under every hypothesis."""
    return {key: [rows[index] for index in chosen] for key, rows in scores.items()}


@dataclass(frozen=True, slots=True)
class Judged:
    """p-values of each part and of the whole, and the cause as the audit would report it."""

    p: dict[str, float]
    cause: Cause

    @classmethod
    def of(cls, scores: Scored, *, seed: int = 0) -> Judged:
        """Judge rows as the audit does."""
        one, other = drift(scores[CLAIM]).p, rank_test(scores[CLAIM], seed=seed).p
        cause, both = name_cause(scores), combined_p([one, other])
        whole = min(1.0, LOOKS * min(both, cause.claim_p))
        ps = {"drift": one, "ranks": other, "likelihood": cause.claim_p, "verdict": whole}
        return cls(ps, cause)

    @property
    def named(self) -> CauseKind:
        """What is not rejected has no cause; what is rejected is not as claimed."""
        if self.p["verdict"] >= LEVEL:
            return CauseKind.AS_CLAIMED
        kind = self.cause.hypothesis.kind
        return CauseKind.UNKNOWN if kind is CauseKind.AS_CLAIMED else kind


def samples_of(rows: Sequence[RowScores], tokens: int, replicates: int) -> Iterator[list[int]]:
    """Samples of whole rows; none where there are not so many tokens."""
    lengths = [len(row) for row in rows]
    rng = np.random.default_rng(tokens)
    for _ in range(replicates if sum(lengths) >= tokens else 0):
        order = rng.permutation(len(lengths))
        sums = np.cumsum([lengths[index] for index in order])
        yield [int(index) for index in order[: int(np.searchsorted(sums, tokens)) + 1]]


def parts_of(rows: Sequence[RowScores], tokens: int) -> Iterator[list[int]]:
    """Disjoint parts of at least so many tokens, rows in random order."""
    part, total = list[int](), 0
    for index in np.random.default_rng(0).permutation(len(rows)):
        part.append(int(index))
        total += len(rows[index])
        if total >= tokens:
            yield part
            part, total = [], 0


# -- the tables ------------------------------------------------------------------------------------


def shares(found: Sequence[Judged]) -> dict[str, float]:
    """Share that is rejected at `LEVEL`, by statistic."""
    names = found[0].p if found else ()
    return {name: float(np.mean([item.p[name] < LEVEL for item in found])) for name in names}


def power_of_strings(
    lengths: Sequence[int],
    prompts: Sequence[int],
    texts: tuple[list[str], list[str]],
    tokens: int,
    *,
    replicates: int,
) -> float | None:
    """Of the string test, on whole prompts with all their answers, against as many honest ones."""
    rng, seen = np.random.default_rng(tokens), list[bool]()
    for number in range(replicates if sum(lengths) >= tokens else 0):
        chosen, total = list[int](), 0
        for prompt in rng.permutation(np.unique(prompts)):
            own = [index for index, name in enumerate(prompts) if name == prompt]
            chosen += own
            total += sum(lengths[index] for index in own)
            if total >= tokens:
                break
        names = [prompts[index] for index in chosen]
        found, honest = ([part[index] for index in chosen] for part in texts)
        test = string_test(found, honest, prompts=(names, names), permutations=199, seed=number)
        seen.append(test.p < LEVEL)
    return float(np.mean(seen)) if seen else None


def show(
    name: str,
    scores: Scored,
    *,
    prompts: Sequence[int] = (),
    texts: tuple[list[str], list[str]] | None = None,
    replicates: int = REPLICATES,
) -> None:
    """One variant's lines of the table."""
    rows = scores[CLAIM]
    whole, fit = drift(rows), fit_temperature(rows)
    print(
        f"\n{name}: {whole.tokens} tokens in {whole.rows} rows, drift {whole.mean_nats:+.3f} nats "
        f"({whole.low:+.3f} to {whole.high:+.3f}), z {whole.z:+.1f}, deviation "
        f"{whole.deviation_nats:.2f}, ranks p {rank_test(rows).p:.2g}, temperature x"
        f"{fit.factor:.3f} ({fit.low:.3f} to {fit.high:.3f})"
    )
    lengths = [len(row) for row in rows]
    for tokens in SIZES:
        chosen = samples_of(rows, tokens, replicates)
        found = shares([Judged.of(at(scores, sample)) for sample in chosen])
        if texts is not None:
            share = power_of_strings(lengths, prompts, texts, tokens, replicates=replicates // 2)
            found |= {} if share is None else {"strings": share}
        if found:
            parts = "  ".join(f"{key} {share:.2f}" for key, share in found.items())
            print(f"  {tokens:>5} tokens: {parts}", flush=True)
    if name in RIGHT:
        show_causes(name, scores)


def show_causes(name: str, scores: Scored) -> None:
    """Causes named for disjoint parts: with every hypothesis, and without the right one."""
    parts = [at(scores, part) for part in parts_of(scores[CLAIM], CAUSE_TOKENS)]
    named = Counter(Judged.of(part).named.value for part in parts)
    right = named[RIGHT[name].value]
    print(f"  cause at {CAUSE_TOKENS} tokens: {right} of {len(parts)} right; {dict(named)}")
    if any(item.kind is RIGHT[name] for item in HYPOTHESES[1:]):
        less = [
            {key: rows for key, rows in part.items() if key.kind is not RIGHT[name]}
            for part in parts
        ]
        blind = Counter(Judged.of(part).named.value for part in less)
        print(f"  cause if nobody thought of it: {dict(blind)}")


def show_nulls(scores: Scored, sizes: Sequence[int] = NULL_SIZES) -> None:
    """Rejections among disjoint parts of honest rows, with what the nominal rate allows."""
    rows = scores[CLAIM]
    whole = drift(rows)
    print(
        f"\nhonest: {whole.tokens} tokens in {whole.rows} rows, drift {whole.mean_nats:+.4f} nats "
        f"(z {whole.z:+.1f}), ranks p {rank_test(rows).p:.2g}"
    )
    for tokens in sizes:
        found = [
            Judged.of(at(scores, part), seed=seed)
            for seed, part in enumerate(parts_of(rows, tokens))
        ]
        low, high = stats.binom.interval(0.99, len(found), LEVEL)
        hits = {name: round(share * len(found)) for name, share in shares(found).items()}
        print(
            f"false positives at {LEVEL:.0%} among {len(found)} disjoint honest parts of {tokens} "
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

    honest, shifted = {CLAIM: rows(0.0)}, {CLAIM: rows(0.5)}
    show("honest", honest, replicates=20)
    show("shifted", shifted, replicates=20)
    show_nulls(honest, (100,))
    for scores, tokens, is_seen in ((shifted, 1_000, True), (honest, 250, False)):
        found = [Judged.of(at(scores, part)) for part in samples_of(scores[CLAIM], tokens, 20)]
        assert (shares(found)["drift"] > 0.5) is is_seen


def small(cache: Path) -> None:
    """Whether a thousand tokens tell nvfp4 from int4 and name it, and honest ones pass."""
    import torch
    from _audit_rows import Served

    torch.set_num_threads(1)
    served = Served(cache, rollouts=5)
    score(served, [Job(name, item) for item in HYPOTHESES[:2] for name in ("native", "nvfp4")])
    for name in ("native", "nvfp4"):
        scores = {item: scores_of(served, Job(name, item)) for item in HYPOTHESES[:2]}
        parts = list(parts_of(scores[CLAIM], CAUSE_TOKENS))
        named = Counter(Judged.of(at(scores, part)).named for part in parts)
        print(f"{name}: {named[RIGHT[name]]} of {len(parts)} parts of {CAUSE_TOKENS} tokens right")
        assert named.total() >= 4, "fewer tokens than expected"
        assert named.total() - named[RIGHT[name]] <= 1, named


def full(cache: Path, batches: int) -> None:
    """Generate, score, and print the tables."""
    import torch

    torch.set_num_threads(1)
    cache.mkdir(parents=True, exist_ok=True)
    from _audit_rows import Served

    served = Served(cache)
    for name in RIGHT:
        answers_of(served, name, 0)
    score(served, jobs_of(batches))
    prompts = [int(prompt) for prompt in answers_of(served, "native", 0).prompts]
    honest = texts_of(served, "native", 1)
    for name in RIGHT:
        texts = texts_of(served, name, 0), honest
        show(name, scored(served, name), prompts=prompts, texts=texts)
    every = [scored(served, "native", batch) for batch in range(batches)]
    show_nulls({item: [row for part in every for row in part[item]] for item in HYPOTHESES})


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache", type=Path, help="folder for weights, answers and scores")
    parser.add_argument("--batches", type=int, default=5, help="of honest answers, 200 rows each")
    parser.add_argument("--small", action="store_true", help="with or without --cache")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        quick()
    elif args.small:
        with tempfile.TemporaryDirectory() as scratch:
            small(args.cache or Path(scratch))
    elif args.cache is None:
        parser.error("--cache FOLDER is needed; it takes some 600 MB")
    elif args.batches < 2:
        parser.error("--batches: at least 2, since the string test compares two of them")
    else:
        full(args.cache, args.batches)


if __name__ == "__main__":
    main()
