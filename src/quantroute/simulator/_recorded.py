"""Recorded catalogues: the service's own answers of one day, read from a file.

The file holds `{captured_at, models, providers, endpoints}`: the bodies of /models and /providers,
and for each model id the body of its /endpoints answer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantroute.errors import ConfigurationError

__all__ = ["RecordedCatalogue", "read_recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCatalogue:
    """Wire objects as they were answered; treat them as read-only."""

    captured_at: str
    models: tuple[dict[str, Any], ...]
    providers: tuple[dict[str, Any], ...]
    endpoints: dict[str, dict[str, Any]]


def read_recorded(path: Path) -> RecordedCatalogue:
    """The catalogue in a .json or .json.gz file.

    Raises:
        ConfigurationError: missing, unreadable, not JSON, or of another shape.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        fields = json.loads(raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigurationError(f"catalogue {path}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"catalogue {path}: the top level must be an object")
    endpoints = fields.get("endpoints")
    if not isinstance(endpoints, dict):
        raise ConfigurationError(f"catalogue {path}: endpoints: an object by model id is missing")
    return RecordedCatalogue(
        captured_at=str(fields.get("captured_at", "")),
        models=_rows(fields, "models", path),
        providers=_rows(fields, "providers", path),
        endpoints={model: _body(body) for model, body in endpoints.items()},
    )


def _rows(fields: dict[str, Any], key: str, path: Path) -> tuple[dict[str, Any], ...]:
    rows = fields.get(key)
    if isinstance(rows, dict):
        rows = rows.get("data")
    if not isinstance(rows, list):
        raise ConfigurationError(f"catalogue {path}: {key}.data: a list is missing")
    return tuple(row for row in rows if isinstance(row, dict))


def _body(body: Any) -> dict[str, Any]:
    """The `data` object of one /endpoints body; an empty one when there is none."""
    if isinstance(body, dict) and isinstance(body.get("data"), dict):
        return dict(body["data"])
    return {"endpoints": body} if isinstance(body, list) else {}
