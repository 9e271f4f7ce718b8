"""The audit from states that extraction has stored: the head alone runs, not the model.

The last state before the final norm, that norm, and the head's matrix give the target's logits for
every token that is stored. The claim needs no more. What else may have served an answer does need
the model; it is asked for those endpoints only that depart from the claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from quantroute.audit._causes import fit_of
from quantroute.audit._judging import CLAIM, EDGE_SHARE, AuditSettings, conclude, to_score
from quantroute.audit._report import AuditReport
from quantroute.audit._rows import CLASSES, AuditRow, Intake, example_row
from quantroute.audit._scores import RowScores, joined
from quantroute.audit._scoring import score_logits
from quantroute.audit._statistics import outside_test
from quantroute.audit._target import Target
from quantroute.audit._weights import Found, score_others
from quantroute.errors import ConfigurationError
from quantroute.evaluation import TargetWeights
from quantroute.extraction import FinalNorm, States, StateStore
from quantroute.extraction import Target as FolderOfTarget

if TYPE_CHECKING:
    import torch

__all__ = ["TargetHead", "audit_states", "score_states"]

#: Tokens whose logits are in memory at once: 512 of a vocabulary of 160,000 are 330 MB.
_TOKENS_AT_ONCE: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHead:
    """What leads from a stored last state to logits: the final norm, then `weight` [V, H]."""

    norm: FinalNorm
    weight: torch.Tensor
    name: str = ""

    @classmethod
    def read(cls, folder: Path | str, store: StateStore, *, device: str = "cpu") -> Self:
        """The norm out of the store, the head out of the target's folder; no more of it is loaded.

        Raises:
            ConfigurationError: the states are another target's, or logits take more than the head.
            DatasetError: there is no head under a usual name.
        """
        target = FolderOfTarget.read(folder)
        if target.config_sha256() != store.manifest["target"]["config_sha256"]:
            raise ConfigurationError(
                f"{folder}: its config.json is not that of the target whose states are stored"
            )
        weights = TargetWeights.read(folder)
        if not weights.is_bare:
            raise ConfigurationError(
                f"{folder}: its logits are more than states times head (a bias, a scale or a cap); "
                "audit by rows instead"
            )
        return cls(
            norm=store.final_norm(),
            weight=weights.head.float().to(device),
            name=target.folder.name,
        )

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of last states [T, H], in float32."""
        normed = self.norm.apply(last).to(self.weight.device)
        return normed.float() @ self.weight.T


def score_states(states: States, row: AuditRow, head: TargetHead) -> RowScores:
    """Scores of an answer under the claim, from the states of the tokens before each of its own."""
    import torch

    ids = torch.as_tensor(row.input_ids, device=head.weight.device)
    parts = []
    for start in range(row.start, len(row.input_ids), _TOKENS_AT_ONCE):
        end = min(start + _TOKENS_AT_ONCE, len(row.input_ids))
        logits = head.logits(states.hidden[start - 1 : end - 1, -1])
        parts.append(score_logits(logits, ids[start:end], row.claim))
    return replace(joined(parts), position=np.arange(row.answer_tokens, dtype=np.float64))


def audit_states(
    store: StateStore,
    head: TargetHead,
    settings: AuditSettings | None = None,
    *,
    load: Callable[[], Target] | None = None,
    date: str = "",
    run: str = "",
) -> AuditReport:
    """Judge the endpoints whose answers are in a store of hidden states.

    Args:
        load: gives the whole target, and is called only if an endpoint departs from the claim; then
            that one's answers are scored under the settings' formats and models as well. Without,
            departures are seen, and only another temperature can be named.
        date, run: put into the report as they are.
    Raises:
        DatasetError: there is nothing to score.
        ConfigurationError: the reference is not among the endpoints; the states are stored as
            float8 and there is none; or other prompts are to be supposed, which needs rows.
    """
    settings = settings or AuditSettings()
    _refuse(store, settings)
    intakes, scores, facts = _claimed(store, head, settings)
    kept = to_score(intakes, settings)
    trusted = None if settings.reference is None else scores[settings.reference][CLAIM]
    suspects = {
        name: intake
        for name, intake in kept.items()
        if _departs(scores[name][CLAIM], trusted, settings)
    }
    hypotheses: tuple[str, ...] = ()
    if suspects and load is not None and (settings.formats or settings.models):
        hypotheses, _ = score_others(load(), suspects, scores, settings)
    return conclude(
        intakes,
        scores,
        settings,
        model=facts.model,
        target=head.name,
        hypotheses=hypotheses,
        caveats=_caveats(facts, hypotheses),
        date=date,
        run=run,
    )


@dataclass(slots=True)
class _Facts:
    """What was met on the way."""

    model: str = ""
    missing_classes: frozenset[str] = CLASSES


def _claimed(
    store: StateStore, head: TargetHead, settings: AuditSettings
) -> tuple[dict[str, Intake], Found, _Facts]:
    """Every endpoint's answers, and their scores under the claim."""
    intakes: dict[str, Intake] = {}
    own: dict[int, RowScores] = {}
    facts = _Facts()
    for states in store:
        known = states.example.provenance
        facts.model = facts.model or str(known.get("model") or "")
        facts.missing_classes -= {known.get("row_class")}
        intake = intakes.setdefault(str(known.get("endpoint")), Intake())
        if settings.most_tokens and intake.tokens >= settings.most_tokens:
            continue
        try:
            row = example_row(states.example)
        except ConfigurationError:
            intake.left_out["sampling_not_testable"] += 1
            continue
        intake.rows.append(row)
        intake.tokens += row.answer_tokens
        own[id(row)] = score_states(states, row, head)
    for intake in intakes.values():
        intake.settle()
    scores: Found = {
        name: {CLAIM: [own[id(row)] for row in intake.rows]} for name, intake in intakes.items()
    }
    return intakes, scores, facts


def _refuse(store: StateStore, settings: AuditSettings) -> None:
    if settings.system_prompts or settings.templates:
        raise ConfigurationError(
            "stored states are those of one prompt: system_prompts and templates can be supposed "
            "from rows alone"
        )
    if store.manifest["states"]["scales"] is not None and settings.reference is None:
        raise ConfigurationError(
            "the states are stored as float8, whose rounding every endpoint would be blamed for: "
            "name a reference, or audit by rows"
        )


def _departs(
    rows: list[RowScores], reference: list[RowScores] | None, settings: AuditSettings
) -> bool:
    """Whether it is worth the model to ask why."""
    seen = [fit_of(rows), outside_test(rows, allowed_share=EDGE_SHARE).p]
    if reference is not None:
        seen.append(fit_of(rows, reference=reference))
    return min(seen) < settings.alpha


def _caveats(facts: _Facts, hypotheses: tuple[str, ...]) -> tuple[str, ...]:
    found = ["scored from stored states"]
    if hypotheses:
        found[0] += "; other hypotheses for the endpoints alone that depart from the claim"
    if facts.missing_classes >= {"truncated", "loop"}:
        found.append(
            "no stored answer was cut or loops: if extraction left such out, the rest is chosen by "
            'its text; extract with classes = ["good", "truncated", "loop"], or compare with a '
            "reference"
        )
    return tuple(found)
