"""The API key: read late, kept nowhere, cut out of everything a server sends back."""

from __future__ import annotations

import base64
import functools
import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from quantroute.errors import KeyRejected

__all__ = ["REDACTED", "EnvKey", "Redactor", "redact_url"]

REDACTED = "[redacted]"

# OpenRouter keys start "sk-or-v1-"; a body may quote somebody else's, or ours cut short.
_KEY_SHAPE = re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9]{2,8}-[A-Za-z0-9_-]{8,}")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY_SECRET = re.compile(r"(?<=[?&](?:username|password)=)[^&#\s]+")
_SHORTEST_SECRET = 6


@dataclass(frozen=True, slots=True)
class EnvKey:
    """Names the environment variable that holds the key; never holds the key itself."""

    variable: str = "OPENROUTER_API_KEY"

    def read(self) -> str:
        """The key, read now.

        Raises:
            KeyRejected: the variable is unset, empty, or cannot stand in a header.
        """
        key = os.environ.get(self.variable, "").strip()
        if not key:
            raise KeyRejected(
                problem=f"environment variable {self.variable} is not set; export your key there",
                status=401,
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise KeyRejected(
                problem=f"environment variable {self.variable} does not hold a key "
                "(blanks or non-ASCII characters)",
                status=401,
            )
        return key

    @property
    def is_set(self) -> bool:
        """Whether there is anything in the variable."""
        return bool(os.environ.get(self.variable, "").strip())

    def headers(self) -> dict[str, str]:
        """The one header the key ever travels in."""
        return {"Authorization": f"Bearer {self.read()}"}

    def redactor(self) -> Redactor:
        """A redactor that knows this key, if it is set."""
        return _redactor_of(os.environ.get(self.variable, "").strip())


class Redactor:
    """Replaces key material in foreign text: the key, its base64 and URL-quoted forms.

    Two strengths. `answer` touches only the key it knows, since an answer is data and "risk-or-..."
    must stay what the model wrote. `text` is for diagnostics: it also removes whatever is shaped
    like an OpenRouter key, and user info in URLs.
    """

    __slots__ = ("_needles", "_raw_needles")

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        forms: set[str] = set()
        for secret in secrets:
            if len(secret) < _SHORTEST_SECRET:
                continue  # "x" as a key for a local server must not eat every x
            forms |= {secret, quote(secret, safe=""), *_base64_forms(secret)}
        ordered = sorted(forms, key=len, reverse=True)
        self._needles = tuple((_rarest(form), form) for form in ordered)
        self._raw_needles = tuple((rare.encode(), form.encode()) for rare, form in self._needles)

    def __repr__(self) -> str:
        return f"Redactor({len(self._needles)} forms)"

    def __reduce__(self) -> tuple[type[Redactor], tuple[()]]:
        return Redactor, ()  # a pickle carries no secret; the copy knows only shapes

    def is_clean(self, raw: bytes) -> bool:
        """Whether `raw` holds none of the known key's forms."""
        for rare, needle in self._raw_needles:  # noqa: SIM110 - `any` takes twice the time
            if rare in raw and needle in raw:
                return False
        return True

    def answer(self, text: str) -> str:
        """`text` without the known key; anything else is left as it is."""
        for rare, needle in self._needles:
            if rare in text and needle in text:
                text = text.replace(needle, REDACTED)
        return text

    def text(self, text: str) -> str:
        """`text` fit for a log or an error: no known key, no key shape, no URL user info."""
        text = self.answer(text)
        if "sk-" in text:
            text = _KEY_SHAPE.sub(REDACTED, text)
        if "@" in text and "://" in text:
            text = _USERINFO.sub(REDACTED, text)
        return text


@functools.lru_cache(maxsize=4)  # asked for with every answer, for a key that hardly ever changes
def _redactor_of(key: str) -> Redactor:
    return Redactor((key,))


#: Characters of keys and of base64, those first that are seldom in prose; others come last.
_BY_RARITY: Final = "ZQXJ%_KVYqzU7G89645jFx3HBWNODLRPMECSTAI201vkgwbycfpmduhlsrnioate+/-="


def _rarest(form: str) -> str:
    """A character that must be in any text with `form` in it, and seldom is: found ten times as
    fast as `form` itself, whose characters a search compares with nearly all of a text."""
    return min(form, key=lambda character: _BY_RARITY.find(character) % len(_BY_RARITY))


def _base64_forms(secret: str) -> set[str]:
    """The parts of base64 text that are the same wherever the secret starts in the input."""
    forms: set[str] = set()
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + secret.encode()).decode().rstrip("=")
        # Characters that mix in neighbouring bytes are cut: two or three at the start, one or two
        # at the end unless the input ends on a three-byte boundary.
        start = (0, 2, 3)[shift]
        end = len(encoded) if (len(secret) + shift) % 3 == 0 else len(encoded) - 1
        core = encoded[start:end]
        if len(core) >= _SHORTEST_SECRET:
            forms |= {core, core.replace("+", "-").replace("/", "_")}
    return forms


def redact_url(url: str) -> str:
    """`url` without the user and password that may stand in it, however badly they are written."""
    before, at, after = url.rpartition("@")
    if at:
        scheme, colon, _ = before.partition("://")
        url = f"{scheme}{colon}{REDACTED}@{after}" if colon else f"{REDACTED}@{after}"
    return _QUERY_SECRET.sub(REDACTED, url)
