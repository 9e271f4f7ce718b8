"""What stands in the wheel and the sdist: everything that is needed, and nothing of a checkout.

python .ci/check_dist.py dist
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

#: Files that are not Python, and that the package opens.
DATA = {
    "py.typed",
    "policy/evidence.toml",
    "simulator/scenarios/kimi-k2.5.toml",
    "data/prompts.jsonl",
    "ledger/_shared_books.lua",
}
BESIDE = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "Makefile"}
FOLDERS = {"src", "tests", "docs", "examples", "benchmarks"}
OF_A_CHECKOUT = (
    ".venv",
    "__pycache__",
    ".pyc",
    ".git/",
    "node_modules",
    "runs/",
    ".sqlite",
    ".DS_",
)


def main() -> None:
    """Exit with a list of what is wrong."""
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(sdist) as archive:
        in_sdist = {
            item.name.partition("/")[2] for item in archive.getmembers() if not item.isdir()
        }
    problems = [*_wheel_problems(in_wheel), *_sdist_problems(in_sdist)]
    problems += [
        f"of a checkout: {name}"
        for name in sorted(in_wheel | in_sdist)
        if any(mark in name for mark in OF_A_CHECKOUT)
    ]
    if problems:
        sys.exit("\n".join(problems))


def _wheel_problems(names: set[str]) -> list[str]:
    wanted = {f"quantroute/{name}" for name in DATA} | {
        name.removeprefix("src/") for name in _tracked("src/quantroute")
    }
    strange = {name for name in names if not name.startswith(("quantroute/", "quantroute-"))}
    return [
        *(f"not in the wheel: {name}" for name in sorted(wanted - names)),
        *(f"in the wheel, but not of the package: {name}" for name in sorted(strange)),
    ]


def _sdist_problems(names: set[str]) -> list[str]:
    wanted = BESIDE | {name for folder in FOLDERS for name in _tracked(folder)}
    return [f"not in the sdist: {name}" for name in sorted(wanted - names)]


def _tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", folder], capture_output=True, text=True, check=True
    ).stdout
    return set(listed.splitlines())


if __name__ == "__main__":
    main()
