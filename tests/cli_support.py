"""The command line, driven from tests."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from quantroute.cli._app import app

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "../shared/data"
MODEL = "moonshotai/kimi-k2.5"

#: One endpoint that takes a quarter of a second per answer; benchmarks/proxy.py uses it too.
SLOW_SCENARIO = (ROOT / "examples/one-endpoint.toml").read_text()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


def quantroute(*arguments: object, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command in this process."""
    runner = CliRunner()
    # 80 columns wide whatever the terminal of whoever runs the tests.
    settings = {"COLUMNS": "80", "NO_COLOR": "1", **(env or {})}
    result = runner.invoke(app, [str(item) for item in arguments], env=settings)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def start(
    *arguments: object, stderr: int = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command as a process of its own, any warning an error."""
    command = [sys.executable, "-W", "error", "-c", "from quantroute.cli import main; main()"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=env,
    )


def finished(process: subprocess.Popen[str], *, timeout_s: float = 60.0) -> Ended:
    """How a process ended."""
    out, err = process.communicate(timeout=timeout_s)
    return Ended(process.returncode, out, err)


def write_prompts(path: Path, count: int) -> Path:
    """A JSONL file of so many one-turn prompts."""
    lines = (json.dumps({"prompt": f"Question number {number}?"}) for number in range(count))
    path.write_text("\n".join(lines) + "\n")
    return path


def code_blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a Markdown file."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def console_commands(path: Path) -> Iterator[list[str]]:
    """The commands of a file's console blocks, as argument lists; comments left out."""
    for block in code_blocks(path, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words
