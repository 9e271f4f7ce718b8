"""kill -9 in each stage: the resumed run ends with the manifest of one that was left alone.

What makes that possible: the service honours a seed and computes exactly, so that an answer that
was lost with its client comes again; the trainer runs on one thread and is killed before its first
checkpoint, which it would round (see `drafter/test_drafter_trainers.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")
from quantroute.demo import opened_service, prepare_demo
from quantroute.pipeline import STAGES
from trainer_support import SMALL_DEMO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trainers,
    pytest.mark.timeout(1_800),
    pytest.mark.filterwarnings("ignore"),  # of transformers, in this process
]
EVERY_STAGE = [stage.name for stage in STAGES]


def test_every_stage_survives_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    folder, _ = prepare_demo(alone, size=SMALL_DEMO)
    text = folder.run_file.read_text().replace("max_in_flight = 64", "max_in_flight = 8")
    folder.run_file.write_text(text.replace("[sampling]\n", "[sampling]\nseed = 7\n"))
    shutil.copytree(alone, killed)

    with opened_service(folder, exact=True) as service:
        assert _finish(alone, service.base_url) == 0
        undisturbed = _manifest(alone)
        assert list(undisturbed) == EVERY_STAGE
        for stage in EVERY_STAGE:
            _kill_in(stage, killed, service.base_url)
            assert not (killed / f"run/pipeline/{stage}.json").exists()
            if stage == "generate":
                assert 0 < _answers(killed) < _answers(alone)
        assert _finish(killed, service.base_url) == 0
    # In another folder, with answers that were lost and bought again: the same contents.
    assert _manifest(killed) == undisturbed
    assert _bytes(killed, "run/rows.jsonl") != _bytes(alone, "run/rows.jsonl")
    assert _bytes(killed, "run/evaluation.json") == _bytes(alone, "run/evaluation.json")


def _start(home: Path, base_url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quantroute", "pipeline", "resume", str(home / "run.toml")]
    return subprocess.Popen([*command, "--base-url", base_url], start_new_session=True)


def _finish(home: Path, base_url: str) -> int:
    """A trainer that outlived its parent still holds the folder: then it is waited for."""
    for _ in range(60):
        status = _start(home, base_url).wait()
        if status != 7:
            return status
        time.sleep(5)
    return status


def _kill_in(stage: str, home: Path, base_url: str) -> None:
    process = _start(home, base_url)
    while not _is_inside(stage, home):
        assert process.poll() is None, f"ended with {process.returncode} before {stage}"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_inside(stage: str, home: Path) -> bool:
    """It has begun; where money is spent, it has bought something."""
    has_begun = (home / f"run/pipeline/{stage}.begun").exists()
    return has_begun and (stage != "generate" or _answers(home) > 0)


def _answers(home: Path) -> int:
    path = home / "run/run.sqlite"
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            (found,) = connection.execute("SELECT count(*) FROM generation_turns").fetchone()
        except sqlite3.OperationalError:  # no such table yet
            return 0
    return int(found)


def _manifest(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_bytes(home, "run/pipeline/manifest.json"))
    return found


def _bytes(home: Path, name: str) -> bytes:
    return (home / name).read_bytes()
