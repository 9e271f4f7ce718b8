"""Prompts: what a run asks, read lazily from files that people really have.

A line is cut at byte 0x0A and nowhere else: U+2028, U+2029 and U+0085 are text. A byte order mark,
CRLF and blank lines are tolerated.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal

from quantroute.domain import canonical_json, fit_for_path
from quantroute.errors import ConfigurationError, DatasetError

__all__ = ["DatasetSource", "Prompt", "builtin_prompts", "dataset_name", "read_prompts"]

BUILTIN_DATASET: Final = "builtin"

Answers = Literal["regenerate", "reject"]
"""What to do with answers that a file brings along: the target writes its own, or an error."""

_BOM: Final = b"\xef\xbb\xbf"
_UTF16: Final = "is in UTF-16: iconv -f UTF-16 -t UTF-8 < FILE > OUT.jsonl"
#: How files begin that hold prompts in a form that is not read, and what makes it one that is.
_OTHER_FORMS: Final = {
    b"\x1f\x8b": "is compressed with gzip: gunzip -k FILE",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unzstd FILE",
    b"BZh": "is compressed with bzip2: bunzip2 -k FILE",
    b"\xfd7zXZ": "is compressed with xz: unxz -k FILE",
    b"PK\x03\x04": "is a zip archive: unzip FILE",
    b"PAR1": "is Parquet: pandas writes it as JSONL, with to_json(orient='records', lines=True)",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_OTHER_JSON: Final = {
    b"[": "is one JSON array, one object per line is expected: jq -c '.[]' FILE > OUT.jsonl",
    b"{": "has objects over several lines, one per line is expected: jq -c . FILE > OUT.jsonl",
}
_HUMAN: Final = frozenset({"human", "user"})
_MODEL: Final = frozenset({"gpt", "assistant", "chatgpt", "model", "bot"})
_SYSTEM: Final = frozenset({"system", "developer"})
_ID_FIELDS: Final = ("id", "question_id", "prompt_id")
_BODY_FIELDS: Final = frozenset(
    {"prompt", "turns", "messages", "conversations", "system", "id", "prompt_id"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to be had: the user's turns, in order; the target writes the answers.

    Args:
        id: as the file names it, for people; need not be unique (rows are told apart by content).
        dataset: whose account pays and whose statistics count; a name without "/".
        metadata: whatever else the file says about the prompt; kept with the row.
    Raises:
        ConfigurationError: no turn, an empty turn, or text that is not valid Unicode.
    """

    id: str
    dataset: str
    turns: tuple[str, ...]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.turns:
            raise ConfigurationError("a prompt needs at least one user turn")
        for position, text in enumerate(self.turns, start=1):
            _check_text(text, f"user turn {position}")
        if self.system is not None:
            _check_text(self.system, "the system prompt")
        if self.dataset != dataset_name(self.dataset):
            raise ConfigurationError(
                f"a dataset's name is made of letters, digits and . _ -, not {self.dataset!r}"
            )
        if not self.metadata:
            return
        try:
            canonical_json(self.metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the metadata cannot be kept as JSON: {error}") from None

    def messages(self) -> tuple[dict[str, str], ...]:
        """The system prompt, if any, and the user turns: what identifies the row."""
        users = tuple([{"role": "user", "content": text} for text in self.turns])
        if self.system is None:
            return users
        return ({"role": "system", "content": self.system}, *users)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """Where a dataset came from; `sha256` is of the file's bytes. Kept in the run's manifest."""

    name: str
    location: str
    sha256: str

    @classmethod
    def of(cls, path: Path | str, *, name: str | None = None) -> DatasetSource:
        """The source record of a file.

        Raises:
            DatasetError: it cannot be read, or only once, as a pipe.
        """
        path = Path(path)
        check_rereadable(path)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
        return cls(name=name or dataset_name(path.stem), location=path.name, sha256=digest)


@functools.lru_cache(maxsize=256)  # asked for each prompt, for the few datasets of a run
def dataset_name(text: str) -> str:
    """`text` as a dataset's name, which is part of its account's."""
    return fit_for_path(text)


def read_prompts(
    path: Path | str,
    *,
    dataset: str | None = None,
    answers: Answers = "regenerate",
    on_error: Callable[[DatasetError], None] | None = None,
) -> Iterator[Prompt]:
    """The prompts of a file, one at a time, in its order.

    A `.txt` file has one prompt per line. Any other has one JSON object per line, in one of four
    forms: `{"prompt": text}`, `{"turns": [text, ...]}` (MT-bench), `{"messages": [...]}` (OpenAI),
    `{"conversations": [{"from": ..., "value": ...}, ...]}` (ShareGPT). A `system` field or first
    system message is the system prompt. Other fields are kept as metadata.

    Args:
        dataset: by default the file's name without its ending.
        answers: answers in the file were written by some other model. "regenerate" leaves them out,
            since every turn is generated on the target's own earlier answers, and counts them in
            the metadata (`replaced_answers`). "reject" makes them an error, for files whose answers
            are meant as examples to follow.
        on_error: called for each line that cannot be used, which is then left out; without it the
            first such line raises.
    Raises:
        DatasetError: with file and line, and what to do.
    """
    path = Path(path)
    name = dataset_name(dataset or path.stem)
    parse = _parse_text if path.suffix.lower() == ".txt" else _parse_json
    try:
        with path.open("rb") as file:
            _check_form(path, file.peek(64))
            for number, raw in _lines(file):
                try:
                    yield parse(raw, number, name, answers)
                except ConfigurationError as error:
                    problem = DatasetError(path=str(path), line=number, problem=str(error))
                    if on_error is None:
                        raise problem from error
                    on_error(problem)
    except OSError as error:
        raise _unreadable(path, error) from error


def check_rereadable(path: Path) -> None:
    """Refuse a pipe: a run reads its prompts to check, to count and to ask them.

    Raises:
        DatasetError: it is no file; whoever opened it a second time might wait for ever.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        problem = "is a pipe or a device, and prompts are read more than once: make it a file"
        raise DatasetError(path=str(path), problem=problem)


def builtin_prompts() -> Iterator[Prompt]:
    """The prompts that come with the package: eighty of two turns, in eight categories."""
    resource = importlib.resources.files("quantroute") / "data" / "prompts.jsonl"
    with importlib.resources.as_file(resource) as path:
        yield from read_prompts(path, dataset=BUILTIN_DATASET)


def _check_form(path: Path, begin: bytes) -> None:
    """Refuse a file as a whole where each of its lines would be an error of its own."""
    found = [text for magic, text in _OTHER_FORMS.items() if begin.startswith(magic)]
    if not found and path.suffix.lower() != ".txt":
        first, *more = begin.removeprefix(_BOM).split(b"\n", 1)
        opening = first.strip()
        if opening.startswith(b"[") or (opening == b"{" and more):
            found = [_OTHER_JSON[opening[:1]]]
        elif path.suffix.lower() in (".csv", ".tsv"):
            found = ["is a table: write its prompts as JSONL or as a .txt file, one a line"]
    if found:
        text = found[0].replace("FILE", shlex.quote(str(path)))
        raise DatasetError(path=str(path), problem=text)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank. A binary file is cut at 0x0A only."""
    for number, raw in enumerate(file, start=1):
        line = raw.removeprefix(_BOM) if number == 1 else raw
        line = line.rstrip(b"\r\n")
        if line.strip():
            yield number, line


def _parse_text(raw: bytes, number: int, dataset: str, answers: Answers) -> Prompt:
    return Prompt(id=str(number), dataset=dataset, turns=(_decode(raw),))


def _parse_json(raw: bytes, number: int, dataset: str, answers: Answers) -> Prompt:
    text = _decode(raw)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"not JSON ({error}); one object per line is expected, the file may be cut short here"
        ) from None
    if not isinstance(row, dict):
        raise ConfigurationError(f"an object is expected, not {type(row).__name__}")
    system, turns, replaced = _conversation(row)
    if replaced and answers == "reject":
        raise ConfigurationError(
            f"{replaced} answers by another model; remove them, "
            "or let the target regenerate them (answers='regenerate')"
        )
    metadata = {name: value for name, value in row.items() if name not in _BODY_FIELDS}
    if replaced:
        metadata["replaced_answers"] = replaced
    identity = next((row[name] for name in _ID_FIELDS if row.get(name) is not None), number)
    return Prompt(id=str(identity), dataset=dataset, turns=turns, system=system, metadata=metadata)


def _conversation(row: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...], int]:
    """System prompt, user turns, and the number of answers that were left out."""
    forms = [name for name in ("prompt", "turns", "messages", "conversations") if name in row]
    if len(forms) != 1:
        raise ConfigurationError(
            "exactly one of prompt, turns, messages, conversations is expected, "
            f"not {', '.join(forms) or 'none'}"
        )
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ConfigurationError(f"system must be text, not {type(system).__name__}")
    value = row[forms[0]]
    if forms[0] == "prompt":
        return system, (_text(value, "prompt"),), 0
    if not isinstance(value, list):
        raise ConfigurationError(f"{forms[0]} must be a list, not {type(value).__name__}")
    if forms[0] == "turns":
        return system, tuple(_text(item, "a turn") for item in value), 0
    role_field, text_field = ("role", "content") if forms[0] == "messages" else ("from", "value")
    pairs = [_message(item, role_field, text_field) for item in value]
    return _split_roles(pairs, system)


def _message(item: object, role_field: str, text_field: str) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise ConfigurationError(f"a message must be an object, not {type(item).__name__}")
    role, content = item.get(role_field), item.get(text_field)
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    return str(role).lower(), _text(content, f"the {role} message")


def _text_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ConfigurationError("only text can be sent; leave out rows with images, audio or files")


def _split_roles(
    pairs: list[tuple[str, str]], system: str | None
) -> tuple[str | None, tuple[str, ...], int]:
    turns: list[str] = []
    replaced, previous = 0, ""
    for position, (role, text) in enumerate(pairs):
        if role in _SYSTEM:
            if position or system is not None:
                raise ConfigurationError("a system message may only come first, and once")
            system = text
        elif role in _HUMAN:
            if previous in _HUMAN:
                raise ConfigurationError("two user messages in a row; make them one")
            turns.append(text)
        elif role in _MODEL:
            replaced += 1
        else:
            raise ConfigurationError(
                f"a message of role {role!r} cannot be sent; leave the row out"
            )
        previous = role
    return system, tuple(turns), replaced


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be text, not {type(value).__name__}")
    return value


def _check_text(text: str, what: str) -> None:
    if not text.strip():
        raise ConfigurationError(f"{what} is empty; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} holds a lone surrogate: not valid Unicode") from None


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"not UTF-8 at byte {error.start} of the line; convert the file to UTF-8"
        ) from None


def _unreadable(path: Path, error: OSError) -> DatasetError:
    return DatasetError(path=str(path), problem=f"cannot be read: {error.strerror or error}")
