"""`quantroute demo`: from nothing to a judged drafter, on the CPU, without key or network."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quantroute.cli._output import say
from quantroute.cli._pipeline import print_stage
from quantroute.errors import ConfigurationError
from quantroute.money import format_usd
from quantroute.pipeline import PipelineSpec, load_pipeline_spec, run_pipeline

if TYPE_CHECKING:
    from quantroute.demo import DemoTarget

__all__ = ["demo"]

_NEEDED: Final = {
    "extract": ("numpy", "torch", "transformers", "tokenizers", "safetensors", "jinja2"),
    "train": ("datasets", "speculators"),
}
_EVERY_STEPS: Final = 50


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The demo's folder.")] = Path("demo"),
) -> None:
    """Train a toy target, buy its answers from simulated providers, train and judge a drafter.

    No key, no network, minutes on two cores. Stopped anywhere, the same command goes on. The
    folder is a whole pipeline to look at: run.toml, rows, states, drafter.

    quantroute demo --out demo
    """
    _require_extras()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from quantroute.demo import opened_service, prepare_demo

    began_s = time.monotonic()
    say("== target: a small model learns to talk about the Python standard library", bold=True)
    folder, trained = prepare_demo(out, on_step=_show_step)
    _show_target(trained, folder.target)
    spec = load_pipeline_spec(folder.run_file)
    with opened_service(folder) as service:
        where = ["--base-url", service.base_url]
        run_pipeline(spec, service=where, on_stage=print_stage)
        billed = service.bill.total_pusd
    if billed:  # a demo that goes on has its bill behind it
        say(f"billed by the simulated service: {format_usd(billed, places=6)}")
    _show_states(spec)
    _show_training(spec)
    _show_evaluation(spec)
    say(f"drafter for vLLM: {spec.exported}", bold=True)
    say(f"the whole demo took {time.monotonic() - began_s:,.0f} s; look into {out}")


def _require_extras() -> None:
    for extra, packages in _NEEDED.items():
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f"{', '.join(missing)} not installed; the demo trains a model and a drafter: "
                f"pip install 'quantroute[extract,train]' (missing: {extra})"
            )


def _show_step(step: int, steps: int, loss: float) -> None:
    if step % _EVERY_STEPS == 0 or step == steps:
        say(f"step {step:,} of {steps:,}, loss {loss:.2f}", err=True)


def _show_target(trained: DemoTarget | None, folder: Path) -> None:
    if trained is None:
        say(f"target stands in {folder}")
        return
    say(
        f"target of {trained.parameters:,} parameters, {trained.dialogues:,} dialogues, loss "
        f"{trained.first_loss:.2f} -> {trained.last_loss:.2f} in {trained.train_s:,.0f} s"
    )


def _show_states(spec: PipelineSpec) -> None:
    manifest = _json(spec.training_data / "manifest.json")
    held = len(spec.held_out.read_text(encoding="utf-8").split())
    say(
        f"states of {manifest['examples']:,} answers for training ({manifest['tokens']:,} tokens, "
        f"{manifest['supervised_tokens']:,} learnt), {held:,} answers held out; the draft "
        f"vocabulary covers {manifest['coverage']:.2%}"
    )


def _show_training(spec: PipelineSpec) -> None:
    lines = (spec.drafter / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        if row["split"] == "validation" and row["loss"] is not None:
            shares = " / ".join(f"{share:.0%}" for share in row["accuracy"])
            say(f"after step {row['step']:,}: loss {row['loss']:.3f}, accuracy ahead {shares}")


def _show_evaluation(spec: PipelineSpec) -> None:
    found = _json(spec.evaluation)
    whole, most = found["trained"][0], found["depth"] + 1
    say(
        f"acceptance length on held-out answers: {found['untrained']['length']:.2f} untrained -> "
        f"{whole['length']:.2f} trained, of {most} (sampled: {whole['sampled_length']:.2f})",
        bold=True,
    )
    for name, control in found["controls"].items():
        say(f"  control, {name}: {control['length']:.2f}")
    best = max(found["speed_ups"], key=lambda item: item["speed_up"])
    say(
        f"expected speed-up where a draft step costs {best['draft_cost']:.0%} of a pass: "
        f"{best['speed_up']:.2f}x"
    )
    real = found["speculation"]
    if real is not None:
        say(
            f"real greedy decoding of {real['prompts']} prompts: {real['tokens']:,} tokens in "
            f"{real['target_passes']:,} passes of the target ({real['untrained_passes']:,} with "
            f"an untrained drafter), {real['identical']} of {real['prompts']} texts identical to "
            "plain decoding"
        )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
