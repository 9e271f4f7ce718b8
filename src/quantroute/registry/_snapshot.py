"""A catalogue in a file: written whole or not at all, read without a network.

The form is `{captured_at, models, providers, endpoints: {model: body}}`, each body as the service
answered it, unknown fields included; a name that ends in `.gz` is compressed.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quantroute._json import dumps, loads
from quantroute.errors import RegistryError
from quantroute.registry._models import closest
from quantroute.registry._source import ModelNotListed, Params, Reading
from quantroute.storage import atomic_write

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A recorded catalogue as a source; it never changes and answers no queries."""

    path: Path
    captured_at_s: float
    bodies: Mapping[str, object]
    lists: Mapping[str, object]

    def __repr__(self) -> str:
        return f"Snapshot({str(self.path)!r}, {len(self.lists)} endpoint lists)"

    @property
    def name(self) -> str:
        return f"snapshot {self.path.name}"

    @property
    def is_live(self) -> bool:
        return False

    async def endpoints(self, model: str) -> Reading:
        if model not in self.lists:
            near = closest(model, iter(self.lists))
            hint = f"; it has {', '.join(near)}" if near else ""
            raise ModelNotListed(f"{self.path.name} holds no endpoint list of {model}{hint}")
        return Reading(body=self.lists[model], at_s=self.captured_at_s)

    async def models(self, params: Params) -> Reading:
        return self._body("models")

    async def providers(self) -> Reading:
        return self._body("providers")

    async def close(self) -> None:
        pass

    def _body(self, name: str) -> Reading:
        body = self.bodies.get(name)
        if isinstance(body, list):
            body = {"data": body}
        if body is None:
            raise RegistryError(f"{self.path.name} holds no {name}; take a whole snapshot")
        return Reading(body=body, at_s=self.captured_at_s)


def read_snapshot(path: Path) -> Snapshot:
    """The catalogue in `path`, compressed or not.

    Raises:
        RegistryError: no such file, or not a catalogue.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
        content = loads(text)
        fallback_s = path.stat().st_mtime
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise RegistryError(f"{path}: cannot read this snapshot: {error}") from error
    lists = content.get("endpoints") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(lists, dict):
        raise RegistryError(f"{path}: not a catalogue snapshot (no `endpoints` object)")
    return Snapshot(
        path=path,
        captured_at_s=_unix_s(content.get("captured_at"), fallback_s),
        bodies={name: content.get(name) for name in ("models", "providers")},
        lists=lists,
    )


def write_snapshot(
    path: Path,
    *,
    captured_at_s: float,
    models: object,
    providers: object,
    endpoints: Mapping[str, object],
) -> None:
    """Write a catalogue; the file appears complete under its name, or the old one stays.

    Raises:
        RegistryError: the folder cannot be written or the disk is full.
    """
    text = dumps(
        {
            "captured_at": datetime.fromtimestamp(captured_at_s, UTC).isoformat(),
            "models": models,
            "providers": providers,
            "endpoints": dict(endpoints),
        }
    )
    raw = text.encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw, mtime=0)  # equal catalogues give equal files
    try:
        atomic_write(path, raw)
    except OSError as error:
        raise RegistryError(f"{path}: snapshot not written: {error}") from error


def _unix_s(captured_at: object, fallback_s: float) -> float:
    """Unix seconds of an ISO time, UTC if it names no zone; the file's own time if unreadable."""
    try:
        at = datetime.fromisoformat(str(captured_at))
    except ValueError:
        return fallback_s
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
