"""Whether the trainer is there, in a version that was seen to work with what is written here."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from quantroute.errors import ConfigurationError

__all__ = ["Installed", "check_versions", "probe"]

#: Package -> (first, first that is too new). Seen at work in November 2026: speculators 0.9.0 and
#: specforge 0.2.0 with torch 2.13.0 and transformers 5.8.1 and 5.24.0.
KNOWN_GOOD: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "speculators": {
        "speculators": ("0.9.0", "0.10"),
        "hs-connectors": ("0.9.0", "0.10"),
        "torch": ("2.9", "2.15"),
        "transformers": ("5.0", "5.25"),
        "datasets": ("4.0", "6"),
    },
    "specforge": {
        "specforge": ("0.2.0", "0.3"),
        "torch": ("2.11", "2.15"),
        "transformers": ("5.8", "5.25"),
        "triton": ("3.0", "4"),  # imported at start-up even where no GPU is
        "accelerate": ("1.0", "2"),
        "yunchang": ("0.6", "1"),
    },
}

_PROBE: Final = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
gpus = 0
if found.get("torch"):
    import torch
    gpus = torch.cuda.device_count()
print(json.dumps({"packages": found, "gpus": gpus}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What an interpreter has: versions (None: missing) and GPUs."""

    python: str
    packages: Mapping[str, str | None] = field(default_factory=dict)
    gpus: int = 0


def probe(python: str, *, trainer: str) -> Installed:
    """Ask the interpreter; nothing of the trainer is imported, here or there.

    Raises:
        ConfigurationError: it cannot be started.
    """
    command = [python, "-c", _PROBE, *KNOWN_GOOD[trainer]]
    try:
        ended = subprocess.run(  # noqa: S603 - the user's own interpreter
            command, capture_output=True, text=True, check=False, timeout=300
        )
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"{python} does not answer as a Python interpreter ({error}); "
            "set train.python to the one that has the trainer"
        ) from error
    return Installed(python=python, packages=answer["packages"], gpus=answer["gpus"])


def check_versions(installed: Installed, *, trainer: str, any_version: bool) -> tuple[str, ...]:
    """Warnings about versions, if they are let pass.

    Raises:
        ConfigurationError: a package is missing, or (without `any_version`) of another version
            than was seen to work.
    """
    missing, odd = [], []
    for name, (first, after) in KNOWN_GOOD[trainer].items():
        version = installed.packages.get(name)
        if version is None:
            missing.append(f"{name}>={first},<{after}")
        elif not _numbers(first) <= _numbers(version) < _numbers(after):
            odd.append(f"{name} {version} (works: {first} up to, not with, {after})")
    if missing:
        wanted = " ".join(f"'{item}'" for item in missing)
        raise ConfigurationError(
            f"{trainer} cannot run with {installed.python}: install {wanted} there, "
            "or set train.python to an interpreter that has them"
        )
    if odd and not any_version:
        raise ConfigurationError(
            f"{trainer} with {installed.python}: nobody has seen this work with {'; '.join(odd)}; "
            "install one of those, or set train.any_version = true"
        )
    return tuple(f"not seen to work: {item}" for item in odd)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): enough to compare releases of one package."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
