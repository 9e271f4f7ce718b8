"""Scores of every endpoint to verdicts: pure, whatever the scores were made from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import scipy

from quantroute.audit._causes import Cause, CauseKind, Hypothesis, fit_of, name_cause
from quantroute.audit._compare import Gap, drift_gap
from quantroute.audit._formats import FORMATS
from quantroute.audit._report import AuditReport, EndpointReport, Outcome
from quantroute.audit._rows import Intake
from quantroute.audit._scores import RowScores
from quantroute.audit._statistics import (
    drift,
    fit_temperature,
    holm,
    outside_test,
    rank_test,
    strata_test,
    tokens_needed,
)
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction import TokenSettings

__all__ = ["CLAIM", "EDGE_SHARE", "AuditSettings", "Scores", "conclude", "judge_scores", "to_score"]

CLAIM: Final = Hypothesis(CauseKind.AS_CLAIMED)
#: Share of forbidden tokens that rounding at the nucleus' edge may bring.
EDGE_SHARE: Final = 2e-3
_LOOKS: Final = 3

Scores = Mapping[Hypothesis, Sequence[RowScores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How an audit is made.

    Attributes:
        formats: precisions to compare with: the target's weights, rounded once more.
        system_prompts: texts that an endpoint may put before conversations.
        templates: files of chat templates that it may render conversations with.
        models: folders of other models with the same tokenizer.
        reference: tag of an endpoint that is trusted (the model author's own).
        most_tokens: per endpoint; 0 for all.
        power: how surely a departure is to be seen, for "tokens needed" and "would see".
        fewest_tokens: below, an endpoint that shows nothing does not pass either.
        tokens: how rows become tokens; by default every class of answers that carries text.
    """

    formats: tuple[str, ...] = ("nvfp4", "mxfp4", "fp8", "int8")
    system_prompts: tuple[str, ...] = ()
    templates: tuple[Path, ...] = ()
    models: tuple[Path, ...] = ()
    reference: str | None = None
    alpha: float = 0.05
    power: float = 0.9
    most_tokens: int = 20_000
    fewest_tokens: int = 1_000
    tokens: TokenSettings | None = None

    def __post_init__(self) -> None:
        if unknown := [form for form in self.formats if form not in (*FORMATS, "fp8")]:
            raise ConfigurationError(
                f"unknown weight format {unknown[0]!r}; known: fp8, {', '.join(FORMATS)}"
            )
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"alpha must be within (0, 0.5), not {self.alpha}")
        if not 0.5 <= self.power < 1:
            raise ConfigurationError(f"power must be within [0.5, 1), not {self.power}")
        if self.most_tokens < 0 or self.fewest_tokens < 1:
            raise ConfigurationError("most_tokens and fewest_tokens must be positive")


def to_score(intakes: Mapping[str, Intake], settings: AuditSettings) -> dict[str, Intake]:
    """The endpoints that have answers to score, by name.

    Raises:
        DatasetError: none has.
        ConfigurationError: the reference has none.
    """
    kept = {name: intake for name, intake in sorted(intakes.items()) if intake.rows}
    if not kept:
        reasons = sum((intake.left_out for intake in intakes.values()), Counter[str]())
        why = ", ".join(f"{count} {name}" for name, count in reasons.most_common(3)) or "no rows"
        raise DatasetError(path="rows", problem=f"no answer can be scored ({why})")
    if settings.reference is not None and settings.reference not in kept:
        raise ConfigurationError(
            f"reference {settings.reference!r} has no answers here; endpoints: {', '.join(kept)}"
        )
    return kept


def conclude(
    intakes: Mapping[str, Intake],
    scores: Mapping[str, Scores],
    settings: AuditSettings,
    *,
    model: str,
    target: str,
    hypotheses: tuple[str, ...] = (),
    caveats: tuple[str, ...] = (),
    date: str = "",
    run: str = "",
) -> AuditReport:
    """The report; endpoints without answers to score are said to be skipped."""
    kept = to_score(intakes, settings)
    skipped = {name: dict(item.left_out) for name, item in intakes.items() if name not in kept}
    return AuditReport(
        model=model,
        target=target,
        reference=settings.reference,
        alpha=settings.alpha,
        endpoints=judge_scores(kept, scores, settings),
        hypotheses=hypotheses,
        caveats=caveats,
        skipped=skipped,
        date=date,
        run=run,
    )


def judge_scores(
    kept: Mapping[str, Intake], scores: Mapping[str, Scores], settings: AuditSettings
) -> tuple[EndpointReport, ...]:
    """A verdict on each endpoint, the clearest failure first.

    Args:
        kept: the answers of each endpoint.
        scores: of the same answers in the same order, under AS_CLAIMED and any other hypotheses.
    """
    reference = None if settings.reference is None else scores[settings.reference][CLAIM]
    drafts = [
        _draft(
            name,
            kept[name],
            scores[name],
            None if name == settings.reference else reference,
            settings,
        )
        for name in kept
    ]
    adjusted = holm([draft.p for draft in drafts])
    reports = [_concluded(draft, p, settings) for draft, p in zip(drafts, adjusted, strict=True)]
    return tuple(sorted(reports, key=lambda item: (item.p_adjusted, item.endpoint)))


def _draft(
    name: str,
    intake: Intake,
    scores: Scores,
    reference: Sequence[RowScores] | None,
    settings: AuditSettings,
) -> EndpointReport:
    rows = scores[CLAIM]
    found, fit = drift(rows), fit_temperature(rows)
    cause = name_cause(scores, reference=reference)
    outside = outside_test(rows, allowed_share=_edge_share(reference))
    departs_p = fit_of(rows, reference=reference)
    effect = (
        Gap(mean_nats=found.mean_nats, low=found.low, high=found.high, p=found.p)
        if reference is None
        else drift_gap(found, drift(reference))
    )
    seen = abs(effect.mean_nats) > 1e-9 and found.deviation_nats > 0
    needed = (
        tokens_needed(effect.mean_nats, found.deviation_nats, power=settings.power)
        if seen
        else None
    )
    return EndpointReport(
        endpoint=name,
        outcome=Outcome.PASSES,
        cause=cause,
        rows=len(rows),
        tokens=intake.tokens,
        left_out=dict(intake.left_out),
        drift=found,
        effect=effect,
        ranks=rank_test(rows),
        outside=outside,
        temperature=fit,
        by_entropy=strata_test(rows, factor=fit.factor, by="entropy"),
        by_position=strata_test(rows, factor=1.0, by="position"),
        claim_p=fit_of(rows),
        p=min(1.0, _LOOKS * min(departs_p, cause.claim_p, outside.p)),
        p_adjusted=1.0,
        tokens_needed=needed,
        detectable_nats=_detectable(found.deviation_nats, intake.tokens, power=settings.power),
        count_gaps=_gaps(row.count_gap for row in intake.rows),
        prompt_gaps=_gaps(row.prompt_gap for row in intake.rows),
    )


def _concluded(draft: EndpointReport, p: float, settings: AuditSettings) -> EndpointReport:
    if p < settings.alpha:
        outcome = Outcome.FAILS
    elif draft.tokens < settings.fewest_tokens:
        outcome = Outcome.TOO_FEW
    else:
        outcome = Outcome.PASSES
    return replace(draft, outcome=outcome, p_adjusted=p, cause=_cause(draft, outcome, settings))


def _cause(draft: EndpointReport, outcome: Outcome, settings: AuditSettings) -> Cause:
    """An endpoint that does not fail has no cause, whichever hypothesis happens to be likeliest."""
    if outcome is Outcome.FAILS:
        if draft.cause.hypothesis.kind is CauseKind.AS_CLAIMED:
            return replace(draft.cause, hypothesis=Hypothesis(CauseKind.UNKNOWN))
        return draft.cause
    departs = draft.claim_p < settings.alpha and settings.reference not in (None, draft.endpoint)
    kind = CauseKind.NOISE if departs else CauseKind.AS_CLAIMED
    return replace(draft.cause, hypothesis=Hypothesis(kind))


def _edge_share(reference: Sequence[RowScores] | None) -> float:
    if reference is None:
        return EDGE_SHARE
    seen = outside_test(reference, allowed_share=EDGE_SHARE)
    return max(EDGE_SHARE, 2 * seen.count / max(1, seen.tokens))


def _detectable(deviation_nats: float, tokens: int, *, power: float) -> float:
    quantiles = scipy.stats.norm.isf(0.025) + scipy.stats.norm.isf(1 - power)
    return float(quantiles) * deviation_nats / math.sqrt(max(1, tokens))


def _gaps(values: Iterable[int | None]) -> dict[int, int]:
    return dict(sorted(Counter(value for value in values if value is not None).items()))
