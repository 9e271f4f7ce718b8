"""The model list: summaries, the documented filters, and the same filters without the service."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Final

from pydantic import ValidationError

from quantroute._html import notebook_table
from quantroute.errors import ConfigurationError, EndpointDataError
from quantroute.money import price_text, usd_per_million
from quantroute.pricing import Pricing
from quantroute.registry._endpoints import describe, entries_of, stamp
from quantroute.registry._pricing import parse_pricing
from quantroute.registry._wire import WireArchitecture, WireModel

__all__ = ["ModelList", "ModelQuery", "ModelSummary", "closest", "parse_models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """One model as the list sums it up.

    `supported_parameters` is the union over its endpoints and `context_tokens` their maximum, so
    neither says what one endpoint can do: ask `ProviderRegistry.endpoints`. A variant such as
    `x:free` is a model of its own, with its own prices.
    Source: OpenRouter `GET /models`, July-August 2026.
    """

    id: str
    name: str
    canonical_slug: str | None
    pricing: Pricing
    hugging_face_id: str | None = None
    created_at_s: int | None = None
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    supported_parameters: frozenset[str] = frozenset()
    input_modalities: frozenset[str] = frozenset()
    output_modalities: frozenset[str] = frozenset()
    tokenizer: str | None = None
    expiration_date: str | None = None

    @property
    def author(self) -> str:
        """The id's first segment."""
        return self.id.split("/", 1)[0]

    @property
    def variant(self) -> str | None:
        """The id's suffix (`free`, `batch`, `thinking`), for display only."""
        _, colon, suffix = self.id.partition(":")
        return suffix if colon else None


Money = Decimal | str | int | None
#: A notebook's table of models is for looking, not for scrolling through hundreds.
_MOST_SHOWN: Final = 50
_PRICE_FIELDS: Final = {
    "min_input_usd_per_million": "min_price",
    "max_input_usd_per_million": "max_price",
    "min_output_usd_per_million": "min_output_price",
    "max_output_usd_per_million": "max_output_price",
}
_LIST_FIELDS: Final = {
    "supported_parameters": "supported_parameters",
    "providers": "providers",
    "model_authors": "model_authors",
    "input_modalities": "input_modalities",
    "output_modalities": "output_modalities",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuery:
    """What to list; an empty query lists every model that gives text.

    Args:
        q: free text in id or name.
        supported_parameters: each must be supported by some endpoint of the model.
        providers: companies by any spelling; sent as the display names the service wants.
        context_tokens: least context length.
        min_input_usd_per_million, max_input_usd_per_million: bounds of the price of input, USD per
            million tokens; likewise for output.
        output_modalities: each must be given; ("all",) lifts the service's default of text.
        zdr: only models with an endpoint that retains nothing.
        sort: `pricing-low-to-high`, `context-high-to-low`, `newest`, `most-popular`, ...
        other: further query parameters by their published names, sent as they are.
    Source: OpenRouter `GET /models` parameters, read 2026-11.
    """

    q: str | None = None
    supported_parameters: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    model_authors: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ()
    output_modalities: tuple[str, ...] = ()
    context_tokens: int | None = None
    min_input_usd_per_million: Money = None
    max_input_usd_per_million: Money = None
    min_output_usd_per_million: Money = None
    max_output_usd_per_million: Money = None
    category: str | None = None
    arch: str | None = None
    region: str | None = None
    zdr: bool | None = None
    distillable: bool | None = None
    sort: str | None = None
    other: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _LIST_FIELDS:
            words = getattr(self, name)
            if isinstance(words, str):
                raise ConfigurationError(f"{name} takes a tuple of strings, not one string")
            object.__setattr__(self, name, tuple(words))
        for name in _PRICE_FIELDS:
            object.__setattr__(self, name, _bound(name, getattr(self, name)))

    def params(self) -> tuple[tuple[str, str], ...]:
        """The query string's pairs, by their published names; only what is set."""
        pairs = {
            published: ",".join(words)
            for name, published in _LIST_FIELDS.items()
            if (words := getattr(self, name))
        }
        for name, published in _PRICE_FIELDS.items():
            if (bound := getattr(self, name)) is not None:
                pairs[published] = f"{bound:f}"
        for name in ("q", "category", "arch", "region", "sort"):
            if (text := getattr(self, name)) is not None:
                pairs[name] = text
        for name in ("zdr", "distillable"):
            if (flag := getattr(self, name)) is not None:
                pairs[name] = "true" if flag else "false"
        if self.context_tokens is not None:
            pairs["context"] = str(self.context_tokens)
        return tuple(sorted((pairs | dict(self.other)).items()))


def _bound(name: str, value: object) -> Decimal | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, Decimal | str | int):
            raise InvalidOperation
        bound = Decimal(value)
    except InvalidOperation:
        raise ConfigurationError(
            f"{name} is a price in USD per million tokens such as '0.45', not {value!r}"
        ) from None
    if not bound.is_finite() or bound < 0:
        raise ConfigurationError(f"{name} must be finite and not negative, not {value}")
    return bound


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelList:
    """Models as read at one moment; `problems` are entries that were left out."""

    models: tuple[ModelSummary, ...]
    problems: tuple[EndpointDataError, ...] = ()
    fetched_at_s: float
    is_stale: bool = False
    source: str

    def filter(self, query: ModelQuery) -> ModelList:
        """The models of this list that `query` keeps, decided from the summaries alone.

        Raises:
            ConfigurationError: the query asks what a summary does not tell (category, providers,
                data policy, popularity); only the service can answer it.
        """
        unknowable = _service_only(query)
        if unknowable:
            raise ConfigurationError(
                f"{', '.join(unknowable)}: only the service can answer this; "
                "ask ProviderRegistry.models online"
            )
        kept = tuple(model for model in self.models if _keeps(query, model))
        if query.sort is not None:
            kept = tuple(sorted(kept, key=_SORTS[query.sort]))
        return replace(self, models=kept)

    def get(self, model: str) -> ModelSummary | None:
        """The model with exactly this id; a suffix is never stripped."""
        return next((summary for summary in self.models if summary.id == model), None)

    def suggest(self, model: str) -> tuple[str, ...]:
        """Up to three ids that may have been meant, most likely first."""
        dated = [summary.id for summary in self.models if summary.canonical_slug == model]
        return closest(model, (summary.id for summary in self.models), first=dated)

    def age_s(self, now_s: float) -> float:
        """Seconds since the list was read; `now_s` is Unix time."""
        return max(0.0, now_s - self.fetched_at_s)

    def __iter__(self) -> Iterator[ModelSummary]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        problems = f", {len(self.problems)} left out" if self.problems else ""
        return (
            f"ModelList({len(self.models)} models{problems}, "
            f"{stamp(self.fetched_at_s, is_stale=self.is_stale)}, {self.source})"
        )

    def _repr_html_(self) -> str:
        """A table for notebooks, every text escaped; of a long list the beginning."""
        shown = self.models[:_MOST_SHOWN]
        hidden = len(self.models) - len(shown)
        more = f", the first {len(shown)} of {len(self.models)}" if hidden else ""
        return notebook_table(
            ("model", "name", "$/M in", "$/M out", "context"),
            (
                (
                    item.id,
                    item.name,
                    price_text(item.pricing.input_usd_per_token),
                    price_text(item.pricing.output_usd_per_token),
                    "-" if item.context_tokens is None else f"{item.context_tokens:,}",
                )
                for item in shown
            ),
            caption=f"models{more}: {stamp(self.fetched_at_s, is_stale=self.is_stale)}",
            numeric={2, 3, 4},
        )


def closest(model: str, ids: Iterator[str], *, first: list[str] | None = None) -> tuple[str, ...]:
    """Up to three of `ids` that resemble `model` as a whole, or in the name alone.

    Here, where people are helped, a variant's suffix does not count.
    """
    by_name: dict[str, list[str]] = {}
    known = list(ids)
    for known_id in known:
        by_name.setdefault(_bare(known_id), []).append(known_id)
    found = list(first or ())
    found += difflib.get_close_matches(model.casefold(), known, n=3, cutoff=0.75)
    for near in difflib.get_close_matches(_bare(model), by_name, n=3, cutoff=0.6):
        found += by_name[near]
    return tuple(dict.fromkeys(found))[:3]


def _bare(model: str) -> str:
    return model.rpartition("/")[2].partition(":")[0].casefold()


def _service_only(query: ModelQuery) -> list[str]:
    asked = [
        name
        for name in ("providers", "category", "region", "zdr", "distillable")
        if getattr(query, name) not in (None, ())
    ]
    asked += sorted(query.other)
    if query.sort is not None and query.sort not in _SORTS:
        asked.append(f"sort {query.sort!r}")
    return asked


def _keeps(query: ModelQuery, model: ModelSummary) -> bool:
    needle = (query.q or "").casefold()
    outputs = set(query.output_modalities) - {"all"}
    return (
        needle in f"{model.id} {model.name}".casefold()
        and set(query.supported_parameters) <= model.supported_parameters
        and set(query.input_modalities) <= model.input_modalities
        and outputs <= model.output_modalities
        and (not query.model_authors or model.author in query.model_authors)
        and (query.arch is None or model.tokenizer == query.arch)
        and (query.context_tokens or 0) <= (model.context_tokens or 0)
        and _within(
            model.pricing.input_usd_per_token,
            query.min_input_usd_per_million,
            query.max_input_usd_per_million,
        )
        and _within(
            model.pricing.output_usd_per_token,
            query.min_output_usd_per_million,
            query.max_output_usd_per_million,
        )
    )


def _within(usd_per_token: Decimal | None, low: Money, high: Money) -> bool:
    """Whether a price lies within bounds; an unknown price lies within none."""
    if low is None and high is None:
        return True
    if usd_per_token is None:
        return False
    price = usd_per_million(usd_per_token)
    return (low is None or Decimal(low) <= price) and (high is None or price <= Decimal(high))


def _mean_price(model: ModelSummary) -> Decimal | None:
    prices = (model.pricing.input_usd_per_token, model.pricing.output_usd_per_token)
    return None if None in prices else sum((p for p in prices if p is not None), Decimal(0)) / 2


_SORTS: Final[Mapping[str, Callable[[ModelSummary], tuple[bool, Decimal]]]] = {
    "pricing-low-to-high": lambda m: (_mean_price(m) is None, _mean_price(m) or Decimal(0)),
    "pricing-high-to-low": lambda m: (_mean_price(m) is None, -(_mean_price(m) or Decimal(0))),
    "context-high-to-low": lambda m: (False, Decimal(-(m.context_tokens or 0))),
    "newest": lambda m: (False, Decimal(-(m.created_at_s or 0))),
}


def parse_models(body: object, *, fetched_at_s: float, source: str) -> ModelList:
    """The list in `body`; malformed entries become problems.

    Raises:
        RegistryError: `body` is no list of models.
    """
    models: list[ModelSummary] = []
    problems: list[EndpointDataError] = []
    for position, entry in enumerate(entries_of(body, "data", what="models")):
        try:
            models.append(_summary(WireModel.model_validate(entry)))
        except ValidationError as error:
            problems.append(
                EndpointDataError(model="models", entry=str(position), problem=describe(error))
            )
    return ModelList(
        models=tuple(models), problems=tuple(problems), fetched_at_s=fetched_at_s, source=source
    )


def _summary(wire: WireModel) -> ModelSummary:
    shape = wire.architecture or WireArchitecture()
    return ModelSummary(
        id=wire.id,
        name=wire.name or wire.id,
        canonical_slug=wire.canonical_slug,
        pricing=parse_pricing(wire.pricing),
        hugging_face_id=wire.hugging_face_id or None,
        created_at_s=wire.created,
        context_tokens=wire.context_length,
        max_output_tokens=wire.top_provider.max_completion_tokens if wire.top_provider else None,
        supported_parameters=frozenset(wire.supported_parameters),
        input_modalities=frozenset(shape.input_modalities),
        output_modalities=frozenset(shape.output_modalities),
        tokenizer=shape.tokenizer,
        expiration_date=wire.expiration_date,
    )
