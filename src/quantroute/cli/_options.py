"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quantroute.domain import Quantization, Sampling
from quantroute.errors import ConfigurationError
from quantroute.generation import RowClass
from quantroute.money import PicoUSD, cap_pusd, to_usd

DEFAULT_MODEL = "moonshotai/kimi-k2.5"
"""The model of the embedded scenario."""

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Do only part I of N (from 0) of the work, beside other workers; 'auto' in a Slurm "
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
Native = Annotated[
    str | None,
    typer.Option(
        "--native",
        metavar="FORMAT",
        help="The model's native format, if the evidence table lacks it.",
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
ScenarioFile = Annotated[
    Path | None,
    typer.Option(
        "--scenario", exists=True, dir_okay=False, help="Scenario file (TOML) for --simulate."
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
