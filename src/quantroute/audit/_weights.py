"""The audit with the target's weights: rows in, a report per endpoint out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from scipy import stats

from quantroute.audit._causes import Cause, CauseKind, Hypothesis, fit_of, name_cause
from quantroute.audit._compare import Gap, drift_gap
from quantroute.audit._formats import FORMATS
from quantroute.audit._report import AuditReport, EndpointReport, Outcome
from quantroute.audit._rows import AuditRow, Intake, audit_rows_of, with_system
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
from quantroute.audit._target import Target, load_model, score_rows
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction import TokenSettings

__all__ = ["AuditSettings", "audit_weights"]

_CLAIM: Final = Hypothesis(CauseKind.AS_CLAIMED)
#: Share of forbidden tokens that rounding at the nucleus' edge may bring.
_EDGE_SHARE: Final = 2e-3
_LOOKS: Final = 3

Scores = dict[Hypothesis, list[RowScores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How an audit is made.

    Attributes:
        formats: precisions to compare with: the target's weights, rounded once more.
        system_prompts: texts that an endpoint may put before conversations.
        models: folders of other models with the same tokenizer.
        reference: tag of an endpoint that is trusted (the model author's own).
        most_tokens: per endpoint; 0 for all.
        fewest_tokens: below, an endpoint that shows nothing does not pass either.
        tokens: how rows become tokens; by default every class of answers that carries text.
    """

    formats: tuple[str, ...] = ("nvfp4", "mxfp4", "fp8", "int8")
    system_prompts: tuple[str, ...] = ()
    models: tuple[Path, ...] = ()
    reference: str | None = None
    alpha: float = 0.05
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
        if self.most_tokens < 0 or self.fewest_tokens < 1:
            raise ConfigurationError("most_tokens and fewest_tokens must be positive")


def audit_weights(
    rows: Callable[[], Iterable[Mapping[str, Any]]],
    target: Target,
    settings: AuditSettings | None = None,
    *,
    date: str = "",
    run: str = "",
) -> AuditReport:
    """Score every endpoint's answers under the claim and under what else may have served them.

    Args:
        rows: gives the exported rows, from the beginning each time it is called.
        date, run: put into the report as they are.
    Raises:
        DatasetError: there is nothing to score.
        ConfigurationError: the reference is not among the endpoints, or a folder cannot be loaded.
    """
    settings = settings or AuditSettings()
    model = ""

    def watched() -> Iterator[Mapping[str, Any]]:
        nonlocal model
        for row in rows():
            model = model or str(row.get("model") or "")
            yield row

    most = settings.most_tokens or None
    intakes = audit_rows_of(watched(), target.tokenizer, settings=settings.tokens, most_tokens=most)
    kept = {name: intake for name, intake in sorted(intakes.items()) if intake.rows}
    if not kept:
        reasons = sum((intake.left_out for intake in intakes.values()), Counter[str]())
        why = ", ".join(f"{count} {name}" for name, count in reasons.most_common(3)) or "no rows"
        raise DatasetError(path="rows", problem=f"no answer can be scored ({why})")
    if settings.reference is not None and settings.reference not in kept:
        raise ConfigurationError(
            f"reference {settings.reference!r} has no answers here; endpoints: {', '.join(kept)}"
        )
    scores = _score_all(rows, target, kept, settings)
    return AuditReport(
        model=model,
        target=target.name,
        reference=settings.reference,
        alpha=settings.alpha,
        endpoints=_judge(kept, scores, settings),
        hypotheses=tuple(str(item) for item in _names(settings)),
        skipped={
            name: dict(intake.left_out) for name, intake in intakes.items() if not intake.rows
        },
        date=date,
        run=run,
    )


def _names(settings: AuditSettings) -> list[Hypothesis]:
    return [
        *(Hypothesis(CauseKind.PRECISION, form) for form in settings.formats),
        *(Hypothesis(CauseKind.SYSTEM_PROMPT, _short(text)) for text in settings.system_prompts),
        *(Hypothesis(CauseKind.MODEL, folder.name) for folder in settings.models),
    ]


def _score_all(
    rows: Callable[[], Iterable[Mapping[str, Any]]],
    target: Target,
    kept: Mapping[str, Intake],
    settings: AuditSettings,
) -> dict[str, Scores]:
    """Every endpoint's answers under every hypothesis: one pass of the weights for each."""
    wanted = [row for intake in kept.values() for row in intake.rows]
    found: dict[str, Scores] = {name: {} for name in kept}

    def score(hypothesis: Hypothesis, model: Any, answers: Sequence[AuditRow]) -> None:
        results = iter(score_rows(model, answers, is_heated=hypothesis == _CLAIM))
        for name, intake in kept.items():
            found[name][hypothesis] = list(itertools.islice(results, len(intake.rows)))

    score(_CLAIM, target.model, wanted)
    for form in settings.formats:
        with target.in_format(form):
            score(Hypothesis(CauseKind.PRECISION, form), target.model, wanted)
    for text in settings.system_prompts:
        if (answers := _prompted(rows, target, wanted, text, settings)) is not None:
            score(Hypothesis(CauseKind.SYSTEM_PROMPT, _short(text)), target.model, answers)
    for folder in settings.models:
        score(Hypothesis(CauseKind.MODEL, folder.name), _other(folder, target), wanted)
    return found


def _other(folder: Path, target: Target) -> Any:
    model = load_model(folder, device=str(target.model.device))
    if model.config.vocab_size != target.model.config.vocab_size:
        raise ConfigurationError(
            f"{folder}: {model.config.vocab_size} tokens in its vocabulary, the target has "
            f"{target.model.config.vocab_size}; only models with one tokenizer compare"
        )
    return model


def _prompted(
    rows: Callable[[], Iterable[Mapping[str, Any]]],
    target: Target,
    wanted: Sequence[AuditRow],
    text: str,
    settings: AuditSettings,
) -> list[AuditRow] | None:
    """The same answers after other prompts; None if the template does not allow that."""
    keys = {row.key[0] for row in wanted}
    chosen = (row for row in rows() if _key(row) in keys)
    intakes = audit_rows_of(with_system(chosen, text), target.tokenizer, settings=settings.tokens)
    by_key = {row.key: row for intake in intakes.values() for row in intake.rows}
    found = []
    for row in wanted:
        other = by_key.get(row.key)
        if other is None or other.answer_tokens != row.answer_tokens:
            return None
        found.append(other)
    return found


def _key(row: Mapping[str, Any]) -> str:
    return str(row.get("key") or row.get("id") or "?")


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:39]}…"


# -- verdicts -------------------------------------------------------------------------------------


def _judge(
    kept: Mapping[str, Intake], scores: Mapping[str, Scores], settings: AuditSettings
) -> tuple[EndpointReport, ...]:
    reference = None if settings.reference is None else scores[settings.reference][_CLAIM]
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
    rows = scores[_CLAIM]
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
        tokens_needed=tokens_needed(effect.mean_nats, found.deviation_nats) if seen else None,
        detectable_nats=_detectable(found.deviation_nats, intake.tokens),
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
        return _EDGE_SHARE
    seen = outside_test(reference, allowed_share=_EDGE_SHARE)
    return max(_EDGE_SHARE, 2 * seen.count / max(1, seen.tokens))


def _detectable(deviation_nats: float, tokens: int) -> float:
    quantiles = stats.norm.isf(0.025) + stats.norm.isf(0.1)
    return float(quantiles) * deviation_nats / math.sqrt(max(1, tokens))


def _gaps(values: Iterable[int | None]) -> dict[int, int]:
    return dict(sorted(Counter(value for value in values if value is not None).items()))
