"""The target's own tokenizer, from a local folder: renders prompts, keeps text apart from control.

A control token is an added token of the tokenizer, special or not. Where a user or the model merely
wrote its letters, they stay letters: `Marked` text says which parts are such text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.domain import canonical_json
from quantroute.errors import ConfigurationError

__all__ = ["Marked", "Message", "TargetTokenizer", "TemplateFailure", "Unencodable"]

Message = Mapping[str, Any]

#: Files that decide how text becomes ids; remote code (`*.py`) and models come by pattern.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
)


class TemplateFailure(Exception):
    """The template refused the messages, in its own words."""


class Unencodable(Exception):
    """A text that the tokenizer cannot take, or cannot take without making control tokens of it."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A text, and the parts of it (from, to; in order) in which control tokens are only letters.

    >>> Marked.join(("<think>", False), ("a </think> b", True))
    Marked(text='<think>a </think> b', plain=((7, 19),))
    """

    text: str
    plain: tuple[tuple[int, int], ...] = ()

    @classmethod
    def join(cls, *parts: tuple[str, bool]) -> Marked:
        """From parts, each with whether it is plain text."""
        text, plain = "", []
        for part, is_plain in parts:
            if is_plain and part:
                plain.append((len(text), len(text) + len(part)))
            text += part
        return cls(text, tuple(plain))


class TargetTokenizer:
    """A tokenizer with its chat template.

    Attributes:
        folder: where it was loaded from.
        tokenizer_sha256: of the files that decide how text becomes ids.
        template: the chat template's text; `template_sha256` is of it.
        control: id of every added token, by its text.
        remote_code: whether code from the folder was run.
        generation_ends: ids at which the model's own generation settings stop, if the folder says.
    """

    def __init__(
        self, tokenizer: Any, folder: Path, *, template: str, remote_code: bool = False
    ) -> None:
        self._hf = tokenizer
        self.folder = folder
        self.template = template
        self.remote_code = remote_code
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.tokenizer_sha256 = _hash_files(folder)
        self.control = _control_tokens(tokenizer)
        self._strips = _stripping(tokenizer)
        self.generation_ends = _generation_ends(folder)
        by_length = sorted(self.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, by_length)) if by_length else r"(?!)")
        self._backend = _backend(tokenizer)
        self._anchor = self._needed_anchor()
        self.separates_text = self._can_separate()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        template: Path | str | None = None,
        trust_remote_code: bool = False,
    ) -> TargetTokenizer:
        """From a local folder in Hugging Face form; nothing is downloaded.

        Args:
            template: a file to use in place of the folder's own chat template.
            trust_remote_code: run Python code that lies in the folder.
        Raises:
            ConfigurationError: no tokenizer there, no chat template, or code that is not trusted.
        """
        folder = Path(folder)
        hf = _load_hf(folder, trust_remote_code=trust_remote_code)
        if template is not None:
            hf.chat_template = _read_template(Path(template))
        text = hf.chat_template
        if isinstance(text, Mapping):  # several, by name
            text = text.get("default")
        if not text:
            raise ConfigurationError(
                f"{folder}: no chat template; give one as a file (chat_template = '...jinja')"
            )
        remote = bool(trust_remote_code and any(folder.glob("*.py")))
        return cls(hf, folder, template=text, remote_code=remote)

    def identity(self) -> dict[str, Any]:
        """What a manifest says about it."""
        return {
            "folder": self.folder.name,
            "tokenizer_sha256": self.tokenizer_sha256,
            "template_sha256": self.template_sha256,
            "vocab_size": len(self._hf),
            "remote_code": self.remote_code,
        }

    def render(
        self, messages: Sequence[Message], *, prompt: bool, switches: Mapping[str, Any]
    ) -> str:
        """The conversation as the template writes it; `prompt` adds the generation prompt.

        Raises:
            TemplateFailure: the template will not have it.
        """
        import jinja2

        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
                **switches,
            )
        except (jinja2.TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateFailure(str(error)) from error
        return str(text)

    def has_control(self, text: str) -> bool:
        """Whether the letters of a control token stand somewhere in the text."""
        return self._control.search(text) is not None

    def leading_control(self, text: str) -> str | None:
        """The control token at the very beginning of the text."""
        found = self._control.match(text)
        return found[0] if found else None

    def controls(self, text: str) -> Iterator[re.Match[str]]:
        """Where letters of control tokens stand."""
        return self._control.finditer(text)

    def encode_after(self, texts: Sequence[Marked]) -> list[list[int] | Unencodable]:
        """As `encode`, for texts that something comes before: none begins a text of its own."""
        if self._anchor is None:
            return self.encode(texts)
        anchor = self._anchor
        moved = [
            Marked(
                anchor + item.text,
                tuple((start + len(anchor), end + len(anchor)) for start, end in item.plain),
            )
            for item in texts
        ]
        return [ids if isinstance(ids, Unencodable) else ids[1:] for ids in self.encode(moved)]

    def encode(self, texts: Sequence[Marked]) -> list[list[int] | Unencodable]:
        """Ids of each text, without anything added; text and control are told apart.

        A text that cannot be encoded gives the reason in its place.
        """
        whole = [index for index, item in enumerate(texts) if not self._has_lookalike(item)]
        found: list[list[int] | Unencodable] = [[] for _ in texts]
        for index, ids in zip(
            whole, self._encode_whole([texts[i].text for i in whole]), strict=True
        ):
            found[index] = ids
        for index in sorted(set(range(len(texts))) - set(whole)):
            try:
                found[index] = self._encode_apart(texts[index])
            except Unencodable as problem:
                found[index] = problem
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        text = self._hf.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    # -- how -------------------------------------------------------------------------------------

    def _has_lookalike(self, item: Marked) -> bool:
        return any(self._control.search(item.text, start, end) for start, end in item.plain)

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int] | Unencodable]:
        """With control tokens recognised everywhere, as a server encodes a rendered prompt."""
        if self._backend is not None:
            try:
                batch = self._backend[0].encode_batch_fast(list(texts), add_special_tokens=False)
                return [encoding.ids for encoding in batch]
            except (UnicodeError, TypeError) as error:  # one bad text spoils the batch
                if len(texts) == 1:
                    return [_unencodable(error)]
                return [self._encode_whole([text])[0] for text in texts]
        return [self._slowly(text, plain=False) for text in texts]

    def _encode_plain(self, text: str) -> list[int]:
        """With no control token recognised."""
        if self._backend is None:
            found = self._slowly(text, plain=True)
            if isinstance(found, Unencodable):
                raise found
            return found
        try:
            ids: list[int] = self._backend[1].encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as error:
            raise _unencodable(error) from error
        return ids

    def _encode_apart(self, item: Marked) -> list[int]:
        """Control tokens outside of plain parts by id, and all between them as letters."""
        if not self.separates_text:
            raise Unencodable("the letters of a control token, which this tokenizer cannot split")
        ids: list[int] = []
        at = 0
        for match in self._real_controls(item):
            left, right = self._strips.get(match[0], (False, False))
            before = item.text[at : match.start()]
            if before := before.rstrip() if left else before:
                ids += self._encode_plain(before)
            ids.append(self.control[match[0]])
            at = match.end()
            while right and item.text[at : at + 1].isspace():
                at += 1
        if at < len(item.text):
            ids += self._encode_plain(item.text[at:])
        return ids

    def _real_controls(self, item: Marked) -> Iterator[re.Match[str]]:
        """Control tokens of the text that touch no plain part, looked for in the gaps between."""
        edges = [0, *(edge for span in item.plain for edge in span), len(item.text)]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield from self._control.finditer(item.text, start, end)

    def _slowly(self, text: str, *, plain: bool) -> list[int] | Unencodable:
        """With a tokenizer written in Python, one text at a time."""
        try:
            if "allow_special_tokens" in inspect.signature(self._hf.encode).parameters:
                return list(self._hf.encode(text, allow_special_tokens=not plain))
            if plain:
                pieces = self._hf.tokenize(text, split_special_tokens=True)
                return list(self._hf.convert_tokens_to_ids(pieces))
            return list(self._hf.encode(text, add_special_tokens=False))
        except (UnicodeError, TypeError, ValueError) as error:
            return _unencodable(error)

    def _needed_anchor(self) -> str | None:
        """A control token to put first, if the tokenizer marks the beginning of a text (`▁`)."""
        for token, number in self.control.items():
            if self._strips.get(token, (False, False))[1]:
                continue  # it would swallow the blanks that the text begins with
            alone, after = self._encode_whole(["a", f"{token}a"])
            if isinstance(alone, list) and isinstance(after, list) and after[:1] == [number]:
                return None if after[1:] == alone else token
        return None

    def _can_separate(self) -> bool:
        """Whether both ways of encoding agree where there is nothing to tell apart."""
        if not self.control:
            return True
        token = next(iter(self.control))
        sample = f"{token}user\nTwo  words,\n\n 3 lines.{token}\n{token}ok{token}"
        (whole,) = self._encode_whole([sample])
        self.separates_text = True
        try:
            apart = self._encode_apart(Marked(sample))
            letters = self._encode_plain(token)
        except Unencodable:
            return False
        return whole == apart and self.control[token] not in letters


def _unencodable(error: Exception) -> Unencodable:
    return Unencodable(f"the tokenizer cannot take the text ({type(error).__name__}: {error})")


def _load_hf(folder: Path, *, trust_remote_code: bool) -> Any:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; name the target model's folder")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigurationError(
            "tokens need transformers: pip install 'quantroute[extract]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = ""
        if not trust_remote_code and any(folder.glob("*.py")):
            hint = "; the folder brings code of its own: trust it with trust_remote_code = true"
        raise ConfigurationError(f"{folder}: no usable tokenizer ({error}){hint}") from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: the chat template cannot be read: {error}") from error


def _hash_files(folder: Path) -> str:
    files = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashlib.sha256(canonical_json(hashes).encode()).hexdigest()


def _control_tokens(hf: Any) -> dict[str, int]:
    found = {str(token): int(number) for number, token in hf.added_tokens_decoder.items()}
    own = getattr(hf, "special_tokens", None)  # tiktoken-like remote code keeps more of them here
    if isinstance(own, Mapping):
        found |= {str(token): int(number) for token, number in own.items() if _is_id(number)}
    return {token: number for token, number in found.items() if token}


def _stripping(hf: Any) -> dict[str, tuple[bool, bool]]:
    """Control tokens that swallow the blanks before or after them, as Phi's do."""
    sides = {
        str(token): (bool(getattr(token, "lstrip", False)), bool(getattr(token, "rstrip", False)))
        for token in hf.added_tokens_decoder.values()
    }
    return {token: found for token, found in sides.items() if any(found)}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _backend(hf: Any) -> tuple[Any, Any] | None:
    """The fast tokenizer as it is, and the same without any added token; None if there is none."""
    if not getattr(hf, "is_fast", False):
        return None
    from tokenizers import Tokenizer

    form = json.loads(hf.backend_tokenizer.to_str())
    form |= {"truncation": None, "padding": None}
    whole = Tokenizer.from_str(json.dumps(form))
    whole.encode_special_tokens = False
    return whole, Tokenizer.from_str(
        json.dumps(form | {"added_tokens": [], "post_processor": None})
    )


def _generation_ends(folder: Path) -> frozenset[int]:
    """End ids of `generation_config.json`, else of `config.json`; empty if neither says."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
