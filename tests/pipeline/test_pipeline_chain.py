"""The whole chain with its real trainers, from a target that is trained here to a judged drafter.

kill -9 in each stage: the resumed run ends with the manifest of one that was left alone. What makes
that possible: the service honours a seed and computes exactly, so that an answer that was lost with
its client comes again; the trainer runs on one thread and is killed before its first checkpoint,
which it would round (see `drafter/test_drafter_trainers.py`).
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")
from quantroute.demo import opened_service, prepare_demo
from quantroute.pipeline import STAGES
from trainer_support import SMALL_DEMO, needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trainers,
    pytest.mark.timeout(1_800),
    pytest.mark.filterwarnings("ignore"),  # of transformers, in this process
]
EVERY_STAGE = [stage.name for stage in STAGES]


@dataclass(frozen=True)
class Demo:
    """A finished pipeline, the same before anything was run, and the service that was asked."""

    done: Path
    fresh: Path
    base_url: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    home = tmp_path_factory.mktemp("chain")
    done, fresh = home / "done", home / "fresh"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder, _ = prepare_demo(done, size=SMALL_DEMO)
        text = folder.run_file.read_text().replace("max_in_flight = 64", "max_in_flight = 8")
        folder.run_file.write_text(text.replace("[sampling]\n", "[sampling]\nseed = 7\n"))
        shutil.copytree(done, fresh)
        with opened_service(folder, exact=True) as service:
            assert _finish(done, service.base_url) == 0
            yield Demo(done, fresh, service.base_url)


def test_every_stage_survives_kill_9(demo: Demo) -> None:
    undisturbed, home = _manifest(demo.done), demo.fresh
    assert list(undisturbed) == EVERY_STAGE
    for stage in EVERY_STAGE:
        _kill_in(stage, home, demo.base_url)
        assert not (home / f"run/pipeline/{stage}.json").exists()
        if stage == "generate":
            assert 0 < _answers(home) < _answers(demo.done)
    assert _finish(home, demo.base_url) == 0
    # In another folder, with answers that were lost and bought again: the same contents.
    assert _manifest(home) == undisturbed
    assert _bytes(home, "run/rows.jsonl") != _bytes(demo.done, "run/rows.jsonl")
    assert _bytes(home, "run/evaluation.json") == _bytes(demo.done, "run/evaluation.json")


@needs("specforge", "triton", "yunchang")
def test_the_same_data_go_through_specforge(demo: Demo, tmp_path: Path) -> None:
    home, before = tmp_path / "demo", _manifest(demo.done)
    shutil.copytree(demo.done, home, symlinks=True)
    text = (home / "run.toml").read_text()
    assert text.count("[train]\n") == text.count("epochs = 2\n") == 1
    text = text.replace("[train]\n", '[train]\ntrainer = "specforge"\nbatch_size = 4\n')
    (home / "run.toml").write_text(text.replace("epochs = 2\n", "epochs = 20\n"))
    assert _finish(home, demo.base_url) == 0
    after = _manifest(home)
    assert [name for name in EVERY_STAGE if after[name] == before[name]] == [
        "plan", "generate", "extract"
    ]  # fmt: skip
    assert json.loads(_bytes(home, "run/training-data/manifest.json"))["trainer"] == "specforge"
    found, old = (json.loads(_bytes(at, "run/evaluation.json")) for at in (home, demo.done))
    length = found["trained"][0]["length"]
    assert length > found["untrained"]["length"] + 0.8  # seen: 2.68 and 1.01
    assert length > found["controls"]["states of other places"]["length"] + 0.5  # seen: 1.42
    assert found["trained"][0]["chains"] == old["trained"][0]["chains"]
    assert found["speculation"]["identical"] == found["speculation"]["prompts"] == 1


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
