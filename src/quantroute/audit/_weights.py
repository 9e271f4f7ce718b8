"""The audit with the target's weights: rows in, a report per endpoint out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantroute.audit._causes import CauseKind, Hypothesis
from quantroute.audit._judging import CLAIM, AuditSettings, conclude, to_score
from quantroute.audit._report import AuditReport
from quantroute.audit._rows import AuditRow, Intake, audit_rows_of, with_system
from quantroute.audit._scores import RowScores
from quantroute.audit._target import Target, load_model, score_rows
from quantroute.errors import ConfigurationError
from quantroute.extraction import TargetTokenizer

__all__ = ["audit_weights", "score_others"]

Rows = Callable[[], Iterable[Mapping[str, Any]]]
Change = Callable[[Iterable[Mapping[str, Any]]], Iterator[Mapping[str, Any]]]
Found = dict[str, dict[Hypothesis, list[RowScores]]]


def audit_weights(
    rows: Rows,
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
    kept = to_score(intakes, settings)
    scores: Found = {name: {} for name in kept}
    _score(CLAIM, target.model, kept, scores)
    hypotheses, impossible = score_others(target, kept, scores, settings, rows=rows)
    return conclude(
        intakes,
        scores,
        settings,
        model=model,
        target=target.name,
        hypotheses=hypotheses,
        caveats=tuple(
            f"{name}: not compared, these conversations cannot be rendered so"
            for name in impossible
        ),
        date=date,
        run=run,
    )


def score_others(
    target: Target,
    kept: Mapping[str, Intake],
    scores: Found,
    settings: AuditSettings,
    *,
    rows: Rows | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add to `scores` those under every other hypothesis: one pass of the weights for each.

    Args:
        rows: needed to suppose other prompts or templates; without, there are none to suppose.
    Returns:
        The names of the hypotheses, and of those under which these answers cannot be rendered.
    """
    names: list[Hypothesis] = []
    impossible: list[Hypothesis] = []
    for form in settings.formats:
        names.append(Hypothesis(CauseKind.PRECISION, form))
        with target.in_format(form):
            _score(names[-1], target.model, kept, scores)
    if rows is not None:
        for supposed, change, tokenizer in _other_prompts(target, settings):
            answers = _prompted(rows, kept, settings, change, tokenizer)
            if answers is None:
                impossible.append(supposed)
                continue
            names.append(supposed)
            _score(supposed, target.model, kept, scores, answers)
    for folder in settings.models:
        names.append(Hypothesis(CauseKind.MODEL, folder.name))
        _score(names[-1], _other(folder, target), kept, scores)
    return tuple(map(str, names)), tuple(map(str, impossible))


def _score(
    hypothesis: Hypothesis,
    model: Any,
    kept: Mapping[str, Intake],
    scores: Found,
    answers: Sequence[AuditRow] | None = None,
) -> None:
    """All endpoints' answers together; `answers` are the same ones after other prompts."""
    if answers is None:
        answers = [row for intake in kept.values() for row in intake.rows]
    results = iter(score_rows(model, answers, is_heated=hypothesis == CLAIM))
    for name, intake in kept.items():
        scores[name][hypothesis] = list(itertools.islice(results, len(intake.rows)))


def _other(folder: Path, target: Target) -> Any:
    model = load_model(folder, device=str(target.model.device))
    if model.config.vocab_size != target.model.config.vocab_size:
        raise ConfigurationError(
            f"{folder}: {model.config.vocab_size} tokens in its vocabulary, the target has "
            f"{target.model.config.vocab_size}; only models with one tokenizer compare"
        )
    return model


def _other_prompts(
    target: Target, settings: AuditSettings
) -> Iterator[tuple[Hypothesis, Change, TargetTokenizer]]:
    """What conversations may be rendered to instead: how rows change, and by which tokenizer."""
    own = target.tokenizer
    for text in settings.system_prompts:
        supposed = Hypothesis(CauseKind.SYSTEM_PROMPT, _short(text))
        yield supposed, partial(with_system, text=text), own
    for path in settings.templates:
        other = TargetTokenizer.load(own.folder, template=path, trust_remote_code=own.remote_code)
        yield Hypothesis(CauseKind.TEMPLATE, path.stem), iter, other


def _prompted(
    rows: Rows,
    kept: Mapping[str, Intake],
    settings: AuditSettings,
    change: Change,
    tokenizer: TargetTokenizer,
) -> list[AuditRow] | None:
    """The same answers after other prompts; None if the template does not allow that."""
    wanted = [row for intake in kept.values() for row in intake.rows]
    keys = {row.key[0] for row in wanted}
    chosen = (row for row in rows() if _key(row) in keys)
    intakes = audit_rows_of(change(chosen), tokenizer, settings=settings.tokens)
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
