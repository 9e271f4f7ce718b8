"""Sockets for the run: the soft limit is raised, a hard one is told with figure and command."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("resource")

#: Limits are a process's, and a hard one does not rise again: the cases come in that order.
SCRIPT = """
import asyncio, resource, sys
from quantroute import Client, ConfigurationError, Service

async def main(in_flight):
    service = Service(base_url="http://127.0.0.1:9/api/v1")
    async with Client(cap_usd="1", service=service, max_in_flight=in_flight) as client:
        async with client.attended():
            pass

def under(soft, hard, in_flight):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    refused = ""
    try:
        asyncio.run(main(in_flight))
    except ConfigurationError as error:
        refused = str(error)
    print((refused, *resource.getrlimit(resource.RLIMIT_NOFILE)))
    return refused

under(900, 1000, 100)
under(200, 1000, 500)
refused = under(200, 256, 500)
under(200, 256, int(refused.split("max_in_flight=")[1].split(" ")[0]))
"""


@dataclass(frozen=True)
class Told:
    """What a client said, and the limits of its process afterwards."""

    refused: str
    soft: int
    hard: int


@pytest.fixture(scope="module")
def told() -> list[Told]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [Told(*ast.literal_eval(line)) for line in ended.stdout.splitlines()]


def test_a_limit_that_suffices_is_left_alone(told: list[Told]) -> None:
    assert told[0] == Told("", 900, 1_000)


def test_the_soft_limit_is_raised_as_far_as_needed(told: list[Told]) -> None:
    assert told[1].refused == ""
    assert 500 < told[1].soft <= 1_000
    assert told[1].hard == 1_000


def test_a_hard_limit_is_told_with_figure_command_and_what_would_fit(told: list[Told]) -> None:
    _, _, refusal, last = told
    assert refusal.refused.startswith("the requests in flight need 6")
    assert "this process may have 256" in refusal.refused
    needed = refusal.refused.split("need ")[1].split(" ")[0]
    assert f"`ulimit -n {needed}`" in refusal.refused
    fits = int(refusal.refused.split("max_in_flight=")[1].split(" ")[0])
    assert 0 < fits < 256
    assert (refusal.soft, refusal.hard) == (200, 256)
    assert last.refused == ""


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
