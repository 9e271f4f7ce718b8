"""What a start of a run decided: verdicts and targets, kept as `facts.json` in the run's folder.

The store knows what was bought; this says from whom it might have been bought, why not from the
others, and how much was wanted.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from quantroute.errors import DatasetError
from quantroute.generation import DatasetPlan
from quantroute.money import usd_per_million
from quantroute.policy import BoundPolicy, Verdict
from quantroute.storage import atomic_write

__all__ = ["JudgedEndpoint", "RunFacts", "WantedDataset", "read_facts", "write_facts"]

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedEndpoint:
    """One verdict. Prices are in USD per million tokens, as text; None where nobody says.

    `evidence` is what the precision rests on in a sentence, empty for a label.
    """

    endpoint: str
    provider: str
    is_eligible: bool
    precision: str
    native: str | None
    precision_source: str
    evidence: str = ""
    input_usd_per_million: str | None = None
    output_usd_per_million: str | None = None
    status: int = 0
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict, *, wording: Callable[[str], str] = str) -> JudgedEndpoint:
        """The verdict in plain values; `wording` is applied to each reason."""
        endpoint, precision = verdict.endpoint, verdict.precision
        found = precision.evidence
        return cls(
            endpoint=str(endpoint.key),
            provider=endpoint.provider_name,
            is_eligible=verdict.eligible,
            precision=precision.quantization.value,
            native=None if precision.native is None else precision.native.value,
            precision_source=precision.source,
            evidence=(
                ""
                if found is None
                else f"{found.source}, {found.date}, counts until {found.expires}"
                + (f": {found.note}" if found.note else "")
            ),
            input_usd_per_million=_million(endpoint.pricing.input_usd_per_token),
            output_usd_per_million=_million(endpoint.pricing.output_usd_per_token),
            status=endpoint.status,
            reasons=tuple(wording(reason.text) for reason in verdict.excluding),
            notes=tuple(wording(reason.text) for reason in verdict.notes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedDataset:
    """What one dataset was to bring, and its part of the cap (pico-dollars)."""

    name: str
    target_output_tokens: int | None = None
    target_rows: int | None = None
    planned_rows: int | None = None
    cap_pusd: int | None = None

    @classmethod
    def of(cls, plan: DatasetPlan) -> WantedDataset:
        """What a plan wants of a dataset."""
        return cls(
            name=plan.name,
            target_output_tokens=plan.spec.target_output_tokens,
            target_rows=plan.spec.target_rows,
            planned_rows=plan.ended_rows + plan.planned_rows,
            cap_pusd=plan.cap_pusd,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the last start decided, and when (UTC, ISO 8601)."""

    at: str
    verdicts: tuple[JudgedEndpoint, ...] = ()
    datasets: tuple[WantedDataset, ...] = ()
    version: int = _VERSION

    @classmethod
    def of(
        cls,
        bound: BoundPolicy,
        *,
        datasets: Iterable[WantedDataset] = (),
        wording: Callable[[str], str] = str,
    ) -> RunFacts:
        """The facts of one start.

        Args:
            wording: applied to each reason, for readers who do not set things as Python does.
        """
        return cls(
            at=bound.at.astimezone(dt.UTC).isoformat(timespec="seconds"),
            verdicts=tuple(JudgedEndpoint.of(item, wording=wording) for item in bound.ranked),
            datasets=tuple(datasets),
        )


_FORM: Final = TypeAdapter(RunFacts)


def write_facts(path: Path, facts: RunFacts) -> None:
    """Keep them, in place of those of an earlier start."""
    atomic_write(path, (json.dumps(asdict(facts), indent=1) + "\n").encode())


def read_facts(path: Path) -> RunFacts:
    """What `write_facts` kept.

    Raises:
        DatasetError: the file cannot be read as such.
    """
    try:
        return _FORM.validate_json(path.read_bytes())
    except OSError as error:
        raise DatasetError(path=str(path), problem=error.strerror or "cannot be read") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DatasetError(path=str(path), problem=f"{where}: {first['msg']}") from error


def _million(usd_per_token: Decimal | None) -> str | None:
    return None if usd_per_token is None else f"{usd_per_million(usd_per_token):f}"
