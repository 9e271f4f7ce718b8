"""Sockets for the run: the soft limit is raised, a hard one is told with figure and command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")

SCRIPT = """
import asyncio, resource, sys
soft, hard, in_flight = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from quantroute import Client, ConfigurationError, Service

async def main():
    service = Service(base_url="http://127.0.0.1:9/api/v1")
    async with Client(cap_usd="1", service=service, max_in_flight=in_flight) as client:
        async with client.attended():
            pass

try:
    asyncio.run(main())
except ConfigurationError as error:
    print("refused:", error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def under(soft: int, hard: int, in_flight: int) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(soft), str(hard), str(in_flight)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    soft, hard = map(int, under(200, 1_000, 500).split())
    assert 500 < soft <= 1_000
    assert hard == 1_000


def test_a_limit_that_suffices_is_left_alone() -> None:
    assert under(900, 1_000, 100).split() == ["900", "1000"]


def test_a_hard_limit_is_told_with_figure_command_and_what_would_fit() -> None:
    first, limits = under(200, 256, 500).splitlines()
    assert first.startswith("refused: the requests in flight need 6")
    assert "this process may have 256" in first
    needed = first.split("need ")[1].split(" ")[0]
    assert f"`ulimit -n {needed}`" in first
    fits = int(first.split("max_in_flight=")[1].split(" ")[0])
    assert 0 < fits < 256
    assert limits == "200 256"
    assert "refused" not in under(200, 256, fits)


def test_the_command_refuses_before_it_makes_a_file(tmp_path: Path) -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 256));"
        "from quantroute.cli import main; main()"
    )
    prompts = tmp_path / "p.txt"
    prompts.write_text("\n".join(f"question {n}?" for n in range(600)))
    words = ["generate", str(prompts), "--simulate", "--cap", "1", "--max-in-flight", "500"]
    words += ["--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert "need 1," in ended.stderr  # both ends of 500 connections
    assert "--max-in-flight" in ended.stderr
    assert "ulimit -n" in ended.stderr
    assert not (tmp_path / "run").exists()
