"""The demo's folder: a target, prompts, a run.toml, and a service that sells the target."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quantroute.demo._backend import ModelBackend
from quantroute.demo._corpus import questions, standard_library
from quantroute.demo._target import SYSTEM_PROMPT, DemoTarget, TargetSize, train_target
from quantroute.simulator import ThreadedSimulator, kimi_mission_scenario
from quantroute.storage import atomic_write

__all__ = ["DemoFolder", "DemoSize", "opened_service", "prepare_demo"]

_MODEL: Final = "moonshotai/kimi-k2.5"
_KEY_VARIABLE: Final = "OPENROUTER_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """How much of everything; the default is minutes on two cores."""

    target: TargetSize = field(default_factory=TargetSize)
    prompts: int = 500
    max_output_tokens: int = 120
    epochs: int = 10
    learning_rate: float = 2e-3
    packed_tokens: int = 1_024
    draft_vocab_size: int = 640
    speculate_prompts: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFolder:
    """Where the demo lives."""

    path: Path

    @property
    def target(self) -> Path:
        """The trained target, in Hugging Face form."""
        return self.path / "target"

    @property
    def run_file(self) -> Path:
        """What `quantroute pipeline` takes."""
        return self.path / "run.toml"


def prepare_demo(
    path: Path | str,
    *,
    size: DemoSize | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[DemoFolder, DemoTarget | None]:
    """Train the target unless it stands, and write prompts and run.toml unless they do.

    Returns:
        The folder, and what training the target gave, None if it stood.
    """
    size, folder = size or DemoSize(), DemoFolder(path=Path(path))
    trained = None
    # `README.txt` is written last.
    if not (folder.target / "README.txt").exists():
        trained = train_target(folder.target, size=size.target, on_step=on_step)
    if folder.run_file.exists():
        return folder, trained  # it may have been edited since
    asked = questions(standard_library(), count=size.prompts)
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": question},
                ]
            }
        )
        for question in asked
    ]
    atomic_write(folder.path / "prompts.jsonl", ("\n".join(lines) + "\n").encode())
    atomic_write(folder.run_file, _run_toml(size).encode())
    return folder, trained


@contextlib.contextmanager
def opened_service(folder: DemoFolder, *, exact: bool = False) -> Iterator[ThreadedSimulator]:
    """The simulator with the folder's target behind it; its key stands in the environment.

    With `exact` (see `ModelBackend`) and a seed in the run file's `[sampling]`, its answers do not
    depend on what else is asked, nor on what was asked before.
    """
    scenario = kimi_mission_scenario(time_scale=0.0)
    backend = ModelBackend(folder.target, exact=exact)
    before = os.environ.get(_KEY_VARIABLE)
    with ThreadedSimulator(scenario, backend=backend) as simulator:
        os.environ[_KEY_VARIABLE] = simulator.api_key
        try:
            yield simulator
        finally:
            if before is None:
                os.environ.pop(_KEY_VARIABLE, None)
            else:
                os.environ[_KEY_VARIABLE] = before


def _run_toml(size: DemoSize) -> str:
    return f"""\
# The demo's whole run; `quantroute pipeline status run.toml` shows its stages.

[run]
model = "{_MODEL}"
cap_usd = "1.00"
out = "run"
max_in_flight = 64

[policy]
exclude = ["Fireworks", "BaseTen"]

[sampling]
temperature = 0.7
reasoning = true

[[dataset]]
name = "stdlib"
prompts = "prompts.jsonl"
max_output_tokens = {size.max_output_tokens}

[extract]
target = "target"
margin_gb = 0.1

[data]
draft_vocab_size = {size.draft_vocab_size}
held_out_share = 0.12

[train]
data = "run/training-data"
out = "run/drafter"
target = "target"
device = "cpu"
epochs = {size.epochs}
learning_rate = {size.learning_rate}
max_tokens = {size.packed_tokens}
checkpoints_per_epoch = 1
log_every_steps = 5

[evaluate]
speculate_prompts = {size.speculate_prompts}

[deploy]
engine = "vllm"
"""
