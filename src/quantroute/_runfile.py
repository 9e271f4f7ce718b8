"""`run.toml` as a file: read once, and each stage takes the tables that are its own.

A stage describes its tables as a pydantic model whose fields are the file's top-level names. Errors
name file, line and field, and say what would be allowed.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from quantroute.domain import fit_for_path
from quantroute.errors import ConfigurationError

__all__ = ["RunFile", "Table"]

#: Every table that some stage reads. A stage passes over the tables of the others.
_KNOWN: Final = frozenset(
    {"run", "policy", "sampling", "dataset", "local"}
    | {"extract", "data", "train", "evaluate", "deploy", "audit"}
)


_EXPECTED: Final = "a run file is expected here, `quantroute init --prompts FILE` writes one"


class Table(BaseModel):
    """One table of the file; a field it does not declare is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


Form = TypeVar("Form", bound=Table)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The file's tables, and its text to find the line a field stands in."""

    path: Path
    lines: tuple[str, ...]
    tables: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path | str) -> RunFile:
        """Read the file.

        Raises:
            ConfigurationError: not readable, or not TOML.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors begin with a byte order mark
        except FileNotFoundError:
            raise ConfigurationError(
                f"{path}: there is no such file; `quantroute init {shlex.quote(str(path))}` writes "
                "one to start from"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{path}: not UTF-8 at byte {error.start}; convert the file to UTF-8"
            ) from None
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at line (\d+), column \d+\)", str(error))
            where = f"{path}:{found[1]}" if found else str(path)
            hint = "" if path.suffix == ".toml" else f"; {_EXPECTED}"
            raise ConfigurationError(f"{where}: not TOML: {error}{hint}") from None
        return cls(path=path, lines=tuple(text.split("\n")), tables=tables)

    def parse(self, form: type[Form]) -> Form:
        """The tables that `form` names; those of other stages are passed over.

        Raises:
            ConfigurationError: a table or a field is missing, unknown or impossible; all at once.
        """
        own = {
            name: value
            for name, value in self.tables.items()
            if name in form.model_fields or name not in _KNOWN
        }
        try:
            return form.model_validate(own)
        except ValidationError as error:
            raise ConfigurationError("\n".join(self._problems(error, _forms(form)))) from None

    def resolve(self, path: str) -> Path:
        """A path of the file: relative ones start from the file's folder."""
        return self.path.parent / path

    @property
    def run_folder(self) -> Path:
        """Where the run lives: `out`, else `runs/NAME`."""
        run = self.tables.get("run")
        run = run if isinstance(run, dict) else {}
        given = run.get("out") or f"runs/{run.get('name') or fit_for_path(self.path.stem)}"
        return self.resolve(str(given))

    def where(self, location: tuple[str | int, ...]) -> str:
        """`run.toml:12: run.cap_usd`, without the line where it is not known."""
        line = self._line(location)
        at = f"{self.path}:{line}" if line else str(self.path)
        return f"{at}: {_dotted(location)}"

    def error(self, location: tuple[str | int, ...], problem: object) -> ConfigurationError:
        """The error for one field."""
        return ConfigurationError(f"{self.where(location)}: {problem}")

    def _line(self, location: tuple[str | int, ...]) -> int | None:
        table, *rest = location
        index = rest[0] if rest and isinstance(rest[0], int) else None
        rest = rest[1:] if index is not None else rest
        start = self._header(str(table), index)
        if start is None or not rest:
            return start
        key = re.compile(rf"\s*(?:\"{re.escape(str(rest[0]))}\"|{re.escape(str(rest[0]))})\s*[.=]")
        for number, line in enumerate(self.lines[start:], start=start + 1):
            if line.lstrip().startswith("["):
                break
            if key.match(line):
                return number
        return start

    def _header(self, table: str, index: int | None) -> int | None:
        brackets = (r"\[", r"\]") if index is None else (r"\[\[", r"\]\]")
        header = re.compile(rf"\s*{brackets[0]}\s*{re.escape(table)}\s*{brackets[1]}")
        found = [number for number, line in enumerate(self.lines, start=1) if header.match(line)]
        wanted = index or 0
        return found[wanted] if wanted < len(found) else None

    def _problems(self, error: ValidationError, forms: Mapping[str, type[Table]]) -> list[str]:
        """One line per field: of a field that may be of several types, the first complaint."""
        lines: dict[tuple[str | int, ...], str] = {}
        for item in error.errors(include_url=False):
            location = item["loc"]
            if item["type"] != "extra_forbidden":
                location = _own_names(location, forms)
            problem = _problem(item, location, forms)
            lines.setdefault(location, f"{self.where(location)}: {problem}")
        return list(lines.values())


def _dotted(location: tuple[str | int, ...]) -> str:
    """`dataset[2].sampling.top_p`; datasets are counted from 1, as people do."""
    text = ""
    for part in location:
        text += f"[{part + 1}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def _forms(form: type[Table]) -> dict[str, type[Table]]:
    """Every table that `form` holds, at any depth, by its name."""
    found: dict[str, type[Table]] = {}
    for name, item in form.model_fields.items():
        for part in _parts(item.annotation):
            found[name] = part
            found.update(_forms(part))
    return found


def _parts(annotation: Any) -> Iterator[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def _own_names(
    location: tuple[str | int, ...], forms: Mapping[str, type[Table]]
) -> tuple[str | int, ...]:
    """Without the words pydantic adds for the members of a union."""
    known = {name for table in forms.values() for name in table.model_fields} | set(forms)
    return tuple(part for part in location if isinstance(part, int) or part in known)


def _problem(
    item: Mapping[str, Any], location: tuple[str | int, ...], forms: Mapping[str, type[Table]]
) -> str:
    match item["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            table = next((str(part) for part in reversed(location[:-1]) if part in forms), "")
            allowed = sorted(forms[table].model_fields if table else _KNOWN)
            return f"unknown field {location[-1]!r}; allowed are: {', '.join(allowed)}"
        case "string_type" if str(location[-1]).endswith(("_usd", "_per_million")):
            return f'money is written as text: {location[-1]} = "{item["input"]}"'
        case "literal_error":
            return f"must be {item['ctx']['expected']}, not {item['input']!r}"
        case _:
            message = str(item["msg"])
            return f"{message[:1].lower()}{message[1:]}, not {item['input']!r}"
