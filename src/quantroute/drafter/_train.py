"""One training: checked, started as the trainer's own command, followed, resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quantroute.clock import Clock, SystemClock
from quantroute.drafter._checkpoints import latest_checkpoint, set_torn_aside
from quantroute.drafter._data import TrainingData
from quantroute.drafter._launch import Launch, Measurement
from quantroute.drafter._process import Ended, follow
from quantroute.drafter._spec import TrainSpec
from quantroute.drafter._specforge import RUN_ID, specforge_launch
from quantroute.drafter._speculators import speculators_launch
from quantroute.drafter._versions import Installed, check_versions, probe
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.storage import FileLock, atomic_write

__all__ = ["Prepared", "TrainProgress", "TrainReport", "prepare_training", "train"]

LOG: Final = "train.log"
METRICS: Final = "metrics.jsonl"
IDENTITY: Final = "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A training that can start: the command, the data, and what to tell before."""

    spec: TrainSpec
    data: TrainingData
    installed: Installed
    launch: Launch
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """Where a training stands. `eta_s` is None until two steps were seen, or without an end."""

    measurement: Measurement
    total_steps: int | None
    elapsed_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """How it ended. `was_stopped`: told to, with its checkpoints in place; rerun to go on."""

    checkpoint: Path | None
    metrics: Path
    log: Path
    last: Measurement | None
    validation: Measurement | None
    was_stopped: bool


def prepare_training(spec: TrainSpec) -> Prepared:
    """Check everything that can be checked without training; nothing is written.

    Raises:
        ConfigurationError: the trainer is missing or of an unknown version, the data are for
            another one, or `out` holds another training.
        DatasetError: the data are missing or not finished.
    """
    data = TrainingData.read(spec.data)
    if data.trainer != spec.trainer:
        raise ConfigurationError(
            f"{data.folder} is written for {data.trainer}, but train.trainer is {spec.trainer}; "
            "change one of them"
        )
    if len(data.layers) != 3:
        raise ConfigurationError(f"an EAGLE-3 head takes 3 layers, the data have {data.layers}")
    _check_identity(spec, data)
    installed = probe(spec.python, trainer=spec.trainer)
    notes = check_versions(installed, trainer=spec.trainer, any_version=spec.any_version)
    _check_gpus(spec, installed)
    launch = _LAUNCHES[spec.trainer](spec, data, installed)
    return Prepared(
        spec=spec, data=data, installed=installed, launch=launch, notes=notes + launch.notes
    )


_LAUNCHES: Final[Mapping[str, Callable[[TrainSpec, TrainingData, Installed], Launch]]] = {
    "speculators": speculators_launch,
    "specforge": specforge_launch,
}


def train(
    prepared: Prepared,
    *,
    on_progress: Callable[[TrainProgress], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> TrainReport:
    """Run the trainer until it ends, from its last checkpoint if there is one.

    Raises:
        ConfigurationError: the trainer failed; the message ends with what it said last.
        JournalError: a trainer already works in `out`.
    """
    spec, launch = prepared.spec, prepared.launch
    note = on_note or (lambda _: None)
    with FileLock(spec.out / ".lock") as lock:
        _write_identity(spec, prepared.data)
        for path, content in launch.files.items():
            atomic_write(path, content.encode())
        for aside in set_torn_aside(launch.checkpoints):
            note(f"a checkpoint was cut short while it was saved; set aside as {aside}")
        if (start := _latest(launch.checkpoints)) is not None:
            note(f"goes on from {start}")
        watch = _Watch(launch, spec.out / METRICS, on_progress, clock or SystemClock())
        ended = follow(launch, spec.out / LOG, on_line=watch.see, keep=(lock.fileno(),))
    if ended.status != 0 and not ended.was_stopped:
        raise _failure(spec, ended)
    return TrainReport(
        checkpoint=_latest(launch.checkpoints),
        metrics=spec.out / METRICS,
        log=spec.out / LOG,
        last=watch.last,
        validation=watch.validation,
        was_stopped=ended.was_stopped,
    )


@dataclass(slots=True)
class _Watch:
    """Turns log lines into figures: one JSON line each, and progress."""

    launch: Launch
    metrics: Path
    on_progress: Callable[[TrainProgress], None] | None
    clock: Clock
    last: Measurement | None = None
    validation: Measurement | None = None
    _began_s: float = field(init=False)
    _first: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self._began_s = self.clock.now_s()

    def see(self, line: str) -> None:
        measured = self.launch.parser.read(line)
        if measured is None:
            return
        if measured.split == "train":
            self.last = measured
        else:
            self.validation = measured
        row = measured.as_dict() | {"at_unix_s": round(self.clock.time_s(), 3)}
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.on_progress is not None:
            self.on_progress(self._progress(measured))

    def _progress(self, measured: Measurement) -> TrainProgress:
        now_s = self.clock.now_s()
        if self._first is None:
            self._first = (measured.step, now_s)
        total, eta_s = self.launch.total_steps, None
        steps = measured.step - self._first[0]
        if total is not None and steps > 0:
            eta_s = max(0, total - measured.step) * (now_s - self._first[1]) / steps
        return TrainProgress(
            measurement=measured,
            total_steps=total,
            elapsed_s=now_s - self._began_s,
            eta_s=eta_s,
        )


def _latest(checkpoints: Path) -> Path | None:
    """speculators numbers folders by epoch, SpecForge points at its latest."""
    pointer = checkpoints / f"{RUN_ID}-latest"
    return pointer.resolve() if pointer.exists() else latest_checkpoint(checkpoints)


def _failure(spec: TrainSpec, ended: Ended) -> ConfigurationError:
    said = "\n  ".join(line[:300] for line in ended.last_lines)
    return ConfigurationError(
        f"{spec.trainer} ended with status {ended.status}; its log is {spec.out / LOG}, "
        f"which ends:\n  {said}"
    )


def _check_gpus(spec: TrainSpec, installed: Installed) -> None:
    wanted = spec.processes if spec.device == "cuda" or spec.processes > 1 else 0
    if spec.device == "cpu" and spec.processes > 1:
        raise ConfigurationError("on the CPU one process trains; set train.processes = 1")
    if installed.gpus < wanted:
        raise ConfigurationError(
            f"{wanted} GPUs are wanted, {installed.python} sees {installed.gpus}; "
            "set train.processes or train.device"
        )


# -- one folder, one training ---------------------------------------------------------------------


def _identity(spec: TrainSpec, data: TrainingData) -> dict[str, Any]:
    """What must not change under a trainer's checkpoints."""
    return {
        "trainer": spec.trainer,
        "target": spec.target or data.model,
        "target_config_sha256": _config_sha256(Path(spec.target or data.model)),
        "head": spec.head,
        "depth": spec.depth,
        "layers": list(data.layers),
        "draft_vocab_size": data.draft_vocab_size,
        "draft_config": None if spec.draft_config is None else str(spec.draft_config),
        "data_sha256": data.sha256,
    }


def _config_sha256(target: Path) -> str | None:
    """None for a target that is no folder here."""
    path = target / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _check_identity(spec: TrainSpec, data: TrainingData) -> None:
    path = spec.out / IDENTITY
    if not path.exists():
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(path=str(path), problem=f"cannot be read: {error}") from error
    new = _identity(spec, data)
    # The folders may have come from another machine: a target is what it says, not where it lies.
    hashes = {old.get("target_config_sha256"), new["target_config_sha256"]}
    same_target = len(hashes) == 1 and None not in hashes
    if different := sorted(
        name
        for name in new
        if old.get(name) != new[name] and not (same_target and name == "target")
    ):
        raise ConfigurationError(
            f"{spec.out} holds another training (different: {', '.join(different)}); "
            "choose another train.out or remove the folder"
        )


def _write_identity(spec: TrainSpec, data: TrainingData) -> None:
    content = json.dumps(_identity(spec, data), indent=2) + "\n"
    atomic_write(spec.out / IDENTITY, content.encode())
