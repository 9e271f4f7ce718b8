"""A trainer as a process: followed, stopped, started again. The trainer here is a few lines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import quantroute
from drafter.drafter_support import (
    fake_interpreter,
    save_tensors,
    write_data,
    write_target,
    zeros,
)
from quantroute.drafter import Prepared, TrainProgress, TrainSpec, prepare_training, train
from quantroute.errors import ConfigurationError, JournalError
from quantroute.storage import FileLock

STEPS = r"""
import pathlib, sys
for step in range(3):
    print(f"INFO train/loss={1 - step / 10}, train/cond_acc_0=0.5, train/full_acc_0=0.5, "
          f"epoch=0, lr=0.001, global_step={step}", flush=True)
print("\rEpoch 0 10%|#  | 1/10 [00:01<00:09,  1.0it/s]\r", file=sys.stderr)
print("INFO val/loss_epoch=0.6, val/full_acc_0_epoch=0.7, epoch=0")
folder = pathlib.Path(sys.argv[sys.argv.index("--save-path") + 1])
(folder / "0").mkdir(parents=True, exist_ok=True)
"""

WAITING = r"""
import signal, sys, pathlib
def stop(*_):
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
print("INFO train/loss=1.0, epoch=0, global_step=0", flush=True)
signal.pause()
"""


def ready(folder: Path, body: str, **changes: Any) -> Prepared:
    write_target(folder / "target")
    spec = TrainSpec(
        data=write_data(folder / "data"),
        out=folder / "out",
        python=fake_interpreter(folder / "python", body),
        **changes,
    )
    return prepare_training(spec)


def checkpoint(folder: Path, *, cut: int = 0) -> Path:
    """One that speculators would resume from; `cut` bytes short if it was killed."""
    import zipfile

    folder.mkdir(parents=True)
    (folder / "training_state.json").write_text('{"epoch": 0}')
    with zipfile.ZipFile(folder / "optimizer_state_dict.pt", "w") as file:
        file.writestr("data.pkl", b"0")
    save_tensors(folder / "model.safetensors", {"fc.weight": zeros(4, 4)})
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) - cut])
    return folder


def test_the_log_becomes_progress_and_a_file_of_figures(tmp_path: Path) -> None:
    seen: list[TrainProgress] = []
    prepared = ready(tmp_path, STEPS)
    report = train(prepared, on_progress=seen.append)
    rows = [json.loads(line) for line in report.metrics.read_text().splitlines()]
    assert [(row["split"], row["step"]) for row in rows] == [
        ("train", 1), ("train", 2), ("train", 3), ("validation", 3),
    ]  # fmt: skip
    assert [row["loss"] for row in rows] == [1.0, 0.9, 0.8, 0.6]
    assert len(seen) == 4
    assert seen[0].eta_s is None
    assert seen[-1].total_steps == 5
    assert report.checkpoint == tmp_path / "out" / "checkpoints" / "0"
    assert report.validation is not None
    assert report.validation.accept_length == 1.7
    assert not report.was_stopped
    assert "it/s" not in report.log.read_text()


def test_a_trainer_that_fails_is_quoted(tmp_path: Path) -> None:
    prepared = ready(tmp_path, "print('ValueError: no such verifier'); raise SystemExit(3)")
    with pytest.raises(ConfigurationError) as caught:
        train(prepared)
    assert "status 3" in str(caught.value)
    assert "ValueError: no such verifier" in str(caught.value)


def test_a_second_start_says_where_it_goes_on_and_appends(tmp_path: Path) -> None:
    notes: list[str] = []
    train(ready(tmp_path, STEPS))
    checkpoint(tmp_path / "out" / "checkpoints" / "1")
    (tmp_path / "out" / "checkpoints" / "0").rmdir()
    report = train(ready(tmp_path, STEPS), on_note=notes.append)
    assert notes == [f"goes on from {tmp_path / 'out/checkpoints/1'}"]
    assert len(report.metrics.read_text().splitlines()) == 8


@pytest.mark.parametrize("lost", ["cut", "training_state.json", "optimizer_state_dict.pt"])
def test_a_checkpoint_cut_short_is_set_aside(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "out" / "checkpoints"
    checkpoint(folder / "2")
    torn = checkpoint(folder / "3", cut=5 if lost == "cut" else 0)
    if lost != "cut":
        (torn / lost).write_text("")
    notes: list[str] = []
    train(ready(tmp_path, "raise SystemExit(0)"), on_note=notes.append)
    assert not torn.exists()
    assert (folder / "torn-3").is_dir()
    assert notes[1] == f"goes on from {folder / '2'}"


def test_the_first_signal_lets_the_trainer_save(tmp_path: Path) -> None:
    def stop(progress: TrainProgress) -> None:
        del progress
        os.kill(os.getpid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    report = train(ready(tmp_path, WAITING), on_progress=stop)
    assert report.was_stopped
    assert report.log.read_text().splitlines()[-1] == "saved"


def test_the_second_signal_ends_it(tmp_path: Path) -> None:
    deaf = WAITING.replace("sys.exit(0)", "print('INFO train/loss=2.0, global_step=1', flush=True)")
    deaf = deaf.replace("signal.pause()", "signal.pause(); signal.pause()")

    def stop(progress: TrainProgress) -> None:
        del progress
        os.kill(os.getpid(), signal.SIGTERM)

    report = train(ready(tmp_path, deaf), on_progress=stop)
    assert report.was_stopped


def test_the_lock_lives_as_long_as_the_trainer(tmp_path: Path) -> None:
    """Even when we are killed: the trainer holds it with us."""
    prepared = ready(tmp_path, STEPS)

    def look(progress: TrainProgress) -> None:
        del progress
        with pytest.raises(JournalError, match="in use"):
            train(prepared)

    train(prepared, on_progress=look)
    with FileLock(tmp_path / "out" / ".lock"):
        pass


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    train(ready(tmp_path, STEPS))
    with pytest.raises(ConfigurationError, match=r"another training \(different: depth\)"):
        ready(tmp_path, STEPS, depth=5)
    spec = replace(ready(tmp_path, STEPS).spec, max_steps=50)  # how long is no part of what
    assert prepare_training(spec).launch.total_steps == 5


def test_a_training_goes_on_where_its_folders_were_copied_to(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    prepared = ready(here, STEPS)
    train(prepared)
    shutil.move(here, there)
    moved = {"data": there / "data", "out": there / "out", "python": str(there / "python")}
    spec = replace(prepared.spec, target=str(there / "target"), **moved)
    prepare_training(spec)
    write_target(there / "target", hidden_act="gelu")
    with pytest.raises(ConfigurationError, match="target_config_sha256"):
        prepare_training(spec)


def test_the_command_prints_figures_and_where_they_are(tmp_path: Path) -> None:
    ready(tmp_path, STEPS)
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\ndata = "data"\nout = "out"\npython = "{tmp_path}/python"\n')
    ended = quantroute("train", path)
    assert ended.code == 0, ended.err
    assert "accept length 1.70" in ended.out
    assert "step 1 of about 5, loss 1, accuracy 50.0%" in ended.err
    data = quantroute("train", path, "--json").data
    assert data["validation"]["loss"] == 0.6


def test_a_stopped_command_ends_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del monkeypatch
    ready(tmp_path, "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n" + WAITING)
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\ndata = "data"\nout = "out"\npython = "{tmp_path}/python"\n')
    ended = quantroute("train", path)
    assert ended.code == 130
    assert "goes on" in ended.out
