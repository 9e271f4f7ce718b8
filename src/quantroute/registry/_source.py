"""Where catalogue bodies come from: the seam between the registry and the service or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from quantroute.errors import RegistryError

__all__ = ["ModelNotListed", "Params", "Reading", "Source"]

Params = tuple[tuple[str, str], ...]


class ModelNotListed(RegistryError):
    """The catalogue does not have this model, or never can; a retry changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One body, parsed by `_json.loads`; `at_s` is Unix time."""

    body: object
    at_s: float


class Source(Protocol):
    """Reads catalogue bodies. Every method raises `RegistryError` when it cannot."""

    @property
    def name(self) -> str:
        """The base URL or the file, for people."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether reading again can give something else, and queries are answered there."""
        ...

    async def endpoints(self, model: str) -> Reading:
        """The endpoint list's body; `ModelNotListed` when there is no such model."""
        ...

    async def models(self, params: Params) -> Reading:
        """The model list's body."""
        ...

    async def providers(self) -> Reading:
        """The provider list's body."""
        ...

    async def close(self) -> None:
        """Let go of sockets."""
        ...


def is_error_body(body: object) -> bool:
    """Whether a body is the service's error object, which can come with status 200."""
    return isinstance(body, Mapping) and "data" not in body and bool(body.get("error"))
