"""What a dataset card tells of the exported answers, gathered row by row; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

from quantroute.domain import canonical_json
from quantroute.generation._records import StoredRow, TurnRecord
from quantroute.money import price_text
from quantroute.policy import Precision

__all__ = ["Asked", "CardFacts", "DatasetFile", "Served"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One Parquet file. `path` is relative to the folder; `arrow_bytes` is its size once read."""

    dataset: str
    path: str
    rows: int
    size_bytes: int
    arrow_bytes: int
    sha256: str


class Asked(NamedTuple):
    """How answers were asked for: sampling parameters as JSON, most output tokens, mode."""

    sampling: str
    max_output_tokens: int
    mode: str


@dataclass(slots=True)
class Served:
    """What one endpoint, judged in one way, gave. Money is in pico-dollars.

    `input_prices` and `output_prices` are the published strings, USD per token.
    """

    endpoint: str
    label: str | None
    precision: Precision
    answers: int = 0
    output_tokens: int = 0
    cost_pusd: int = 0
    input_prices: set[str | None] = field(default_factory=set)
    output_prices: set[str | None] = field(default_factory=set)

    def count(self, record: TurnRecord) -> None:
        """An answer goes out."""
        self.answers += 1
        self.output_tokens += record.output_tokens or 0
        self.cost_pusd += record.cost_pusd or 0
        self.input_prices.add(record.input_usd_per_token)
        self.output_prices.add(record.output_usd_per_token)

    def judgement(self) -> str:
        """What the exclusion policy took its format to be, and on what ground."""
        precision = self.precision
        match precision.source:
            case "label":
                ground = f"label of the endpoint list: {precision.quantization.value}"
            case "evidence" if precision.evidence is not None:
                row = precision.evidence
                ground = f"evidence: {precision.quantization.value} ({row.source}, {row.date})"
            case "user":
                ground = "nobody states it; accepted by whoever ran this"
            case _:
                ground = "nobody states it"
        return f"{ground}; {self._relation()}"

    def _relation(self) -> str:
        if self.precision.native is None:
            return "the model's own format is not known"
        if self.precision.is_native:
            return "the model's own format"
        return f"the model's own format is {self.precision.native.value}"

    @property
    def prices(self) -> str:
        """USD per million input and output tokens."""
        return f"{_range(self.input_prices)} / {_range(self.output_prices)}"


@dataclass(slots=True)
class CardFacts:
    """Who served, how it was asked, when, and at what cost."""

    served: dict[tuple[str, str | None, str], Served] = field(default_factory=dict)
    asked: dict[str, Counter[Asked]] = field(default_factory=dict)
    output_tokens: Counter[str] = field(default_factory=Counter)
    unknown_costs: int = 0
    first_s: float | None = None
    last_s: float | None = None

    def count(self, row: StoredRow) -> None:
        """A row goes out."""
        asked = self.asked.setdefault(row.prompt.dataset, Counter())
        for record in row.turns:
            sampling = canonical_json(dict(record.sampling))
            asked[Asked(sampling, record.max_output_tokens, record.mode)] += 1
            self.output_tokens[row.prompt.dataset] += record.output_tokens or 0
            self.unknown_costs += record.cost_pusd is None
            self._serving(record).count(record)
            at_s = record.created_at_s
            self.first_s = at_s if self.first_s is None else min(self.first_s, at_s)
            self.last_s = at_s if self.last_s is None else max(self.last_s, at_s)

    def _serving(self, record: TurnRecord) -> Served:
        judged = canonical_json(dict(record.precision))
        key = (record.endpoint, record.quantization_label, judged)
        found = self.served.get(key)
        if found is None:
            found = self.served[key] = Served(
                endpoint=record.endpoint,
                label=record.quantization_label,
                precision=Precision.from_dict(record.precision),
            )
        return found

    @property
    def dates(self) -> str:
        """From the first answer to the last, as days (UTC)."""
        if self.first_s is None or self.last_s is None:
            return "-"
        first, last = (
            datetime.fromtimestamp(at_s, UTC).date().isoformat()
            for at_s in (self.first_s, self.last_s)
        )
        return first if first == last else f"{first} to {last}"


def _range(prices: Iterable[str | None]) -> str:
    """The price per million tokens, or the lowest and the highest of several."""
    known = sorted(Decimal(price) for price in prices if price is not None)
    if not known:
        return "?"
    low, high = price_text(known[0]), price_text(known[-1])
    return low if low == high else f"{low} to {high}"
