"""Commands as processes: signals, locks, terminals, exit codes as a shell sees them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_support import SLOW_SCENARIO, finished, quantroute, start, write_prompts
from quantroute.simulator import DEFAULT_API_KEY, Scenario, ThreadedSimulator, load_scenario

#: Each starts a process or two, which takes a second, or half a minute on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """A service that takes a quarter of a second per answer."""
    file = tmp_path / "slow.toml"
    file.write_text(SLOW_SCENARIO)
    return load_scenario(file)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "what was waited for did not happen"
        time.sleep(0.02)


def generating(service: ThreadedSimulator, *, answers: int = 3) -> subprocess.Popen[str]:
    """A run of 60 prompts, two at a time, with some answers in and two requests under way."""
    prompts = write_prompts(Path("p.jsonl"), 60)
    process = start(
        "generate", prompts, "--base-url", service.base_url, "--cap", "1",
        "--max-in-flight", "2", "--out", "run",
    )  # fmt: skip
    wait_for(lambda: service.stats.requests >= answers + 2 and service.stats.in_flight == 2)
    return process


def test_one_interrupt_drains_and_the_same_command_goes_on(service: ThreadedSimulator) -> None:
    process = generating(service)
    process.send_signal(signal.SIGINT)
    ended = finished(process)
    assert ended.code == 130
    assert "stopping: waiting for the requests in flight" in ended.err
    assert "interrupted; the same command goes on" in ended.out
    facts = quantroute("status", "run", "--verify", "--json").data
    assert facts["held_entries"] == 0
    assert facts["posted_pusd"] == service.bill.total_pusd
    service.change(time_scale=0.0)
    again = quantroute("generate", "p.jsonl", "--base-url", service.base_url, "--out", "run")
    assert again.code == 0
    assert "60 good" in again.out
    assert service.bill.total_pusd == quantroute("status", "run", "--json").data["posted_pusd"]


def test_a_second_interrupt_leaves_at_once_with_whole_files(service: ThreadedSimulator) -> None:
    service.change(time_scale=40.0)  # the next answers take ten seconds
    process = generating(service, answers=0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = finished(process)
    assert time.monotonic() - began_s < 5.0
    assert ended.code == 130
    assert "Traceback" not in ended.err
    facts = quantroute("status", "run", "--verify", "--json").data
    assert facts["held_entries"] == 2
    assert facts["pending_pusd"] > 0


def test_a_run_in_use_is_refused_with_its_owner_and_can_be_looked_at(
    service: ThreadedSimulator,
) -> None:
    process = generating(service)
    try:
        second = quantroute("generate", "p.jsonl", "--base-url", service.base_url, "--out", "run")
        assert second.code == 7
        assert f"in use by process {process.pid}" in second.err
        assert quantroute("status", "run").code == 0
    finally:
        process.send_signal(signal.SIGINT)
        assert finished(process).code == 130


def test_an_interrupted_run_needs_no_terminal_and_no_key_on_show(
    service: ThreadedSimulator,
) -> None:
    process = generating(service)
    process.terminate()
    ended = finished(process)
    assert ended.code == 130
    assert "\x1b[" not in ended.out + ended.err
    assert DEFAULT_API_KEY not in ended.out + ended.err


def test_on_a_terminal_progress_is_live_and_leaves_a_clean_screen(
    service: ThreadedSimulator,
) -> None:
    """What stays on the screen is read the way a terminal would: later writes over earlier ones."""
    prompts = write_prompts(Path("p.jsonl"), 6)
    ours, theirs = pty.openpty()
    process = start(
        "generate", prompts, "--base-url", service.base_url, "--cap", "1",
        "--max-in-flight", "2", "--out", "run",
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = drained(ours)
    assert finished(process).code == 0, shown[-3000:]
    assert "\x1b[2K" in shown  # it was drawn over, in place
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    last_lines = shown.rsplit("\x1b[2K", 1)[1]
    assert re.search(r"6/6 rows, \$0\.\d{4} of \$1\.00", last_lines)
    assert "━" not in last_lines


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_view_events_and_settling_cleanly(
    service: ThreadedSimulator, number: signal.Signals
) -> None:
    """On a terminal, with charges being found out in the background whose records come late."""
    service.change(faults={"usage_missing": 1.0}, generation_misses=2)
    prompts = write_prompts(Path("p.jsonl"), 60)
    ours, theirs = pty.openpty()
    process = start(
        "generate", prompts, "--base-url", service.base_url, "--cap", "1",
        "--max-in-flight", "2", "--out", "run",
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"}, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    wait_for(lambda: service.stats.requests >= 8 and service.stats.in_flight == 2)
    process.send_signal(number)
    shown = drained(ours)
    ended = finished(process)
    assert ended.code == 130
    assert "interrupted; the same command goes on" in ended.out
    assert "stopping: waiting for the requests in flight" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    assert "Traceback" not in shown + ended.out
    assert re.search(r"\d+/60 rows, \$0\.\d{4} of \$1\.00", shown.rsplit("\x1b[2K", 1)[1])
    text = Path("run/events.jsonl").read_text()
    assert text.endswith("\n")
    events = [json.loads(line) for line in text.splitlines()]
    names = [item["event"] for item in events]
    for name in ("run begins", "charge settled", "run stops", "run ends"):
        assert name in names, name
    assert "settling failed" not in names
    facts = quantroute("status", "run", "--verify", "--json").data
    assert facts["held_entries"] == 0
    assert facts["posted_pusd"] == service.bill.total_pusd


def test_a_log_gets_plain_lines(service: ThreadedSimulator) -> None:
    """Not a terminal: no picture, no escape codes, and a line at the end."""
    process = generating(service)
    process.send_signal(signal.SIGTERM)
    ended = finished(process)
    assert ended.code == 130
    lines = [line for line in ended.err.splitlines() if "/60 rows, $" in line]
    assert lines
    assert "\x1b" not in ended.err
    assert "endpoint" not in lines[-1]
    assert lines[-1].endswith(" s")


def drained(descriptor: int) -> str:
    """All that is written to a terminal until the other side is closed.

    However long that takes: a command that starts on a busy machine is silent for many seconds, and
    its terminal must not be taken away meanwhile.
    """
    parts = []
    with contextlib.suppress(OSError):  # Linux says EIO when the last writer is gone
        while part := os.read(descriptor, 65_536):
            parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode()


def test_simulate_serves_until_interrupted(scenario: Scenario) -> None:
    assert scenario.name == "one-endpoint"  # the fixture has written its file here
    process = start("simulate", "--scenario", "slow.toml", "--seed", "3")
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/api/v1", first)
        assert found is not None, first
        assert f"export OPENROUTER_API_KEY={DEFAULT_API_KEY}" in process.stdout.readline()
        shown = quantroute("endpoints", "moonshotai/kimi-k2.5", "--base-url", found[0], "--json")
        assert [row["endpoint"] for row in shown.data["endpoints"]] == ["alpha/int4"]
        port = found[0].split(":")[2].split("/")[0]
        taken = quantroute("simulate", "--port", port)
        assert taken.code == 2
        assert port in taken.err
    finally:
        process.send_signal(signal.SIGINT)
        assert finished(process).code == 0
