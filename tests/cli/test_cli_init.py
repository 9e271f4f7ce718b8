"""`quantroute init`: what it writes is a run file that works as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cli_support import quantroute, write_prompts
from quantroute.generation import load_run_spec


def test_the_file_plans_and_runs_as_it_stands() -> None:
    assert quantroute("init", "--cap", "1.00", "--max-in-flight", "50").code == 0
    assert quantroute("plan", "run.toml", "--simulate").code == 0
    ended = quantroute("generate", "run.toml", "--simulate", "--json")
    assert ended.code == 0
    assert [item["is_reached"] for item in ended.data["datasets"]] == [True]


def test_every_line_that_is_off_is_a_setting_that_works() -> None:
    """Whoever takes the "# " away must not be told that there is no such field."""
    quantroute("init")
    lines = Path("run.toml").read_text().splitlines()
    off = [line.removeprefix("# ") for line in lines if re.match(r"# [a-z_]+ = ", line)]
    assert len(off) > 12
    for setting in off:
        changed = [setting if line == f"# {setting}" else line for line in lines]
        Path("changed.toml").write_text("\n".join(changed))
        load_run_spec("changed.toml")


def test_prompt_files_become_datasets_beside_the_run_file() -> None:
    write_prompts(Path("b3.jsonl"), 3)
    write_prompts(Path("b 4.jsonl"), 2)
    ended = quantroute(
        "init", "jobs/run.toml", "--prompts", "b3.jsonl", "--prompts", "b 4.jsonl",
        "--target-output-tokens", "5000", "--model", 'a/"b"', "--native", "fp8", "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert ended.data["native"] == "fp8"
    spec = load_run_spec("jobs/run.toml")
    assert [len(list(item.read())) for item in spec.datasets] == [3, 2]
    assert {item.target_output_tokens for item in spec.datasets} == {5_000}
    assert spec.model == 'a/"b"'
    assert spec.policy.as_dict()["native"] == "fp8"


def test_a_file_that_is_there_is_left_alone() -> None:
    Path("run.toml").write_text("mine")
    ended = quantroute("init")
    assert ended.code == 2
    assert "run.toml exists and is left as it is" in ended.err
    assert Path("run.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cap", "lots"), "a cap is an amount"),
        (("--native", "int5"), "'int5' is not a known format"),
        (("--prompts", "none.jsonl"), "none.jsonl"),
        (("run.json",), "a run file's name ends in .toml"),
        (("--prompts", "a.txt", "--prompts", "b/a.txt"), "two prompt files make a dataset"),
        (("file/run.toml",), "file/run.toml: cannot be written"),
    ],
)
def test_mistakes_leave_no_file(arguments: tuple[str, ...], words: str) -> None:
    Path("b").mkdir()
    for name in ("a.txt", "b/a.txt", "file"):
        Path(name).write_text("Why?\n")
    ended = quantroute("init", *arguments)
    assert (ended.code, words in ended.err) == (2, True), ended.err
    assert not Path("run.toml").exists()


def test_a_model_nobody_knows_asks_for_its_format() -> None:
    ended = quantroute("init", "--model", "some/model")
    assert "set `native` in [policy]" in ended.out
    text = Path("run.toml").read_text()
    assert "NEEDED" in text
    assert tomllib.loads(text)["policy"] == {}
