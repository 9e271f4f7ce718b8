"""A real run, made once: every kind of section has something to show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli_support import quantroute, write_prompts

SCENARIO = """
name = "two honest endpoints, one of them unsteady, and one that is left out"
time_scale = 0.0
[[providers]]
slug = "alpha"
name = "Alpha"
[[providers]]
slug = "beta"
name = "Beta"
[[models]]
id = "moonshotai/kimi-k2.5"
[[models.endpoints]]
tag = "alpha/int4"
quantization = "int4"
pricing = { prompt = "0.00000045", completion = "0.0000022" }
uptime_last_30m = 99.0
[[models.endpoints]]
tag = "beta/fp4"
quantization = "fp4"
pricing = { prompt = "0.00000045", completion = "0.000001" }
uptime_last_30m = 99.0
[answers]
mean_tokens = 200.0
[faults]
upstream_502 = 0.1
"""

RUN = """
[run]
name = "shown"
model = "moonshotai/kimi-k2.5"
cap_usd = "1.00"
out = "shown"
[[dataset]]
name = "b3"
prompts = "b3.jsonl"
max_output_tokens = 400
target_output_tokens = 5_000
[[dataset]]
name = "b4"
prompts = "b4.jsonl"
max_output_tokens = 4_096
cap_usd = "0.50"
target_output_tokens = 90_000
"""


@pytest.fixture(scope="session")
def _made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "run.toml").write_text(RUN)
    (folder / "scenario.toml").write_text(SCENARIO)
    write_prompts(folder / "b3.jsonl", 40)
    (folder / "b4.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Of {n}?"}) + "\n" for n in range(30))
    )
    ended = quantroute(
        "generate", folder / "run.toml", "--simulate", "--scenario", folder / "scenario.toml"
    )
    assert ended.code == 4, ended.err  # b4's prompts are too few
    return folder / "shown-simulated"


@pytest.fixture
def run_folder(_made_run: Path, tmp_path: Path) -> Path:
    """A copy of that run's folder, to be changed at will."""
    return shutil.copytree(_made_run, tmp_path / "shown-simulated")
