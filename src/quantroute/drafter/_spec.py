"""`[train]` of run.toml: what to train, with which trainer, where."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quantroute._runfile import RunFile, Table
from quantroute.errors import ConfigurationError

__all__ = ["TrainSpec", "load_train_spec"]

Trainer = Literal["speculators", "specforge"]
Device = Literal["auto", "cpu", "cuda"]
Head = Literal["eagle3", "eagle3.1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """One training.

    Attributes:
        data: a folder that `quantroute convert` wrote in this trainer's format.
        out: checkpoints, log and metrics; a second start goes on from its checkpoints.
        target: the target's folder or id; None takes the one the data were made with.
        python: the interpreter that has the trainer, if it is not this one.
        device: `auto` takes GPUs if that interpreter sees any.
        processes: one per GPU.
        epochs, max_steps: whichever comes first; `max_steps` counts over restarts.
        learning_rate: None leaves it to the trainer.
        max_tokens: longest sequence (speculators packs examples up to it); None: 8,192 or the
            longest example for speculators, the longest example for SpecForge.
        depth: how many tokens ahead the drafter is trained to look.
        batch_size: examples per step and process; SpecForge only.
        train_share: the rest of the examples validates; speculators only.
        checkpoints_per_epoch: at least this many.
        head: `eagle3` runs on vLLM and SGLang; `eagle3.1` has three more norms and a sliding
            window, which SGLang (0.5.23) computes differently. speculators only.
        draft_config: a decoder config of your own instead of one derived from the target.
        extra: arguments handed to the trainer's command as they are.
        any_version: go on although a package is of a version that nobody here has seen work.
    """

    data: Path
    out: Path
    trainer: Trainer = "speculators"
    target: str | None = None
    python: str = sys.executable
    device: Device = "auto"
    processes: int = 1
    epochs: int = 1
    max_steps: int | None = None
    learning_rate: float | None = None
    max_tokens: int | None = None
    depth: int = 3
    batch_size: int = 1
    train_share: float = 0.9
    checkpoints_per_epoch: int = 4
    log_every_steps: int = 10
    seed: int = 42
    head: Head = "eagle3"
    draft_config: Path | None = None
    extra: tuple[str, ...] = ()
    any_version: bool = False

    def __post_init__(self) -> None:
        if self.trainer == "specforge" and self.head != "eagle3":
            raise ConfigurationError("SpecForge trains the head 'eagle3' only")
        if self.trainer == "speculators" and self.batch_size != 1:
            raise ConfigurationError(
                "speculators packs examples up to max_tokens; set that instead of batch_size"
            )


_Count = Annotated[int, Field(strict=True, ge=1)]


class _TrainTable(Table):
    data: StrictStr
    out: StrictStr = "drafter"
    trainer: Trainer = "speculators"
    target: StrictStr | None = None
    python: StrictStr | None = None
    device: Device = "auto"
    processes: _Count = 1
    epochs: _Count = 1
    max_steps: _Count | None = None
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    max_tokens: _Count | None = None
    depth: _Count = 3
    batch_size: _Count = 1
    train_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.9
    checkpoints_per_epoch: _Count = 4
    log_every_steps: _Count = 10
    seed: StrictInt = 42
    head: Head = "eagle3"
    draft_config: StrictStr | None = None
    extra: tuple[StrictStr, ...] = ()
    any_version: StrictBool = False


class _File(Table):
    train: _TrainTable


def load_train_spec(path: Path | str) -> TrainSpec:
    """The training that the file describes. Paths in it are relative to the file.

    Raises:
        ConfigurationError: no `[train]`, or a setting that cannot be meant.
    """
    source = RunFile.load(path)
    table = source.parse(_File).train
    settings = table.model_dump()
    settings["data"] = source.resolve(table.data)
    settings["out"] = source.resolve(table.out)
    if table.target is not None and source.resolve(table.target).exists():
        settings["target"] = str(source.resolve(table.target))
    if table.draft_config is not None:
        settings["draft_config"] = source.resolve(table.draft_config)
    # An interpreter's path must not be followed through its link: that would leave its venv.
    settings["python"] = sys.executable if table.python is None else _python(source, table.python)
    try:
        return TrainSpec(**settings)
    except ConfigurationError as error:
        raise source.error(("train",), error) from error


def _python(source: RunFile, name: str) -> str:
    found = source.resolve(name)
    if "/" in name and not found.exists():
        raise source.error(("train", "python"), f"{found} does not exist")
    return str(found) if "/" in name else name
