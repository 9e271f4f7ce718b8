"""Facts that endpoint labels do not say: native formats, and what a provider really serves.

The table is data (TOML), not code. Every row has a source and a date; a serving row also expires,
because a provider may change what it runs any day without telling anybody.
"""

from __future__ import annotations

import datetime as dt
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from quantroute.domain import Endpoint, Quantization, slugify
from quantroute.errors import ConfigurationError

__all__ = ["EvidenceRow", "EvidenceTable", "NativeRow"]

_BUILTIN: Final = "evidence.toml"
_SAME_WEIGHTS: Final = frozenset({"free", "batch", "nitro", "floor", "exacto", "online"})
"""Variants of a model id that choose a way of serving, not other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow:
    """What one provider serves for one model, according to `source`.

    Without `tag` it speaks of all of the provider's endpoints for that model. `quantization` may
    be UNKNOWN: then the row says that the label is not to be believed. `failed` says more: the
    answers are not those of the model, and no setting accepts the endpoint.
    """

    model: str
    provider: str
    quantization: Quantization
    source: str
    date: dt.date
    expires: dt.date
    tag: str | None = None
    note: str = ""
    failed: bool = False

    def is_fresh(self, at: dt.datetime) -> bool:
        """Whether the row still counts at `at` (UTC); the day of `expires` is its last."""
        return utc_date(at) <= self.expires

    def speaks_of(self, endpoint: Endpoint) -> bool:
        """Whether the row is about this provider and tag; the model is not looked at."""
        if self.tag is not None:
            return self.tag.casefold() == endpoint.tag.casefold()
        spellings = (endpoint.provider_name, endpoint.provider_slug)
        return slugify(self.provider) in map(slugify, spellings)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        row = {item.name: getattr(self, item.name) for item in fields(self)}
        return row | {
            "quantization": self.quantization.value,
            "date": self.date.isoformat(),
            "expires": self.expires.isoformat(),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> EvidenceRow:
        """The row that `as_dict` described.

        Raises:
            KeyError, TypeError, ValueError: not such a description.
        """
        return cls(
            **{
                **stored,
                "quantization": Quantization(stored["quantization"]),
                "date": dt.date.fromisoformat(stored["date"]),
                "expires": dt.date.fromisoformat(stored["expires"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRow:
    """The format in which a model's own weights are published; `aliases` are its other ids."""

    model: str
    quantization: Quantization
    source: str
    date: dt.date
    expires: dt.date
    aliases: tuple[str, ...] = ()
    note: str = ""

    def is_fresh(self, at: dt.datetime) -> bool:
        """Whether the row still counts at `at` (UTC)."""
        return utc_date(at) <= self.expires


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceTable:
    """Rows in order of precedence: of those that apply, the first fresh one counts."""

    natives: tuple[NativeRow, ...] = ()
    serving: tuple[EvidenceRow, ...] = ()

    @classmethod
    def builtin(cls) -> EvidenceTable:
        """The table that ships with quantroute."""
        return _builtin()

    @classmethod
    def load(cls, path: str | Path) -> EvidenceTable:
        """A table of your own, from a TOML file like the shipped `policy/evidence.toml`.

        Raises:
            ConfigurationError: the file cannot be read, or a row is wrong; names row and field.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"evidence table {path}: {error}") from error
        return cls.parse(text, name=str(path))

    @classmethod
    def parse(cls, text: str, *, name: str = "evidence") -> EvidenceTable:
        """A table from TOML text; `name` is what errors call it.

        Raises:
            ConfigurationError: not TOML, or a row is wrong; names row and field.
        """
        try:
            wire = _WireTable.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"evidence table {name}: not TOML: {error}") from error
        except ValidationError as error:
            raise ConfigurationError(f"evidence table {name}: {_problems(error)}") from None
        _refuse_contradictions(wire.serving, name)
        # Within a file a row about one tag precedes one about the whole provider, newer first.
        serving = sorted(wire.serving, key=lambda row: (row.tag is None, -row.date.toordinal()))
        natives = sorted(wire.native, key=lambda row: -row.date.toordinal())
        return cls(
            natives=tuple(NativeRow(**_content(row)) for row in natives),
            serving=tuple(EvidenceRow(**_content(row)) for row in serving),
        )

    def merged(self, other: EvidenceTable) -> EvidenceTable:
        """Both tables; where both speak, `other` (the user's) wins while it is fresh."""
        return EvidenceTable(
            natives=other.natives + self.natives, serving=other.serving + self.serving
        )

    def native(self, model: str, *, at: dt.datetime) -> Quantization | None:
        """The format of the model's own weights, None if no fresh row says."""
        for row in self.natives:
            if row.is_fresh(at) and _same(model, (row.model, *row.aliases)):
                return row.quantization
        return None

    def find(self, endpoint: Endpoint, *, at: dt.datetime) -> EvidenceRow | None:
        """The row that says what this endpoint serves: a fresh one, else an expired one."""
        ids = self._ids(endpoint.model)
        found = [row for row in self.serving if _same(row.model, ids) and row.speaks_of(endpoint)]
        return next((row for row in found if row.is_fresh(at)), found[0] if found else None)

    def failed_tags(self, model: str | None, *, at: dt.datetime | None = None) -> frozenset[str]:
        """Tags whose rows say that they do not serve the model.

        Args:
            model: None for any model.
            at: only rows that are fresh then. For answers that were bought already, leave it out:
                they do not become better by waiting until the finding expires.
        """
        failed = [row for row in self.serving if row.failed and row.tag is not None]
        ids = () if model is None else self._ids(model)
        return frozenset(
            str(row.tag)
            for row in failed
            if (at is None or row.is_fresh(at)) and (model is None or _same(row.model, ids))
        )

    def _ids(self, model: str) -> tuple[str, ...]:
        for row in self.natives:
            if _same(model, (row.model, *row.aliases)):
                return (row.model, *row.aliases)
        return (model,)


def utc_date(at: dt.datetime) -> dt.date:
    """The calendar day of `at` in UTC; a naive time is taken to be UTC already."""
    return (at if at.tzinfo is None else at.astimezone(dt.UTC)).date()


def _same(model: str, ids: Iterable[str]) -> bool:
    return _weights(model) in map(_weights, ids)


def _weights(model: str) -> str:
    base, _, variant = model.casefold().partition(":")
    return base if not variant or variant in _SAME_WEIGHTS else model.casefold()


@functools.cache
def _builtin() -> EvidenceTable:
    text = resources.files("quantroute.policy").joinpath(_BUILTIN).read_text(encoding="utf-8")
    return EvidenceTable.parse(text, name=f"policy/{_BUILTIN}")


# -- the file's form ------------------------------------------------------------------------------


def _known_format(label: object) -> Quantization:
    found = Quantization.parse(label)
    if found is Quantization.UNKNOWN:
        raise ValueError(f"{label!r} is not a known format")
    return found


def _served_format(label: object) -> Quantization:
    return Quantization.UNKNOWN if label == "unknown" else _known_format(label)


_Text = Annotated[str, Field(min_length=1)]


class _WireRow(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    model: _Text
    source: _Text
    date: Annotated[dt.date, Field(strict=False)]
    expires: Annotated[dt.date, Field(strict=False)]
    note: str = ""

    def model_post_init(self, _context: Any) -> None:
        if self.expires < self.date:
            raise ValueError(f"expires {self.expires} is before date {self.date}")


class _WireNative(_WireRow):
    quantization: Annotated[Quantization, BeforeValidator(_known_format)]
    aliases: Annotated[tuple[_Text, ...], Field(strict=False)] = ()


class _WireServing(_WireRow):
    provider: _Text
    quantization: Annotated[Quantization, BeforeValidator(_served_format)]
    tag: _Text | None = None
    failed: bool = False


class _WireTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    native: list[_WireNative] = []
    serving: list[_WireServing] = []


def _content(row: _WireRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).model_fields}


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in error.errors())


def _place(location: tuple[int | str, ...]) -> str:
    """`[[serving]] row 2, field expires`, counted from 1 as a reader of the file does."""
    match location:
        case (str(table), int(index), *rest):
            row = f"[[{table}]] row {index + 1}"
            return f"{row}, field {'.'.join(map(str, rest))}" if rest else row
        case _:
            return ".".join(map(str, location)) or "file"


def _refuse_contradictions(rows: Iterable[_WireServing], name: str) -> None:
    seen: dict[tuple[str, str, str, dt.date], int] = {}
    for number, row in enumerate(rows, start=1):
        tag = "" if row.tag is None else row.tag.casefold()
        key = (_weights(row.model), slugify(row.provider), tag, row.date)
        if key in seen:
            raise ConfigurationError(
                f"evidence table {name}: [[serving]] rows {seen[key]} and {number} speak of the "
                "same endpoint on the same date; keep one"
            )
        seen[key] = number
