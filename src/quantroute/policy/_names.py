"""From a name in any spelling to the endpoints it means.

The service matches lower-case slugs and drops what it does not know without a word, so a display
name in a deny list denies nothing. Here every entry is resolved against the listing first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quantroute.domain import Endpoint, Provider, slugify
from quantroute.errors import ConfigurationError, UnknownName

__all__ = ["Directory", "Name", "unknown_name", "unmatched"]

_SUGGESTIONS = 3
_SIMILARITY = 0.6


@dataclass(frozen=True, slots=True)
class Name:
    """One entry of a user's list: a provider's name or slug, or an endpoint's tag.

    A bare name means all of a provider's endpoints, also where one of them has that very tag;
    `tag#2` means the second of several endpoints that share a tag.
    """

    text: str
    segments: tuple[str, ...]
    ordinal: int | None = None

    @classmethod
    def parse(cls, text: object, *, rule: str) -> Name:
        """The entry, spelling aside.

        Raises:
            ConfigurationError: it holds no letter or digit, or is not text.
        """
        if not isinstance(text, str):
            raise ConfigurationError(f"{rule}: a name is text, not {type(text).__name__}")
        stem, mark, number = text.rpartition("#")
        has_ordinal = bool(mark) and number.isdecimal() and int(number) > 0
        segments = tuple(map(slugify, (stem if has_ordinal else text).strip().split("/")))
        if not all(segments):
            raise ConfigurationError(f"{rule}: {text!r} is not a provider, slug or tag")
        return cls(text, segments, int(number) - 1 if has_ordinal else None)

    @property
    def is_provider_wide(self) -> bool:
        """Whether it can only mean a provider, not one endpoint."""
        return len(self.segments) == 1 and self.ordinal is None


@dataclass(frozen=True, slots=True)
class Directory:
    """Spellings of providers: what the endpoint says, and what the provider list adds."""

    spellings: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, providers: Iterable[Provider]) -> Directory:
        """The directory of a provider list."""
        spellings: dict[str, frozenset[str]] = {}
        for provider in providers:
            known = frozenset({slugify(provider.slug), slugify(provider.name)}) - {""}
            for spelling in known:
                spellings[spelling] = spellings.get(spelling, frozenset()) | known
        return cls(spellings)

    def means(self, name: Name, endpoint: Endpoint) -> bool:
        """Whether `name` means this endpoint."""
        providers = self._spellings_of(endpoint)
        if name.is_provider_wide:
            return name.segments[0] in providers
        first, *rest = map(slugify, endpoint.tag.split("/"))
        return (
            list(name.segments[1:]) == rest
            and name.segments[0] in providers | {first}
            and name.ordinal in (None, endpoint.ordinal)
        )

    def knows(self, name: Name) -> bool:
        """Whether it is a provider of the service, even one that does not serve this model."""
        return name.is_provider_wide and name.segments[0] in self.spellings

    def lists(self, name: Name, provider: Provider) -> bool:
        """Whether `name` means this company as a whole."""
        spellings = {slugify(provider.slug), slugify(provider.name)}
        return name.is_provider_wide and name.segments[0] in spellings

    def _spellings_of(self, endpoint: Endpoint) -> frozenset[str]:
        own = frozenset({slugify(endpoint.provider_name), slugify(endpoint.provider_slug)})
        listed = (self.spellings.get(spelling, frozenset()) for spelling in own)
        return own.union(*listed)


def unmatched(
    names: Iterable[Name], endpoints: Iterable[Endpoint], directory: Directory
) -> tuple[Name, ...]:
    """The names that mean no listed endpoint."""
    listed = tuple(endpoints)
    return tuple(
        name for name in names if not any(directory.means(name, endpoint) for endpoint in listed)
    )


def unknown_name(
    name: Name, *, rule: str, endpoints: Iterable[Endpoint], providers: Iterable[Provider]
) -> UnknownName:
    """The error for a name that means nothing, with the nearest ones that do."""
    known: dict[str, str] = {}
    for provider in providers:
        known[slugify(provider.slug)] = known[slugify(provider.name)] = provider.name
    for endpoint in endpoints:
        known[slugify(endpoint.tag)] = endpoint.tag
        known[slugify(endpoint.provider_name)] = endpoint.provider_name
    near = difflib.get_close_matches(
        "".join(name.segments), known, n=_SUGGESTIONS, cutoff=_SIMILARITY
    )
    suggestions = tuple(dict.fromkeys(known[spelling] for spelling in near))
    return UnknownName(name=name.text, rule=rule, suggestions=suggestions)
