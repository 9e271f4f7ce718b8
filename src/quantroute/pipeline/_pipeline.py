"""Running the chain: only what has to be done, and what was half done from where it stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from quantroute.domain import canonical_json
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.pipeline._records import StageRecord, file_hashes, read_begun, write_begun
from quantroute.pipeline._spec import PipelineSpec
from quantroute.pipeline._stages import STAGES, Stage
from quantroute.storage import FileLock, atomic_write

__all__ = ["MANIFEST", "StageStatus", "final_manifest", "run_pipeline", "status_of"]

MANIFEST: Final = "manifest.json"

State = Literal["done", "changed", "begun", "waiting"]
#: Called with the stage and what becomes of it: begins, is done already, has ended.
OnStage = Callable[[str, Literal["begins", "stands", "ended"], float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """Where a stage is: `changed` means that what it read or made is not what it was."""

    stage: str
    state: State
    why: str = ""


def run_pipeline(
    spec: PipelineSpec,
    *,
    only: Collection[str] | None = None,
    service: Sequence[str] = (),
    on_stage: OnStage | None = None,
    stages: Sequence[Stage] = STAGES,
) -> str:
    """Run the stages whose inputs, settings or outputs are not those of their records.

    Args:
        only: these stages alone, for a machine that has their inputs; the rest is left as it is.
        service: options of `quantroute generate` that choose the service.
        stages: the chain, in order.
    Returns:
        SHA-256 of the final manifest, or of what there is of it.
    Raises:
        ConfigurationError: a name in `only` is no stage.
        StageFailed: a command ended badly; the same call goes on from there.
        DatasetError: an input is missing.
        JournalError: another pipeline works in this folder.
    """
    names = [stage.name for stage in stages]
    if unknown := sorted(set(only or ()) - set(names)):
        raise ConfigurationError(f"no stage {', '.join(unknown)}; there are {', '.join(names)}")
    told = on_stage or (lambda *_: None)
    with FileLock(spec.home / ".lock"):
        for stage in stages:
            if only is not None and stage.name not in only:
                continue
            if status_of(spec, stage).state == "done":
                told(stage.name, "stands", 0.0)
                continue
            began_s = time.monotonic()
            told(stage.name, "begins", 0.0)
            _perform(spec, stage, service)
            told(stage.name, "ended", time.monotonic() - began_s)
        return _seal(spec, stages)


def status_of(spec: PipelineSpec, stage: Stage) -> StageStatus:
    """Whether a stage has to run, and why."""
    try:
        identity, wanted = _identity(spec, stage)
    except DatasetError as error:
        return StageStatus(stage=stage.name, state="waiting", why=str(error))
    record = StageRecord.read(spec.home, stage.name)
    if record is None:
        begun = read_begun(spec.home, stage.name) == identity
        return StageStatus(stage=stage.name, state="begun" if begun else "waiting")
    if record.settings != wanted.settings:
        return StageStatus(stage=stage.name, state="changed", why="settings have changed")
    if record.inputs != wanted.inputs:
        names = sorted(
            name
            for name in {*record.inputs, *wanted.inputs}
            if record.inputs.get(name) != wanted.inputs.get(name)
        )
        return StageStatus(stage=stage.name, state="changed", why=f"new: {', '.join(names)}")
    try:
        made = file_hashes(stage.outputs(spec))
    except DatasetError as error:
        return StageStatus(stage=stage.name, state="changed", why=str(error))
    if made != record.outputs:
        return StageStatus(stage=stage.name, state="changed", why="what it made was altered")
    return StageStatus(stage=stage.name, state="done")


def final_manifest(spec: PipelineSpec, stages: Sequence[Stage] = STAGES) -> dict[str, str]:
    """The record's hash of every stage that has one."""
    found = {}
    for stage in stages:
        record = StageRecord.read(spec.home, stage.name)
        if record is not None:
            found[stage.name] = record.sha256
    return found


def _perform(spec: PipelineSpec, stage: Stage, service: Sequence[str]) -> None:
    identity, wanted = _identity(spec, stage)
    if read_begun(spec.home, stage.name) != identity:
        for path in stage.owns(spec):
            _set_aside(path)
        write_begun(spec.home, stage.name, identity)
    (spec.home / f"{stage.name}.json").unlink(missing_ok=True)
    stage.work(spec, service)
    StageRecord(
        stage=stage.name,
        settings=wanted.settings,
        inputs=wanted.inputs,
        outputs=file_hashes(stage.outputs(spec)),
    ).write(spec.home)


def _identity(spec: PipelineSpec, stage: Stage) -> tuple[str, StageRecord]:
    """What the stage is about to work on, as a hash, and as the record it will have."""
    record = StageRecord(
        stage=stage.name,
        settings=spec.settings_sha256(stage.tables),
        inputs=file_hashes(stage.inputs(spec)),
        outputs={},
    )
    text = canonical_json(record.as_dict())
    return hashlib.sha256(text.encode()).hexdigest(), record


def _set_aside(path: Path) -> None:
    """Rename what other inputs have made: it may have cost days, and is not ours to delete."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    path.rename(aside)


def _seal(spec: PipelineSpec, stages: Sequence[Stage]) -> str:
    text = json.dumps(final_manifest(spec, stages), indent=2) + "\n"
    atomic_write(spec.home / MANIFEST, text.encode())
    return hashlib.sha256(text.encode()).hexdigest()
