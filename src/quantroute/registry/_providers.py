"""Companies by slug and by display name: requests want the one, answers carry the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from quantroute._html import notebook_table
from quantroute.domain import Provider, slugify
from quantroute.errors import EndpointDataError
from quantroute.registry._endpoints import describe, entries_of, stamp
from quantroute.registry._wire import WireProvider

__all__ = ["ProviderDirectory", "parse_providers"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProviderDirectory:
    """All providers the service lists, found by any spelling of slug or name.

    Slugs are not lower-cased names: "Google" is `google-vertex`, "Moonshot AI" is `moonshotai`.
    """

    providers: tuple[Provider, ...]
    problems: tuple[EndpointDataError, ...] = ()
    fetched_at_s: float
    is_stale: bool = False
    source: str
    _by_spelling: dict[str, Provider] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        spellings: dict[str, Provider] = {}
        # Slugs are entered last: where a name of one is the slug of another, the slug decides.
        for provider in self.providers:
            spellings[slugify(provider.name)] = provider
        for provider in self.providers:
            spellings[slugify(provider.slug)] = provider
        spellings.pop("", None)
        object.__setattr__(self, "_by_spelling", spellings)

    def find(self, spelling: str) -> Provider | None:
        """The provider with this slug or name, or whose tag this is; None if nobody's."""
        exact = self._by_spelling.get(slugify(spelling))
        if exact is None and "/" in spelling:
            exact = self._by_spelling.get(slugify(spelling.split("/", 1)[0]))
        return exact

    def slug_of(self, spelling: str) -> str:
        """The slug for a name, slug or tag; the tag's first segment if the directory lacks it."""
        found = self.find(spelling)
        return found.slug if found else spelling.split("/", 1)[0]

    def name_of(self, spelling: str) -> str:
        """The display name for a name, slug or tag; the tag's first segment if it is not listed."""
        found = self.find(spelling)
        return found.name if found else spelling.split("/", 1)[0]

    def age_s(self, now_s: float) -> float:
        """Seconds since the list was read; `now_s` is Unix time."""
        return max(0.0, now_s - self.fetched_at_s)

    def __iter__(self) -> Iterator[Provider]:
        return iter(self.providers)

    def __len__(self) -> int:
        return len(self.providers)

    def __repr__(self) -> str:
        return (
            f"ProviderDirectory({len(self.providers)} providers, "
            f"{stamp(self.fetched_at_s, is_stale=self.is_stale)}, {self.source})"
        )

    def _repr_html_(self) -> str:
        """A table for notebooks, every text escaped."""
        return notebook_table(
            ("slug", "name", "headquarters", "data centres"),
            (
                (item.slug, item.name, item.headquarters or "-", ", ".join(item.datacenters) or "-")
                for item in self.providers
            ),
            caption=f"providers: {stamp(self.fetched_at_s, is_stale=self.is_stale)}",
        )


def parse_providers(body: object, *, fetched_at_s: float, source: str) -> ProviderDirectory:
    """The directory in `body`; malformed entries become problems.

    Raises:
        RegistryError: `body` is no list of providers.
    """
    providers: list[Provider] = []
    problems: list[EndpointDataError] = []
    for position, entry in enumerate(entries_of(body, "data", what="providers")):
        try:
            wire = WireProvider.model_validate(entry)
        except ValidationError as error:
            problems.append(
                EndpointDataError(model="providers", entry=str(position), problem=describe(error))
            )
            continue
        providers.append(
            Provider(
                slug=wire.slug,
                name=wire.name,
                headquarters=wire.headquarters,
                datacenters=tuple(wire.datacenters),
            )
        )
    return ProviderDirectory(
        providers=tuple(providers),
        problems=tuple(problems),
        fetched_at_s=fetched_at_s,
        source=source,
    )
