"""speculators: the command for a training, and its log."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantroute.drafter._checkpoints import steps_done
from quantroute.drafter._data import TrainingData
from quantroute.drafter._launch import Launch, Measurement
from quantroute.drafter._spec import TrainSpec
from quantroute.drafter._versions import Installed
from quantroute.errors import DatasetError

__all__ = ["SpeculatorsLog", "speculators_launch"]

_PACKED_TOKENS: Final = 8_192
_CPU_LAUNCHER: Final = Path(__file__).with_name("_cpu_launcher.py")
# rich breaks log lines at the terminal's width; one step's figures must stay on one line.
_WIDE: Final = "4000"


def speculators_launch(spec: TrainSpec, data: TrainingData, installed: Installed) -> Launch:
    """The trainer's own command: its module here, torchrun for several GPUs.

    Raises:
        DatasetError: the folder lacks what the command will look for.
    """
    on_cpu = spec.device == "cpu" or (spec.device == "auto" and not installed.gpus)
    packed = spec.max_tokens or max(_PACKED_TOKENS, data.longest_tokens)
    checkpoints = spec.out / "checkpoints"
    arguments = [
        *("--speculator-type", "eagle3"),
        *("--verifier-name-or-path", spec.target or data.model),
        *("--data-path", str(data.folder)),
        *("--save-path", str(checkpoints)),
        *("--target-layer-ids", *map(str, data.layers)),
        *("--total-seq-len", str(packed)),
        *("--on-missing", "raise"),  # a hole in the data must not be trained around
        *("--mask-token-id", "0"),  # of no use to this head; saves loading the tokenizer
        *("--train-data-ratio", repr(spec.train_share)),
        *("--epochs", str(spec.epochs)),
        *("--ttt-steps", str(spec.depth)),
        *("--checkpoint-freq", _checkpoint_freq(spec)),
        *("--log-freq", str(spec.log_every_steps)),
        *("--seed", str(spec.seed)),
        *_vocabulary(data),
        *_head(spec),
        *_optional(spec),
        *(_on_cpu() if on_cpu else ()),
        *spec.extra,
    ]
    return Launch(
        argv=(*_program(spec, on_cpu=on_cpu), *arguments),
        env={"COLUMNS": _WIDE, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        parser=SpeculatorsLog(steps_done(checkpoints)),
        checkpoints=checkpoints,
        total_steps=_total_steps(spec, data, packed),
        notes=("on the CPU: slow, for rehearsals",) if on_cpu else (),
    )


def _program(spec: TrainSpec, *, on_cpu: bool) -> tuple[str, ...]:
    if on_cpu:
        return (spec.python, str(_CPU_LAUNCHER))
    if spec.processes == 1:
        return (spec.python, "-m", "speculators", "train")
    count = str(spec.processes)
    run = (spec.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count)
    return (*run, "-m", "speculators.train")


def _checkpoint_freq(spec: TrainSpec) -> str:
    """In epochs."""
    return "1" if spec.checkpoints_per_epoch == 1 else f"{1 / spec.checkpoints_per_epoch:.4f}"


def _vocabulary(data: TrainingData) -> tuple[str, ...]:
    size = data.draft_vocab_size
    if size is None:
        return ()
    paths = [data.folder / f"{name}-{size}.npy" for name in ("d2t", "t2d")]
    for path in paths:
        # Without the map the trainer would make one of its own, or quietly take all tokens.
        if not path.exists():
            raise DatasetError(path=str(path), problem="is missing; write the data again")
    where = ("--d2t-path", str(paths[0]), "--t2d-path", str(paths[1]))
    return ("--draft-vocab-size", str(size), *where)


def _head(spec: TrainSpec) -> tuple[str, ...]:
    """`eagle3` is the head both engines compute alike: no extra norms, full attention."""
    if spec.head == "eagle3.1":
        return ()
    norms = ("--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output")
    # A decoder config of one's own defines the attention; the flag would contradict it.
    return norms if spec.draft_config else (*norms, "--full-attention-indices", "0")


def _optional(spec: TrainSpec) -> tuple[str, ...]:
    found: list[str] = []
    if spec.max_steps is not None:
        found += ["--max-steps", str(spec.max_steps)]
    if spec.learning_rate is not None:
        found += ["--lr", repr(spec.learning_rate)]
    if spec.draft_config is not None:
        found += ["--draft-config", str(spec.draft_config)]
    return tuple(found)


def _on_cpu() -> tuple[str, ...]:
    """No flex attention and no fused loss there; autocast is off, so everything is float32."""
    return (
        *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
        *("--num-workers", "0", "--hidden-states-dtype", "float32"),
    )


def _total_steps(spec: TrainSpec, data: TrainingData, packed: int) -> int:
    tokens = data.tokens * spec.train_share
    steps = math.ceil(tokens / packed / spec.processes) * spec.epochs
    return steps if spec.max_steps is None else min(steps, spec.max_steps)


_FIGURE: Final = re.compile(
    r"([a-zA-Z_][\w/]*)=(-?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))", re.IGNORECASE
)


@dataclass(slots=True)
class SpeculatorsLog:
    """Reads lines such as `train/loss=0.075, train/cond_acc_0=0.83, ..., global_step=17`.

    A line of validation names no step: it has the last one that was told, at first the one where
    the training goes on.
    """

    _step: int = 0

    def read(self, line: str) -> Measurement | None:
        if "train/loss=" not in line and "val/loss_epoch=" not in line:
            return None
        figures = {name: float(value) for name, value in _FIGURE.findall(line)}
        if "train/loss" in figures:
            self._step = int(figures.get("global_step", self._step)) + 1
            return self._measured("train", "train/{}", figures)
        return self._measured("validation", "val/{}_epoch", figures)

    def _measured(self, split: str, form: str, figures: dict[str, float]) -> Measurement:
        rate = next((figures[name] for name in ("lr", "lr/AdamW") if name in figures), None)
        epoch = figures.get("epoch")
        return Measurement(
            split="train" if split == "train" else "validation",
            step=self._step,
            epoch=None if epoch is None else int(epoch),
            loss=figures[form.format("loss")],
            accuracy=_positions(figures, form, "cond_acc"),
            cumulative=_positions(figures, form, "full_acc"),
            learning_rate=rate,
            tokens_per_s=figures.get("profile/tokens_per_s"),
        )


def _positions(figures: dict[str, float], form: str, name: str) -> tuple[float, ...]:
    found: list[float] = []
    while (key := form.format(f"{name}_{len(found)}")) in figures:
        found.append(figures[key])
    return tuple(found)
