"""`quantroute audit`: does an endpoint serve the model it claims?"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field, StrictInt, StrictStr

from quantroute._runfile import RunFile, Table
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say, show
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.policy import EvidenceTable
from quantroute.storage import atomic_write

if TYPE_CHECKING:
    from quantroute.audit import AuditReport, AuditSettings

__all__ = ["audit"]


class AuditTable(Table):
    """`[audit]`: what is compared with what. Paths start from the file's folder."""

    rows: list[StrictStr] = Field(min_length=1)
    target: StrictStr
    device: StrictStr = "cpu"
    chat_template: StrictStr | None = None
    trust_remote_code: bool = False
    reference: StrictStr | None = None
    formats: list[StrictStr] | None = None
    system_prompts: tuple[StrictStr, ...] = ()
    models: tuple[StrictStr, ...] = ()
    alpha: float = 0.05
    most_tokens: StrictInt = 20_000
    fewest_tokens: StrictInt = 1_000


class _Stage(Table):
    audit: AuditTable


def audit(
    spec: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="A file with an [audit] table.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one HTML page.")
    ] = None,
    write_evidence: Annotated[
        Path | None,
        typer.Option(
            "--write-evidence",
            metavar="FILE",
            help="Also write the findings as an evidence table, for --evidence.",
        ),
    ] = None,
    evidence_days: Annotated[
        int, typer.Option(min=1, help="How long written evidence counts, in days.")
    ] = 60,
    native: options.Native = None,
    as_json: options.Json = False,
) -> None:
    """Score exported rows with the target's own weights, and judge each endpoint that served them.

    Spends nothing. Exit code 0: no endpoint failed; 4: at least one did. Needs the extra
    `quantroute[audit]`, and memory for the target.

    quantroute audit run.toml

    quantroute audit run.toml --html audit.html --write-evidence audit.toml
    """
    if write_evidence is not None and write_evidence.exists():
        raise DatasetError(path=str(write_evidence), problem="exists; choose another name")
    now = datetime.now(UTC)
    report = _audit(RunFile.load(spec), date=now.date().isoformat(), run=spec.stem)
    if html is not None:
        from quantroute.audit import audit_html

        atomic_write(html, audit_html(report).encode())
    if write_evidence is not None:
        from quantroute.audit import evidence_of

        text = evidence_of(
            report, date=now.date(), days=evidence_days, native=_native(report, native, now)
        )
        atomic_write(write_evidence, text.encode())
    if as_json:
        print_json(report.as_dict())
    else:
        from quantroute.report.audit import audit_table

        show(audit_table(report))
        if write_evidence is not None:
            say(f"evidence in {write_evidence}: pass it on with --evidence {write_evidence}")
    if report.failed:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _audit(file: RunFile, *, date: str, run: str) -> AuditReport:
    table = file.parse(_Stage).audit
    try:
        from quantroute.audit import Target, audit_weights
        from quantroute.extraction import read_row_files
    except ImportError as error:
        raise ConfigurationError(
            f"an audit needs {error.name}: pip install 'quantroute[audit]'"
        ) from None
    paths = [file.resolve(path) for path in table.rows]
    template = None if table.chat_template is None else file.resolve(table.chat_template)
    target = Target.load(
        file.resolve(table.target),
        device=table.device,
        template=template,
        trust_remote_code=table.trust_remote_code,
    )
    say(f"scoring with {target.name}", err=True)
    return audit_weights(
        lambda: read_row_files(paths), target, _settings(file, table), date=date, run=run
    )


def _settings(file: RunFile, table: AuditTable) -> AuditSettings:
    from quantroute.audit import AuditSettings

    given: dict[str, Any] = {
        "system_prompts": table.system_prompts,
        "models": tuple(file.resolve(path) for path in table.models),
        "reference": table.reference,
        "alpha": table.alpha,
        "most_tokens": table.most_tokens,
        "fewest_tokens": table.fewest_tokens,
    }
    if table.formats is not None:
        given["formats"] = tuple(table.formats)
    try:
        return AuditSettings(**given)
    except ConfigurationError as error:
        raise file.error(("audit",), error) from None


def _native(report: AuditReport, given: str | None, at: datetime) -> Quantization | None:
    """The format as which endpoints that pass are entered."""
    if given is not None:
        return options.known_format(given)
    return EvidenceTable.builtin().native(report.model, at=at)
