"""`quantroute audit`: does an endpoint serve the model it claims?"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from quantroute._http import OPENROUTER_URL
from quantroute._runfile import RunFile, Table
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say, show
from quantroute.cli._policy_options import PolicyOptions, takes_policy
from quantroute.cli._service import opened_target
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.ledger import BudgetLedger
from quantroute.money import format_usd
from quantroute.policy import EvidenceTable, ExclusionPolicy
from quantroute.registry import ProviderRegistry
from quantroute.storage import atomic_write

if TYPE_CHECKING:
    from quantroute.audit import AuditReport, AuditSettings, StringsReport, StringsSettings

__all__ = ["audit"]


class AuditTable(Table):
    """`[audit]`: what is compared with what. Paths start from the file's folder.

    With weights: `target`, and `rows` or the folder of `states` that extraction has made of them.
    As a black box: `model`, `cap_usd` and `reference`.
    """

    rows: tuple[StrictStr, ...] = ()
    states: StrictStr | None = None
    target: StrictStr | None = None
    device: StrictStr = "cpu"
    chat_template: StrictStr | None = None
    trust_remote_code: StrictBool = False
    reference: StrictStr | None = None
    formats: tuple[StrictStr, ...] | None = None
    system_prompts: tuple[StrictStr, ...] = ()
    templates: tuple[StrictStr, ...] = ()
    models: tuple[StrictStr, ...] = ()
    alpha: StrictFloat = 0.05
    power: StrictFloat = 0.9
    most_tokens: StrictInt = 20_000
    fewest_tokens: StrictInt = 1_000
    model: StrictStr | None = None
    cap_usd: StrictStr | None = None
    ledger: StrictStr = "audit.sqlite"
    prompts: tuple[StrictStr, ...] | None = None
    answers: StrictInt = 10
    max_output_tokens: StrictInt = Field(default=64, gt=0)


class _Stage(Table):
    audit: AuditTable


@takes_policy
def audit(
    spec: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="A file with an [audit] table.")],
    black_box: Annotated[
        bool,
        typer.Option(
            "--black-box",
            help="Without weights: ask the eligible endpoints, for money, and compare strings.",
        ),
    ] = False,
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
    *,
    policy_options: PolicyOptions,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Ask the embedded simulator: no key, no cost.")
    ] = False,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Judge each endpoint that served exported rows, by the target's own weights.

    Spends nothing, except with --black-box, up to the table's cap_usd. Exit code 0: no endpoint
    failed; 4: at least one did. Needs the extra `audit`.

    quantroute audit run.toml --html audit.html --write-evidence audit.toml

    quantroute audit run.toml --black-box
    """
    if write_evidence is not None and write_evidence.exists():
        raise DatasetError(path=str(write_evidence), problem="exists; choose another name")
    file, now = RunFile.load(spec), datetime.now(UTC)
    table = _table(file)
    known: dict[str, str] = {"date": now.date().isoformat(), "run": spec.stem}
    report: AuditReport | StringsReport
    if black_box:
        policy = policy_options.policy()
        report = _loop.run(
            _ask(file, table, policy, base_url, ca_file, simulate=simulate, known=known)
        )
    else:
        report = _score(file, table, known)
    if write_evidence is not None:
        _write_evidence(
            report, write_evidence, days=evidence_days, native=policy_options.native, at=now
        )
    if html is not None:
        _write_page(report, html)
    _print(report, as_json=as_json)
    if report.failed:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _table(file: RunFile) -> AuditTable:
    table = file.parse(_Stage).audit
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ConfigurationError("an audit needs scipy: pip install 'quantroute[audit]'") from None
    return table


# -- with weights ---------------------------------------------------------------------------------


def _score(file: RunFile, table: AuditTable, known: dict[str, str]) -> AuditReport:
    if table.target is None or bool(table.rows) is bool(table.states):
        raise file.error(
            ("audit",),
            "needs target = '...' and either rows = [...] or states = '...'; or --black-box for no "
            "weights",
        )
    try:
        from quantroute.audit import Target, TargetHead, audit_states, audit_weights
        from quantroute.extraction import StateStore, read_row_files
    except ImportError as error:
        raise ConfigurationError(
            f"an audit needs {error.name}: pip install 'quantroute[audit]'"
        ) from None
    settings, folder = _settings(file, table), file.resolve(table.target)

    def load() -> Target:
        say(f"scoring with {folder.name}", err=True)
        return Target.load(
            folder,
            device=table.device,
            template=None if table.chat_template is None else file.resolve(table.chat_template),
            trust_remote_code=table.trust_remote_code,
        )

    if table.states is not None:
        store = StateStore.open(file.resolve(table.states))
        head = TargetHead.read(folder, store, device=table.device)
        return audit_states(store, head, settings, load=load, **known)
    paths = [file.resolve(path) for path in table.rows]
    return audit_weights(lambda: read_row_files(paths), load(), settings, **known)


def _settings(file: RunFile, table: AuditTable) -> AuditSettings:
    from quantroute.audit import AuditSettings

    given: dict[str, Any] = {
        "system_prompts": table.system_prompts,
        "templates": tuple(file.resolve(path) for path in table.templates),
        "models": tuple(file.resolve(path) for path in table.models),
        "reference": table.reference,
        "alpha": table.alpha,
        "power": table.power,
        "most_tokens": table.most_tokens,
        "fewest_tokens": table.fewest_tokens,
    }
    if table.formats is not None:
        given["formats"] = table.formats
    try:
        return AuditSettings(**given)
    except ConfigurationError as error:
        raise file.error(("audit",), error) from None


# -- as a black box -------------------------------------------------------------------------------


async def _ask(
    file: RunFile,
    table: AuditTable,
    policy: ExclusionPolicy,
    base_url: str,
    ca_file: Path | None,
    *,
    simulate: bool,
    known: dict[str, str],
) -> StringsReport:
    from quantroute.audit import audit_strings

    if table.model is None or table.cap_usd is None:
        raise file.error(("audit",), "a black-box audit needs model, cap_usd and reference")
    settings = _strings_settings(file, table)
    path = file.resolve(table.ledger)
    if simulate:  # rehearsals never stand in a real ledger
        path = path.with_stem(f"{path.stem}-simulated")
    async with opened_target(base_url=base_url, ca_file=ca_file, simulate=simulate) as target:
        target.key.read()
        async with (
            ProviderRegistry(service=target.service, key=target.key) as registry,
            BudgetLedger.open(path, cap=table.cap_usd) as ledger,
        ):
            return await audit_strings(
                table.model,
                settings,
                ledger=ledger,
                registry=registry,
                policy=policy,
                service=target.service,
                key=target.key,
                **known,
            )


def _strings_settings(file: RunFile, table: AuditTable) -> StringsSettings:
    from quantroute.audit import PROBES, StringsSettings

    if table.reference is None:
        raise file.error(("audit",), "a black-box audit needs reference = 'TAG'")
    try:
        return StringsSettings(
            reference=table.reference,
            prompts=table.prompts or PROBES,
            answers=table.answers,
            max_output_tokens=table.max_output_tokens,
            alpha=table.alpha,
        )
    except ConfigurationError as error:
        raise file.error(("audit",), error) from None


# -- what comes out -------------------------------------------------------------------------------


def _write_evidence(
    report: AuditReport | StringsReport,
    path: Path,
    *,
    days: int,
    native: str | None,
    at: datetime,
) -> None:
    from quantroute.audit import evidence_of

    form = _native(report.model, native, at)
    text = evidence_of(report, date=at.date(), days=days, native=form)
    atomic_write(path, text.encode())


def _native(model: str, given: str | None, at: datetime) -> Quantization | None:
    """The format as which endpoints that pass are entered."""
    if given is not None:
        return options.known_format(given)
    return EvidenceTable.builtin().native(model, at=at)


def _write_page(report: AuditReport | StringsReport, path: Path) -> None:
    from quantroute.audit import AuditReport, audit_html, strings_html

    page = audit_html(report) if isinstance(report, AuditReport) else strings_html(report)
    atomic_write(path, page.encode())


def _print(report: AuditReport | StringsReport, *, as_json: bool) -> None:
    from quantroute.audit import AuditReport
    from quantroute.report.audit import audit_table, strings_table

    if as_json:
        print_json(report.as_dict())
    elif isinstance(report, AuditReport):
        show(audit_table(report))
    else:
        show(strings_table(report))
        say(f"spent {format_usd(report.spent_pusd, places=6)}")
