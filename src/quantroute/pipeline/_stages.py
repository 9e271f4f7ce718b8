"""The stages: what each reads, what it makes, and how it is done.

The long ones are quantroute's own commands in processes of their own: what is resumed here is
resumed by them, and whatever kills one leaves the others whole.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantroute.drafter import export_drafter, find_checkpoint, load_train_spec
from quantroute.errors import StageFailed
from quantroute.pipeline import _contents as contents
from quantroute.pipeline._contents import Files
from quantroute.pipeline._data import write_training_data
from quantroute.pipeline._judge import judge_drafter
from quantroute.pipeline._spec import PipelineSpec
from quantroute.storage import atomic_folder

__all__ = ["STAGES", "Stage"]

Work = Callable[[PipelineSpec, Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the chain.

    Attributes:
        tables: of run.toml, or fields of them; a change makes the stage run again.
        inputs, outputs: files by name; the hashes of their contents say whether anything has
            changed.
        owns: what is set aside when the stage has to begin anew.
        work: does it; the second argument is which service to talk to, as options.
    """

    name: str
    tables: tuple[str, ...]
    inputs: Callable[[PipelineSpec], Files]
    outputs: Callable[[PipelineSpec], Files]
    owns: Callable[[PipelineSpec], tuple[Path, ...]]
    work: Work


def _run_command(stage: str, *arguments: str) -> None:
    """One of quantroute's own commands.

    Raises:
        StageFailed: it ended with another status than 0.
    """
    command = [sys.executable, "-m", "quantroute", *arguments]
    with subprocess.Popen(command) as process:  # noqa: S603 - our own command
        while process.poll() is None:
            # Ctrl+C reaches the command too, which drains and says so; here there is but to wait.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    if process.returncode != 0:
        raise StageFailed(stage=stage, status=process.returncode)


def _plan(spec: PipelineSpec, service: Sequence[str]) -> None:
    _run_command("plan", "plan", str(spec.path), *service)


def _generate(spec: PipelineSpec, service: Sequence[str]) -> None:
    _run_command("generate", "generate", str(spec.path), *service)
    rows = str(spec.rows)
    _run_command("generate", "export", str(spec.run_folder), rows, "--overwrite")


def _extract(spec: PipelineSpec, _: Sequence[str]) -> None:
    _run_command("extract", "extract", str(spec.path))


def _data(spec: PipelineSpec, _: Sequence[str]) -> None:
    write_training_data(spec)


def _train(spec: PipelineSpec, _: Sequence[str]) -> None:
    _run_command("train", "train", str(spec.path))


def _export(spec: PipelineSpec, _: Sequence[str]) -> None:
    """Nothing of it goes on where it was: what stands there is half made, or was altered since."""
    train = load_train_spec(spec.path)
    with atomic_folder(spec.exported) as folder:
        export_drafter(
            spec.drafter,
            folder,
            engine=spec.deploy.engine,
            target=str(spec.target),
            python=train.python,
        )


def _evaluate(spec: PipelineSpec, _: Sequence[str]) -> None:
    judge_drafter(spec)


def _prompts(spec: PipelineSpec) -> Files:
    return {f"prompts {number}": path for number, path in enumerate(spec.prompts, start=1)}


#: Files of a target that decide what it is and how rows become its tokens.
_OF_TARGET: Final = (
    *("config.json", "model.safetensors.index.json", "tokenizer*.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
    "tokenization_*.py",
)


def _target(spec: PipelineSpec) -> Files:
    """What identifies the target; its weights are not read again for that."""
    found = sorted({path for pattern in _OF_TARGET for path in spec.target.glob(pattern)})
    return {f"target {path.name}": path for path in found}


def _template(spec: PipelineSpec) -> Files:
    """The chat template, if the file names another than the target's own."""
    named = spec.tables["extract"].get("chat_template")
    return {} if named is None else {"chat template": spec.path.parent / str(named)}


def _failed(spec: PipelineSpec) -> Files:
    """The audit's findings whose rows are left out, if the file asks for it."""
    named = spec.tables["extract"].get("drop_failed_audit")
    return {} if named is None else {"failed audit": spec.path.parent / str(named)}


def _weights(spec: PipelineSpec) -> Files:
    """Of the checkpoint that counts; only one of the two trainers' files is there."""
    checkpoint = find_checkpoint(spec.drafter)
    names = ("model.safetensors", "training_state.pt")
    found = [checkpoint / name for name in names if (checkpoint / name).exists()]
    return {"drafter": found[0] if found else checkpoint / names[0]}


_ASKED: Final = ("run", "policy", "sampling", "dataset", "local")

STAGES: Final = (
    Stage(
        name="plan",
        tables=_ASKED,
        inputs=_prompts,
        outputs=lambda _: {},
        owns=lambda _: (),
        work=_plan,
    ),
    Stage(
        name="generate",
        tables=_ASKED,
        inputs=_prompts,
        outputs=lambda spec: {"rows": contents.rows(spec.rows)},
        # Rows are never set aside: they were paid for, and `generate` itself tells runs apart.
        owns=lambda _: (),
        work=_generate,
    ),
    Stage(
        name="extract",
        tables=("extract",),
        inputs=lambda spec: {
            "rows": contents.rows(spec.rows),
            **_target(spec),
            **_template(spec),
            **_failed(spec),
        },
        outputs=lambda spec: {"states": contents.states(spec.states)},
        owns=lambda spec: (spec.states,),
        work=_extract,
    ),
    Stage(
        name="data",
        tables=("data", "train.trainer"),  # whose files they are
        inputs=lambda spec: {"states": contents.states(spec.states)},
        outputs=lambda spec: {
            "training data": contents.training_data(spec.training_data),
            "held-out keys": spec.held_out,
        },
        owns=lambda spec: (spec.training_data,),
        work=_data,
    ),
    Stage(
        name="train",
        tables=("train",),
        inputs=lambda spec: {"training data": contents.training_data(spec.training_data)},
        outputs=_weights,
        owns=lambda spec: (spec.drafter,),
        work=_train,
    ),
    Stage(
        name="export",
        tables=("deploy",),
        inputs=_weights,
        outputs=lambda spec: {
            "weights": spec.exported / "model.safetensors",
            "config": contents.config_of_drafter(spec.exported),
        },
        owns=lambda spec: (spec.exported,),
        work=_export,
    ),
    Stage(
        name="evaluate",
        tables=("evaluate",),
        inputs=lambda spec: {
            "weights": spec.exported / "model.safetensors",
            "states": contents.states(spec.states),
            "held-out keys": spec.held_out,
        },
        outputs=lambda spec: {"evaluation": spec.evaluation},
        owns=lambda _: (),
        work=_evaluate,
    ),
)
