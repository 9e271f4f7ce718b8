"""The words of a judgement: precision, reason, verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from quantroute.domain import Endpoint, Quantization
from quantroute.errors import ConfigurationError
from quantroute.policy._evidence import EvidenceRow

__all__ = ["Precision", "PrecisionSource", "Reason", "Verdict"]

PrecisionSource = Literal["label", "evidence", "user", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The number format an endpoint is taken to serve, and who says so.

    `source` is "label" (the endpoint list), "evidence" (a fresh row of the evidence table), "user"
    (nobody says; the policy accepts that) or "none" (nobody says). `quantization` is UNKNOWN for
    the last two. `native` is the model's own format, None if nobody knows it.
    """

    quantization: Quantization
    source: PrecisionSource
    native: Quantization | None = None
    evidence: EvidenceRow | None = None

    @property
    def is_native(self) -> bool:
        """Whether it is known to be the model's own format."""
        return self.native is not None and self.quantization is self.native

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the provenance of a row; `from_dict` reads them back."""
        return {
            "quantization": self.quantization.value,
            "source": self.source,
            "native": None if self.native is None else self.native.value,
            "evidence": None if self.evidence is None else self.evidence.as_dict(),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Precision:
        """The precision that `as_dict` described.

        Raises:
            ConfigurationError: not such a description; the stored row is damaged.
        """
        try:
            source = stored["source"]
            if source not in get_args(PrecisionSource):
                raise ValueError(source)
            native, evidence = stored["native"], stored["evidence"]
            return cls(
                quantization=Quantization(stored["quantization"]),
                source=cast(PrecisionSource, source),
                native=None if native is None else Quantization(native),
                evidence=None if evidence is None else EvidenceRow.from_dict(evidence),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"not a stored precision: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of a verdict: a stable `code` for programs, a `text` for people.

    `excludes` is False for notes, which say what was tolerated or could not be checked.
    """

    code: str
    text: str
    excludes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the policy decided about one endpoint; excluded if and only if a reason excludes."""

    endpoint: Endpoint
    eligible: bool
    reasons: tuple[Reason, ...]
    precision: Precision

    def __post_init__(self) -> None:
        if self.eligible == any(reason.excludes for reason in self.reasons):
            raise ValueError(f"{self.endpoint.key}: eligible={self.eligible} against its reasons")

    @classmethod
    def of(cls, endpoint: Endpoint, reasons: tuple[Reason, ...], precision: Precision) -> Verdict:
        """The verdict that follows from the reasons."""
        eligible = not any(reason.excludes for reason in reasons)
        return cls(endpoint=endpoint, eligible=eligible, reasons=reasons, precision=precision)

    @property
    def excluding(self) -> tuple[Reason, ...]:
        """The reasons that exclude; empty when eligible."""
        return tuple(reason for reason in self.reasons if reason.excludes)

    @property
    def notes(self) -> tuple[Reason, ...]:
        """The reasons that do not exclude."""
        return tuple(reason for reason in self.reasons if not reason.excludes)

    def __str__(self) -> str:
        outcome = "eligible" if self.eligible else "excluded"
        shown = self.reasons if self.eligible else self.excluding
        why = "; ".join(reason.text for reason in shown)
        return f"{self.endpoint.key} ({self.endpoint.provider_name}): {outcome}" + (
            f": {why}" if why else ""
        )
