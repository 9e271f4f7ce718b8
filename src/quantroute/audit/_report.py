"""What an audit found, as values: per endpoint, and as a whole. JSON by `as_dict`."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from quantroute._html import notebook_table
from quantroute.audit._causes import Cause, CauseKind
from quantroute.audit._compare import Gap
from quantroute.audit._statistics import Drift, Outside, RankTest, Strata, TemperatureFit
from quantroute.domain import Quantization

__all__ = ["AuditReport", "EndpointReport", "Finding", "Outcome", "plain"]


class Outcome(enum.Enum):
    """The verdict on one endpoint."""

    PASSES = "passes"  # nothing speaks against it, and enough was looked at
    FAILS = "fails"  # departs from the claim, after adjusting for the number of endpoints
    TOO_FEW = "too few tokens"  # nothing speaks against it, but little was looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit has to say about one endpoint to a policy."""

    endpoint: str
    failed: bool
    served: Quantization
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """One endpoint.

    Attributes:
        left_out: answers that were not scored, by reason.
        effect: drift above the claim, or above the reference endpoint's where there is one.
        claim_p: of the claim as such: drift and rank positions.
        p: the whole evidence: departure (from the reference where there is one), likelihood of
            other causes, forbidden tokens; times three for three looks.
        p_adjusted: for the number of endpoints (Holm).
        tokens_needed: to see the effect at 5% with the power that was set; None for no effect.
        detectable_nats: the drift that so many tokens show at 5% with that power.
        count_gaps, prompt_gaps: how many answers by own tokens minus billed ones.
    """

    endpoint: str
    outcome: Outcome
    cause: Cause
    rows: int
    tokens: int
    left_out: Mapping[str, int]
    drift: Drift
    effect: Gap
    ranks: RankTest
    outside: Outside
    temperature: TemperatureFit
    by_entropy: Strata
    by_position: Strata
    claim_p: float
    p: float
    p_adjusted: float
    tokens_needed: int | None
    detectable_nats: float
    count_gaps: Mapping[int, int] = field(default_factory=dict)
    prompt_gaps: Mapping[int, int] = field(default_factory=dict)

    @property
    def retokenized_share(self) -> float:
        """Share of answers whose tokens were not those that were billed."""
        gone = self.left_out.get("token_count_differs", 0)
        return gone / (gone + self.rows) if gone else 0.0

    @property
    def usual_prompt_gap(self) -> int | None:
        """What most prompts' own count differs by from the billed one."""
        return max(self.prompt_gaps, key=self.prompt_gaps.__getitem__, default=None)

    @property
    def cause_text(self) -> str:
        """The cause, and how sure it is."""
        if self.outcome is not Outcome.FAILS:
            return str(self.cause.hypothesis)
        if self.cause.hypothesis != self.cause.nearest:
            return f"{self.cause.hypothesis} (nearest: {self.cause.nearest})"
        return f"{self.cause.hypothesis} ({self.cause.confidence:.0%})"

    @property
    def hints(self) -> tuple[str, ...]:
        """What a reader should know besides, in sentences."""
        found = []
        gap = self.usual_prompt_gap
        if gap is not None and gap < -2:
            found.append(
                f"prompts were billed with {-gap} tokens more than the template makes: a system "
                "prompt or another template"
            )
        if self.retokenized_share > 0.2:
            found.append(
                f"{self.retokenized_share:.0%} of the answers have other tokens than were billed: "
                "another tokenizer, hidden text, or tokens that text does not show"
            )
        if self.cause.hypothesis.kind is CauseKind.UNKNOWN and _is_early(self.by_position):
            found.append(
                "the departure sits at the beginning of answers, as hidden instructions would"
            )
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All endpoints of an audit, the clearest failure first.

    Attributes:
        method: "weights" or "strings".
        hypotheses: what was compared besides the claim and another temperature.
        caveats: what a reader should know of the whole, in sentences.
    """

    model: str
    target: str
    reference: str | None
    alpha: float
    endpoints: tuple[EndpointReport, ...]
    hypotheses: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    date: str = ""
    run: str = ""
    method: str = "weights"

    @property
    def failed(self) -> tuple[EndpointReport, ...]:
        """Endpoints that do not serve what they claim."""
        return tuple(item for item in self.endpoints if item.outcome is Outcome.FAILS)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Failures, with the served format where it is the cause; and what passed."""
        return tuple(
            Finding(
                endpoint=item.endpoint,
                failed=item.outcome is Outcome.FAILS,
                served=_served(item),
                note=f"{item.cause.hypothesis}; effect {item.effect.mean_nats:+.4f} nats a token "
                f"(95% {item.effect.low:+.4f} to {item.effect.high:+.4f}) over {item.tokens} "
                f"tokens, adjusted p {item.p_adjusted:.2g}; {item.detectable_nats:.4f} nats would "
                "have been seen",
            )
            for item in self.endpoints
            if item.outcome is not Outcome.TOO_FEW
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was compared, and what a reader should know of single endpoints, in sentences."""
        against = f"against {self.reference}" if self.reference else "against the claim itself"
        compared = ", ".join(self.hypotheses) or "nothing"
        lines = [f"effect {against}; compared besides another temperature: {compared}"]
        lines += self.caveats
        for item in self.endpoints:
            lines += [f"{item.endpoint}: {hint}" for hint in item.hints]
            if item.left_out:
                lines.append(f"{item.endpoint}: answers not scored: {_counts(item.left_out)}")
        lines += [
            f"{name}: no answer could be scored: {_counts(reasons)}"
            for name, reasons in self.skipped.items()
        ]
        return tuple(lines)

    def _repr_html_(self) -> str:
        """A table for notebooks; `audit_html` has the whole page, with styles of its own."""
        return notebook_table(
            ("endpoint", "verdict", "cause", "tokens", "effect nats", "p"),
            (
                (
                    item.endpoint,
                    item.outcome.value,
                    item.cause_text,
                    f"{item.tokens:,}",
                    f"{item.effect.mean_nats:+.4f}",
                    f"{item.p_adjusted:.2g}",
                )
                for item in self.endpoints
            ),
            caption=f"audit of {self.model}",
            numeric={3, 4, 5},
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; infinities are null."""
        found = plain(self)
        for item, report in zip(found["endpoints"], self.endpoints, strict=True):
            item["hints"] = list(report.hints)
            item["cause"]["text"] = str(report.cause.hypothesis)
        return dict(found)


def _served(item: EndpointReport) -> Quantization:
    cause = item.cause.hypothesis
    return Quantization.parse(cause.name if cause.kind is CauseKind.PRECISION else None)


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {why.replace('_', ' ')}" for why, count in reasons.items())


def plain(value: Any) -> Any:
    """Dataclasses, enums and mappings as JSON values."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_early(strata: Strata) -> bool:
    """Whether the first tokens depart, per token, at least twice as far as the last."""
    first, last = abs(strata.means_nats[0]), abs(strata.means_nats[-1])
    return strata.p < 1e-3 and abs(strata.z[0]) > 3 and first > 2 * last
