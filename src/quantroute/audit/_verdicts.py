"""Findings as evidence for the policy: a TOML file like any other evidence table."""

from __future__ import annotations

import datetime as dt
import json

from quantroute.audit._causes import CauseKind
from quantroute.audit._report import AuditReport, EndpointReport, Outcome
from quantroute.domain import Quantization
from quantroute.policy import EvidenceTable

__all__ = ["evidence_of"]


def evidence_of(
    report: AuditReport, *, date: dt.date, days: int = 60, native: Quantization | None = None
) -> str:
    """TOML text of an evidence table; endpoints about which the audit says nothing are not in it.

    Args:
        date: of the audit; the rows expire `days` after it, since providers change what they serve.
        native: the model's own format, as which endpoints that pass are entered. Without it only
            failures are.
    """
    rows = [
        _row(report, item, date=date, days=days, native=native)
        for item in sorted(report.endpoints, key=lambda item: item.endpoint)
        if item.outcome is Outcome.FAILS or (item.outcome is Outcome.PASSES and native is not None)
    ]
    head = f"# Findings of an audit by {report.method}; see docs/audit.md.\n"
    text = "\n".join([head, *rows])
    EvidenceTable.parse(text, name="audit")  # what is written can be read
    return text


def _row(
    report: AuditReport,
    item: EndpointReport,
    *,
    date: dt.date,
    days: int,
    native: Quantization | None,
) -> str:
    tag = item.endpoint.partition("#")[0]  # endpoints of one tag cannot be asked apart
    failed = item.outcome is Outcome.FAILS
    served = _served(item) if failed else native or Quantization.UNKNOWN
    source = f"audit of run {report.run}" if report.run else "audit"
    fields = {
        "model": report.model,
        "provider": tag.split("/", 1)[0],
        "tag": tag,
        "quantization": served.value,
        "source": source,
    }
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(
        [
            "[[serving]]",
            *lines,
            f"date = {date.isoformat()}",
            f"expires = {(date + dt.timedelta(days=days)).isoformat()}",
            f"failed = {str(failed).lower()}",
            f"note = {json.dumps(_note(item), ensure_ascii=False)}",
            "",
        ]
    )


def _served(item: EndpointReport) -> Quantization:
    """The format, if that is the cause and its name is one of the policy's."""
    cause = item.cause.hypothesis
    return Quantization.parse(cause.name if cause.kind is CauseKind.PRECISION else None)


def _note(item: EndpointReport) -> str:
    return (
        f"{item.cause.hypothesis}; effect {item.effect.mean_nats:+.4f} nats a token "
        f"(95% {item.effect.low:+.4f} to {item.effect.high:+.4f}) over {item.tokens} tokens, "
        f"adjusted p {item.p_adjusted:.2g}; {item.detectable_nats:.4f} nats would have been seen"
    )
