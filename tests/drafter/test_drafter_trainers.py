"""The real trainers, on the CPU, from written states to a folder an engine loads.

Random weights: this proves that the parts fit, not that anything is learnt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantroute.extraction import special_token_ids, write_specforge, write_speculators
from trainer_support import facts, final_norm, make_examples, make_target, needs, states_of

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), folder


def quantroute(*arguments: object) -> Any:
    """The command's JSON, in a process of its own; it has to end well."""
    ended = subprocess.run(
        [sys.executable, "-c", "from quantroute.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout)


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_run(folder: Path, **settings: Any) -> Path:
    path = folder / "run.toml"
    lines = (f"{name} = {json.dumps(value)}" for name, value in settings.items())
    path.write_text("[train]\n" + "\n".join(lines) + "\n")
    return path


@needs("speculators", "hs_connectors")
def test_speculators_trains_goes_on_and_is_exported(
    target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = target
    write_speculators(
        states_of(model, make_examples(60)),
        tmp_path / "data",
        facts=facts(str(folder)),
        draft_vocab_size=128,
        forced=special_token_ids(folder),
    )
    settings = {"data": "data", "max_tokens": 128, "log_every_steps": 1, "learning_rate": 1e-3}
    first = quantroute("train", write_run(tmp_path, **settings, epochs=1), "--json")
    assert first["checkpoint"] == str(tmp_path / "drafter" / "checkpoints" / "0")
    steps = [row["step"] for row in rows(first["metrics"]) if row["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 10
    assert len(first["validation"]["cumulative"]) == 3
    again = quantroute("train", write_run(tmp_path, **settings, epochs=2), "--json")
    assert again["checkpoint"] == str(tmp_path / "drafter" / "checkpoints" / "1")
    assert again["last"]["step"] > len(steps)  # not from the beginning
    assert again["last"]["epoch"] == 1
    for engine, ids in (("vllm", [2, 4, 5]), ("sglang", [1, 3, 4])):
        made = tmp_path / engine
        done = quantroute(
            "export-drafter", tmp_path / "drafter", made, "--engine", engine, "--json"
        )
        assert done["layer_ids"] == ids
        # What was written by bytes is what the library reads.
        weights = safetensors.load_file(made / "model.safetensors")
        source = safetensors.load_file(Path(done["source"]) / "model.safetensors")
        for name, tensor in weights.items():
            assert torch.equal(tensor, source[name.replace("midlayer.", "layers.0.")])
        drafted = torch.arange(128) + weights["d2t"]
        assert drafted.tolist() == weights["t2d"].nonzero().flatten().tolist()


@needs("specforge", "triton", "yunchang")
def test_specforge_trains_and_is_exported(target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    write_specforge(
        states_of(model, make_examples(12)),
        tmp_path / "data",
        facts=facts(str(folder)),
        norm=final_norm(model),
        draft_vocab_size=128,
        forced=special_token_ids(folder),
    )
    settings = {"data": "data", "trainer": "specforge", "log_every_steps": 1, "max_steps": 6}
    done = quantroute("train", write_run(tmp_path, **settings), "--json")
    assert done["last"]["step"] == 6
    assert len(done["last"]["accuracy"]) == 3
    for engine, ids in (("vllm", [2, 4, 5]), ("sglang", [1, 3, 4])):
        made = tmp_path / engine
        out = quantroute("export-drafter", tmp_path / "drafter", made, "--engine", engine, "--json")
        assert out["layer_ids"] == ids
        weights = safetensors.load_file(made / "model.safetensors")
        assert weights["fc.weight"].shape == (64, 192)
        assert "d2t" in weights
