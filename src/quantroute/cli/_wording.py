"""The library speaks of arguments; on the command line they are options. This is the dictionary."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from quantroute.errors import QuantrouteError, UnknownName

__all__ = ["as_options", "as_word", "counted_rows", "explain"]

_OPTIONS: Final = {
    "accept": "--accept",
    "accept_unknown": "--accept-unknown",
    "allow_volatile": "--allow-volatile-ledger",
    "base_url": "--base-url",
    "ca_file": "--ca-file",
    "exclude": "--exclude",
    "max_in_flight": "--max-in-flight",
    "max_input_usd_per_million": "--max-input-price",
    "max_output_tokens": "--max-output-tokens",
    "max_output_usd_per_million": "--max-output-price",
    "native": "--native",
    "only": "--only",
}
_NAMES: Final = "|".join(sorted(_OPTIONS, key=len, reverse=True))
#: accept_unknown=('Novita',) in an advice.
_TUPLE: Final = re.compile(rf"\b({_NAMES})=\('([^']*)',?\)")
#: only=... where the value is up to the user.
_OPEN: Final = re.compile(rf"\b({_NAMES})=\.\.\.")
#: The bare word, where it can only be the argument: those with an underscore.
_BARE: Final = re.compile(rf"(?<!-)\b({'|'.join(name for name in _OPTIONS if '_' in name)})\b")
#: A place in a run file, whose fields are called what the library calls them.
_IN_RUN_FILE: Final = re.compile(r"[^\n]*\.toml:\d+: ")


def counted_rows(number: int) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} row{'' if number == 1 else 's'}"


def as_word(path: Path) -> str:
    """A path as one word of a command that is to be copied."""
    return shlex.quote(str(path))


def as_options(text: str) -> str:
    """`text` with arguments of the library as options of the command."""
    text = _TUPLE.sub(lambda m: f"{_OPTIONS[m[1]]} {shlex.quote(m[2])}", text)
    text = text.replace("native='...'", "--native FORMAT")
    text = text.replace("overwrite=True", "--overwrite")
    text = _OPEN.sub(lambda m: _OPTIONS[m[1]], text)
    return _BARE.sub(lambda m: _OPTIONS[m[1]], text)


def explain(error: QuantrouteError) -> str:
    """What to tell a person at a terminal about `error`."""
    if isinstance(error, UnknownName):
        near = ", ".join(map(shlex.quote, error.suggestions))
        hint = (
            f"did you mean {near}?" if near else "`quantroute endpoints MODEL` lists what there is"
        )
        option = _OPTIONS.get(error.rule, error.rule)
        return f"{option} {error.name!r} matches no listed provider, slug or tag; {hint}"
    text = str(error)
    return text if _IN_RUN_FILE.match(text) else as_options(text)
