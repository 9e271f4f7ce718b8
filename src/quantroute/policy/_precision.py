"""Precision relative to the model's native *format*.

Bits are no yardstick: nvfp4 and int4 both have four, and converting one into the other changes
every weight. Formats above native are no proof either: an int4 model offered as fp8 or bf16 is an
upcast, a run with lower-precision activations, or a wrong label. So only the native format is
accepted by itself; everything else needs a word from the user.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

from quantroute.domain import Endpoint, Quantization
from quantroute.policy._evidence import EvidenceRow, EvidenceTable
from quantroute.policy._verdict import Precision, Reason

__all__ = ["COVERS", "judge_precision"]

#: A generic label covers these formats, so it does not say which one is served.
#: Source: OpenRouter's provider-selection guide, read 2026-11: fp4 includes mxfp4 and nvfp4,
#: fp8 includes mxfp8.
COVERS: Final = {
    Quantization.FP4: frozenset({Quantization.MXFP4, Quantization.NVFP4}),
    Quantization.FP8: frozenset({Quantization.MXFP8}),
}


def judge_precision(
    endpoint: Endpoint,
    *,
    native: Quantization | None,
    accept: Collection[Quantization],
    accepts_unknown: bool,
    evidence: EvidenceTable,
    at: datetime,
) -> tuple[Precision, tuple[Reason, ...]]:
    """The endpoint's precision, who decided it, and what speaks against or is worth a note."""
    if native is None:
        native = evidence.native(endpoint.model, at=at)
    row = evidence.find(endpoint, at=at)
    notes: tuple[Reason, ...] = ()
    if row is not None and not row.is_fresh(at):
        notes = (_expired(row),)
        row = None
    if row is not None and row.failed:
        precision = Precision(
            quantization=row.quantization,
            source="none" if row.quantization is Quantization.UNKNOWN else "evidence",
            native=native,
            evidence=row,
        )
        return precision, (_failed(row),)
    stated = endpoint.quantization if row is None else row.quantization
    if stated is Quantization.UNKNOWN:
        precision = Precision(
            quantization=stated,
            source="user" if accepts_unknown else "none",
            native=native,
            evidence=row,
        )
        return precision, (*notes, _unknown(endpoint, row, is_accepted=accepts_unknown))
    precision = Precision(
        quantization=stated,
        source="label" if row is None else "evidence",
        native=native,
        evidence=row,
    )
    return precision, (*notes, *_against_native(precision, accept))


def _against_native(precision: Precision, accept: Collection[Quantization]) -> tuple[Reason, ...]:
    served, native = precision.quantization, precision.native
    if served is native:
        return ()
    name, origin = served.value, _origin(precision)
    if served in accept:
        beside = "unknown" if native is None else native.value
        text = f"{name}{origin} accepted by you (native format: {beside})"
        return (Reason("format_accepted", text, excludes=False),)
    if native is None:
        return (
            Reason(
                "native_unknown",
                f"{name}{origin} cannot be judged: the model's native format is not known; "
                f"set native='...' or accept=('{name}',)",
            ),
        )
    return (_mismatch(served, native, origin),)


def _mismatch(served: Quantization, native: Quantization, origin: str) -> Reason:
    name, own = served.value, native.value
    served_bits, native_bits = served.bits or 0, native.bits or 0
    if native in COVERS.get(served, frozenset()):
        return Reason(
            "precision_ambiguous",
            f"{name}{origin} may be the native {own} or another format; "
            f"add evidence, or accept=('{name}',)",
        )
    if served_bits == native_bits:
        return Reason(
            "precision_requantized",
            f"{name}{origin} is a re-quantization: as many bits as the native {own}, "
            "but another format",
        )
    if served_bits < native_bits:
        return Reason("precision_below_native", f"{name}{origin} is below the native {own}")
    return Reason(
        "precision_above_native",
        f"{name}{origin} is above the native {own}, which is no evidence of fidelity; "
        f"accept=('{name}',) to allow it",
    )


def _unknown(endpoint: Endpoint, row: EvidenceRow | None, *, is_accepted: bool) -> Reason:
    why = _why_unknown(endpoint, row)
    if is_accepted:
        return Reason("unknown_accepted", f"{why}; accepted by you", excludes=False)
    return Reason(
        "precision_unknown",
        f"{why}; add evidence, or accept_unknown=({endpoint.provider_name!r},)",
    )


def _why_unknown(endpoint: Endpoint, row: EvidenceRow | None) -> str:
    if row is not None:
        return f"label not to be believed ({row.source}, {row.date})"
    label = endpoint.quantization_label
    if label is not None and label.strip().lower() != Quantization.UNKNOWN.value:
        return f"label {label!r} is not a known format"
    return "precision not published"


def _failed(row: EvidenceRow) -> Reason:
    because = f": {row.note}" if row.note else ""
    return Reason(
        "evidence_failed",
        f"does not serve the model it claims ({row.source}, {row.date}, until {row.expires})"
        f"{because}",
    )


def _expired(row: EvidenceRow) -> Reason:
    return Reason(
        "evidence_expired",
        f"evidence for {row.quantization.value} ({row.source}) expired on {row.expires}: "
        "the label counts",
        excludes=False,
    )


def _origin(precision: Precision) -> str:
    row = precision.evidence
    return "" if row is None else f" (evidence of {row.date}: {row.source})"
