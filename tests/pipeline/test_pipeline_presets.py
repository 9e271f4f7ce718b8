"""The presets' files are read by every stage that they are written for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_support import quantroute
from quantroute.drafter import load_train_spec
from quantroute.errors import ConfigurationError
from quantroute.extraction import load_extract_spec
from quantroute.generation import load_run_spec
from quantroute.pipeline import PRESETS, load_pipeline_spec, preset


@pytest.fixture(params=sorted(PRESETS))
def run_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    found = preset(request.param)
    path = tmp_path / "run.toml"
    path.write_text(found.text)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    spec = load_pipeline_spec(path)
    spec.target.mkdir(parents=True)
    sizes = {"num_hidden_layers": found.num_layers, "hidden_size": found.hidden_size}
    (spec.target / "config.json").write_text(json.dumps(sizes | {"vocab_size": 163_840}))
    return path


def test_every_stage_reads_it(run_file: Path) -> None:
    assert load_run_spec(run_file).model == "moonshotai/kimi-k2.5"
    assert load_extract_spec(run_file).layers.boundary == (2, 30, 58)
    assert load_train_spec(run_file).depth == load_pipeline_spec(run_file).evaluate.depth


def test_the_estimate_is_four_states_in_two_bytes() -> None:
    found = preset("kimi-k2.5")
    assert found.bytes_per_token == 57_344
    assert "57.3 GB a million" in found.estimates()[0]


def test_an_unknown_preset_names_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"no preset 'kimi'; there are: kimi-k2\.5"):
        preset("kimi")


def test_init_never_writes_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    arguments = ("init", str(path), "--preset", "kimi-k2.5")
    assert quantroute(*arguments).code == 0
    assert path.read_text() == preset("kimi-k2.5").text.replace("run.toml", str(path))
    path.write_text("mine")
    ended = quantroute(*arguments)
    assert (ended.code, path.read_text()) == (2, "mine")
    assert "exists" in ended.err
