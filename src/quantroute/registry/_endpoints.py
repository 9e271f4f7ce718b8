"""The endpoint list of one model, as a value and from its wire form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from pydantic import ValidationError

from quantroute._html import notebook_table
from quantroute.domain import Endpoint, Quantization
from quantroute.errors import EndpointDataError, RegistryError
from quantroute.money import price_text
from quantroute.registry._pricing import parse_pricing
from quantroute.registry._wire import WireEndpoint

__all__ = [
    "EndpointList",
    "describe",
    "entries_of",
    "parse_endpoints",
    "price_rank",
    "stamp",
]

_HEADINGS: Final = (
    "endpoint",
    "provider",
    "precision",
    "$/M in",
    "$/M out",
    "context",
    "most output",
    "up, %",
    "status",
)
_LONGEST_LABEL: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EndpointList:
    """Who serves `model`, as read at one moment.

    `model` is the id that was asked, which every endpoint carries; `listed_id` is the id in the
    answer, different for aliases. `canonical_slug` is the dated id that the endpoints serve, None
    if they name none or disagree. `problems` are entries that were left out. `is_stale` says that
    the service could not be read when this was last asked for. `source` is a URL or a file name.
    """

    model: str
    canonical_slug: str | None
    name: str
    endpoints: tuple[Endpoint, ...]
    problems: tuple[EndpointDataError, ...] = ()
    fetched_at_s: float
    is_stale: bool = False
    source: str
    listed_id: str | None = None

    def age_s(self, now_s: float) -> float:
        """Seconds since the list was read; `now_s` is Unix time, as of `Clock.time_s`."""
        return max(0.0, now_s - self.fetched_at_s)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)

    def __len__(self) -> int:
        return len(self.endpoints)

    def __repr__(self) -> str:
        problems = f", {len(self.problems)} left out" if self.problems else ""
        return (
            f"EndpointList({self.model!r}, {len(self.endpoints)} endpoints{problems}, "
            f"{stamp(self.fetched_at_s, is_stale=self.is_stale)}, {self.source})"
        )

    def _repr_html_(self) -> str:
        """A table for notebooks: every endpoint as listed, every text escaped."""
        problems = f", {len(self.problems)} entries left out" if self.problems else ""
        return notebook_table(
            _HEADINGS,
            map(_cells, self.endpoints),
            caption=f"{self.model}: {stamp(self.fetched_at_s, is_stale=self.is_stale)}{problems}",
            numeric={3, 4, 5, 6, 7},
            dimmed={place for place, item in enumerate(self.endpoints) if item.is_down},
        )


def _cells(endpoint: Endpoint) -> tuple[str, ...]:
    uptime = endpoint.uptime_30m_percent
    return (
        str(endpoint.key),
        endpoint.provider_name,
        endpoint.quantization.value,
        price_text(endpoint.pricing.input_usd_per_token),
        price_text(endpoint.pricing.output_usd_per_token),
        _count(endpoint.context_tokens),
        _count(endpoint.max_output_tokens),
        "-" if uptime is None else f"{uptime:.1f}",
        "up" if endpoint.status == 0 else str(endpoint.status),
    )


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


def stamp(at_s: float, *, is_stale: bool) -> str:
    """When something was read, for people: `read 2026-08-22T23:01Z`."""
    return (
        f"{'stale, ' if is_stale else ''}read {datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%MZ}"
    )


def parse_endpoints(model: str, body: object, *, fetched_at_s: float, source: str) -> EndpointList:
    """The list in `body`; malformed entries become problems, the others stay.

    Raises:
        RegistryError: `body` is no endpoint list at all.
    """
    listing = body.get("data") if isinstance(body, dict) else None
    if not isinstance(listing, dict):
        raise RegistryError(f"{model}: the answer is no endpoint list (no `data` object)")
    endpoints: list[Endpoint] = []
    problems: list[EndpointDataError] = []
    for position, entry in enumerate(entries_of(listing, "endpoints", what=model)):
        try:
            endpoints.append(_endpoint(model, WireEndpoint.model_validate(entry)))
        except ValidationError as error:
            name = f"{position} ({_hint(entry)})"
            problems.append(EndpointDataError(model=model, entry=name, problem=describe(error)))
    served = {endpoint.served_name for endpoint in endpoints}
    return EndpointList(
        model=model,
        canonical_slug=served.pop() if len(served) == 1 else None,
        name=_text(listing.get("name")) or model,
        endpoints=_with_ordinals(endpoints),
        problems=tuple(problems),
        fetched_at_s=fetched_at_s,
        source=source,
        listed_id=_text(listing.get("id")),
    )


def entries_of(body: object, field: str, *, what: str) -> list[Any]:
    """The list under `field`.

    Raises:
        RegistryError: there is none; an empty list is an answer.
    """
    entries = body.get(field) if isinstance(body, dict) else None
    if not isinstance(entries, list):
        raise RegistryError(f"{what}: the answer holds no list `{field}`")
    return entries


def describe(error: ValidationError) -> str:
    """What is wrong, by field, without quoting what was sent."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'entry'}: {item['msg']}"
        for item in error.errors(include_input=False, include_url=False, include_context=False)
    )


def price_rank(endpoint: Endpoint) -> tuple[bool, Decimal, bool, Decimal]:
    """Sort key: cheaper input first, then cheaper output; unknown prices last."""
    zero = Decimal(0)
    price = endpoint.pricing
    return (
        price.input_usd_per_token is None,
        price.input_usd_per_token or zero,
        price.output_usd_per_token is None,
        price.output_usd_per_token or zero,
    )


def _endpoint(model: str, wire: WireEndpoint) -> Endpoint:
    _, bar, served = (wire.name or "").partition("|")
    return Endpoint(
        model=model,
        tag=wire.tag,
        provider_name=wire.provider_name,
        quantization=Quantization.parse(wire.quantization),
        quantization_label=_label(wire.quantization),
        pricing=parse_pricing(wire.pricing),
        status=wire.status,
        context_tokens=wire.context_length,
        max_output_tokens=wire.max_completion_tokens,
        max_input_tokens=wire.max_prompt_tokens,
        supported_parameters=frozenset(wire.supported_parameters),
        uptime_5m_percent=wire.uptime_last_5m,
        uptime_30m_percent=wire.uptime_last_30m,
        uptime_1d_percent=wire.uptime_last_1d,
        served_name=(served.strip() or None) if bar else None,
    )


def _label(published: object) -> str | None:
    """The label as it was published, so that one we do not know can still be read."""
    if published is None or isinstance(published, str):
        return published
    return str(published)[:_LONGEST_LABEL]


def _with_ordinals(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """List order kept; endpoints that share a tag numbered by price, then by list order.

    By price and not by position, because the service reorders its list between two reads.
    """
    positions: dict[str, list[int]] = {}
    for position, endpoint in enumerate(endpoints):
        positions.setdefault(endpoint.tag, []).append(position)
    numbered = list(endpoints)
    for twins in positions.values():
        for ordinal, position in enumerate(
            sorted(twins, key=lambda position: price_rank(endpoints[position]))
        ):
            if ordinal:
                numbered[position] = replace(endpoints[position], ordinal=ordinal)
    return tuple(numbered)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _hint(entry: object) -> str:
    """A name for an entry that could not be read."""
    found = entry.get("tag") or entry.get("provider_name") if isinstance(entry, dict) else None
    return repr(found[:_LONGEST_LABEL]) if isinstance(found, str) else "no tag"
