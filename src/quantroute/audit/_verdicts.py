"""Findings as evidence for the policy: a TOML file like any other evidence table."""

from __future__ import annotations

import datetime as dt
import json
from typing import Protocol

from quantroute.audit._report import Finding
from quantroute.domain import Quantization
from quantroute.policy import EvidenceTable

__all__ = ["evidence_of"]


class _Report(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def findings(self) -> tuple[Finding, ...]: ...


def evidence_of(
    report: _Report, *, date: dt.date, days: int = 60, native: Quantization | None = None
) -> str:
    """TOML text of an evidence table; endpoints about which the audit says nothing are not in it.

    Args:
        date: of the audit; the rows expire `days` after it, since providers change what they serve.
        native: the model's own format, as which endpoints that pass are entered. Without it only
            failures are.
    """
    rows = [
        _row(report, item, date=date, days=days, native=native)
        for item in sorted(report.findings, key=lambda item: item.endpoint)
        if item.failed or native is not None
    ]
    head = f"# Findings of an audit by {report.method}; see docs/audit.md.\n"
    text = "\n".join([head, *rows])
    EvidenceTable.parse(text, name="audit")  # what is written can be read
    return text


def _row(
    report: _Report, item: Finding, *, date: dt.date, days: int, native: Quantization | None
) -> str:
    tag = item.endpoint.partition("#")[0]  # endpoints of one tag cannot be asked apart
    served = item.served if item.failed else native or Quantization.UNKNOWN
    texts = {
        "model": report.model,
        "provider": tag.split("/", 1)[0],
        "tag": tag,
        "quantization": served.value,
        "source": f"audit of run {report.run}" if report.run else "audit",
        "note": item.note,
    }
    return "\n".join(
        [
            "[[serving]]",
            *(f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()),
            f"date = {date.isoformat()}",
            f"expires = {(date + dt.timedelta(days=days)).isoformat()}",
            f"failed = {str(item.failed).lower()}",
            "",
        ]
    )
