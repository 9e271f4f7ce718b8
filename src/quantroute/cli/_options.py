"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quantroute.domain import Quantization, Sampling
from quantroute.errors import ConfigurationError
from quantroute.generation import RowClass
from quantroute.money import PicoUSD, cap_pusd, to_usd
from quantroute.policy import EvidenceTable, ExclusionPolicy

DEFAULT_MODEL = "moonshotai/kimi-k2.5"
"""The model of the embedded scenario."""

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Do only part I of N (from 0) of the rows, beside other workers; 'auto' in a Slurm "
        "array or a Kubernetes indexed job.",
    ),
]
Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        envvar="QUANTROUTE_LEDGER",
        help="A Redis or Valkey server that keeps the one cap of all workers, e.g. "
        "redis://HOST:6379/0; add #NAME for another ledger than the run's own.",
    ),
]
AllowVolatileLedger = Annotated[
    bool,
    typer.Option(
        "--allow-volatile-ledger",
        help="Accept a server that may forget what it acknowledged (no `appendfsync always`).",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="NAME",
        help="Provider, slug or tag never to use, in any spelling; repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="NAME", help="Use nothing but this provider, slug or tag; repeatable."
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="FORMAT",
        help="A format to accept beside the native one, e.g. fp8; repeatable.",
    ),
]
AcceptUnknown = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-unknown",
        metavar="NAME",
        help="A provider whose unlabelled endpoints you accept, or 'all'; repeatable.",
    ),
]
Native = Annotated[
    str | None,
    typer.Option(
        "--native",
        metavar="FORMAT",
        help="The model's native format, if the evidence table lacks it.",
    ),
]
Evidence = Annotated[
    Path | None,
    typer.Option(
        "--evidence",
        exists=True,
        dir_okay=False,
        help="Your own evidence table (TOML), added to the built-in one.",
    ),
]
DropFailedAudit = Annotated[
    Path | None,
    typer.Option(
        "--drop-failed-audit",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Leave out answers of endpoints that failed, according to this evidence file.",
    ),
]
MaxInputPrice = Annotated[
    str | None,
    typer.Option(
        "--max-input-price", metavar="USD", help="Ceiling in USD per million input tokens."
    ),
]
MaxOutputPrice = Annotated[
    str | None,
    typer.Option(
        "--max-output-price", metavar="USD", help="Ceiling in USD per million output tokens."
    ),
]
BaseUrl = Annotated[
    str,
    typer.Option(
        "--base-url",
        metavar="URL",
        envvar="QUANTROUTE_BASE_URL",
        help="The service, up to and with /api/v1.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="QUANTROUTE_CA_FILE",
        exists=True,
        dir_okay=False,
        help="PEM bundle to trust instead of the system's.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
LogJson = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        metavar="FILE",
        help="Append events as JSON lines to this file; events.jsonl in the run's folder if left "
        "out.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65_535,
        help="Serve Prometheus metrics on 127.0.0.1 at this port during the run; 0 takes a free "
        "one.",
    ),
]
Otel = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Tell OpenTelemetry of every attempt, as this process is set up for it; needs the "
        "extra `otel`.",
    ),
]


def build_policy(
    *,
    exclude: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    accept: Sequence[str] | None = None,
    accept_unknown: Sequence[str] | None = None,
    native: str | None = None,
    evidence: Path | None = None,
    max_input_price: str | None = None,
    max_output_price: str | None = None,
) -> ExclusionPolicy:
    """The exclusion policy that the options describe.

    Raises:
        ConfigurationError: a format nobody knows, or an impossible price.
    """
    table = EvidenceTable.builtin()
    if evidence is not None:
        table = table.merged(EvidenceTable.load(evidence))
    unknown: bool | tuple[str, ...] = tuple(accept_unknown or ())
    if accept_unknown and "all" in accept_unknown:
        unknown = True
    return ExclusionPolicy(
        native=None if native is None else known_format(native),
        accept=tuple(known_format(label) for label in accept or ()),
        accept_unknown=unknown,
        only=tuple(only or ()),
        exclude=tuple(exclude or ()),
        max_input_usd_per_million=max_input_price,
        max_output_usd_per_million=max_output_price,
        evidence=table,
    )


def build_sampling(
    *,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    thinking: bool | None,
) -> Sampling:
    """Sampling parameters from options; what is not given is not sent."""
    return Sampling(temperature=temperature, top_p=top_p, seed=seed, reasoning=thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """A soft cap: the target, what may come on top, and how sure it shall be. Pico-dollars."""

    target_pusd: PicoUSD
    accepted_pusd: PicoUSD
    probability: float

    @property
    def hard_cap(self) -> str:
        """The ledger's cap, in USD: what is never exceeded."""
        return str(to_usd(self.target_pusd + self.accepted_pusd))


def build_overrun(
    *, cap: str | None, probability: float | None, accepted: str | None
) -> Overrun | None:
    """What the options of the statistical reserve describe; None without them.

    Raises:
        ConfigurationError: one option without the other, or without a cap.
    """
    if probability is None and accepted is None:
        return None
    if probability is None or accepted is None or cap is None:
        raise ConfigurationError(
            "--statistical-reserve, --accept-overrun-usd and --cap belong together: "
            "the first may spend more than the cap, up to the second"
        )
    target_pusd, accepted_pusd = cap_pusd(cap), cap_pusd(accepted)
    assert isinstance(target_pusd, int)  # text is never NO_CAP
    assert isinstance(accepted_pusd, int)
    return Overrun(target_pusd=target_pusd, accepted_pusd=accepted_pusd, probability=probability)


def row_class(name: str, *, option: str) -> RowClass:
    """The class of answers that `option` names.

    Raises:
        ConfigurationError: there is no such class; the message lists those there are.
    """
    try:
        return RowClass(name.strip().lower().replace("-", "_").replace(" ", "_"))
    except ValueError:
        known = ", ".join(item.value for item in RowClass)
        raise ConfigurationError(f"{option} {name!r} is not a class; use one of: {known}") from None


def known_format(label: str) -> Quantization:
    """The format of that name.

    Raises:
        ConfigurationError: there is none.
    """
    found = Quantization.parse(label)
    if found is Quantization.UNKNOWN:
        known = ", ".join(item.value for item in Quantization if item is not Quantization.UNKNOWN)
        raise ConfigurationError(f"{label!r} is not a known format; use one of: {known}")
    return found
