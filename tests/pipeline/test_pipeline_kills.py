"""kill -9 in each stage: the resumed run ends with the manifest of one that was left alone.

The trainer runs on one thread and is killed before its first checkpoint: so its arithmetic is the
same. Rows are generated once, because a service's answers carry ids and times of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")
from quantroute.demo import DemoSize, TargetSize, opened_service, prepare_demo
from quantroute.pipeline import load_pipeline_spec, run_pipeline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trainers,
    pytest.mark.timeout(1_800),
    pytest.mark.filterwarnings("ignore"),  # of transformers, in this process
]
SIZE = DemoSize(
    target=TargetSize(hidden_size=32, heads=2, intermediate_size=64, vocab_size=400, steps=150),
    prompts=60,
    epochs=2,
    draft_vocab_size=300,
    speculate_prompts=1,
)
KILLED = ("extract", "data", "train", "export", "evaluate")


def test_every_stage_survives_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    home, saved = tmp_path / "demo", tmp_path / "saved"
    folder, _ = prepare_demo(home, size=SIZE)
    with opened_service(folder) as service:
        spec = load_pipeline_spec(folder.run_file)
        where = ["--base-url", service.base_url]
        run_pipeline(spec, service=where, only=["plan", "generate"])
    shutil.copytree(home, saved)

    assert _finish(folder.run_file) == 0
    undisturbed = _manifest(home)
    assert set(undisturbed) == {"plan", "generate", *KILLED}

    shutil.rmtree(home)
    shutil.copytree(saved, home)
    for stage in KILLED:
        _kill_in(stage, folder.run_file, home)
        assert not (home / f"run/pipeline/{stage}.json").exists()
    assert _finish(folder.run_file) == 0
    assert _manifest(home) == undisturbed


def _start(run_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quantroute", "pipeline", "run", str(run_file)]
    return subprocess.Popen(command, start_new_session=True)


def _finish(run_file: Path) -> int:
    """A trainer that outlived its parent still holds the folder: then it is waited for."""
    for _ in range(60):
        status = _start(run_file).wait()
        if status != 7:
            return status
        time.sleep(5)
    return status


def _kill_in(stage: str, run_file: Path, home: Path) -> None:
    begun = home / f"run/pipeline/{stage}.begun"
    process = _start(run_file)
    while not begun.exists():
        assert process.poll() is None, f"ended with {process.returncode} before {stage}"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _manifest(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "run/pipeline/manifest.json").read_text())
    return found
