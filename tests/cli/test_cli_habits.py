"""What programs and new users rely on: JSON everywhere, completion, mistakes that say what next."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_support import MODEL, quantroute, start, write_prompts
from quantroute.cli._app import app
from quantroute.cli._commands import COMMANDS, load
from quantroute.cli._exit import ExitCode
from quantroute.cli._policy_options import PolicyOptions
from quantroute.simulator import ThreadedSimulator


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and two files, made once; copied by nobody, changed by nobody."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = write_prompts(folder / "p.jsonl", 3)
    run = ("--simulate", "--cap", "1", "--out", folder / "run")
    assert quantroute("generate", prompts, *run).code == 0
    assert quantroute("export", folder / "run", folder / "set", "--format", "dataset").code == 0
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "what", "next_step"),
    [
        ("generate --simulate", 2, "--cap is needed", "such as 5.00"),
        ("generate none.jsonl --simulate --cap 1", 2, "none.jsonl", "No such file"),
        ("generate bad.jsonl --simulate --cap 1", 2, "bad.jsonl:1", "prompt, turns, messages"),
        ("generate empty.txt --simulate --cap 1", 2, "empty.txt", "no prompt in it"),
        ("generate --cap 1", 6, "OPENROUTER_API_KEY is not set", "export your key"),
        ("generate --simulate --cap 5%", 2, "'5%'", "an amount like '5.00'"),
        ("generate --simulate --cap 0.001", 3, "cap of $0.001", "raise the cap and rerun"),
        ("generate --simulate --cap 1 --redo cut", 2, "'cut' is not a class", "truncated"),
        ("generate {run} --simulate --cap 1", 2, "{run}", "cannot be read"),
        ("generate {p} --simulate --cap 1 --out {run} --seed 3", 2, "other settings", "old"),
        ("plan none.toml --simulate", 2, "none.toml", "quantroute init none.toml"),
        ("endpoints kimi-k2.5 --simulate", 5, "no model id", MODEL),
        (f"endpoints {MODEL} --simulate --exclude Firework", 2, "Firework", "mean Fireworks"),
        (f"endpoints {MODEL} --simulate --accept int5", 2, "'int5'", "use one of: int4"),
        ("status nowhere", 2, "no run here", "start one with `quantroute generate`"),
        ("export {run} rows.csv", 2, "rows.csv", ".jsonl or .parquet"),
        ("export {run} bad.jsonl", 2, "exists", "--overwrite"),
        ("export {run} rows.csv", 2, "rows.csv", "--format dataset"),
        ("export {run} {set} --format dataset", 2, "exists", "--overwrite"),
        ("export {run} x --format dataset --partial", 2, "--partial", "whole conversations"),
        ("export {run} x.jsonl --license mit", 2, "--license", "for --format dataset"),
        ("reconcile {run}", 6, "OPENROUTER_API_KEY is not set", "export your key"),
    ],
)  # fmt: skip
def test_mistakes_say_what_and_what_next(
    arguments: str, code: int, what: str, next_step: str, made: Path
) -> None:
    """With `--json` a program reads the same from standard output."""
    Path("bad.jsonl").write_text('{"text": 1}\n')
    Path("empty.txt").write_text("\n")
    names = {"run": str(made / "run"), "p": str(made / "p.jsonl"), "set": str(made / "set")}
    words = [word.format(**names) for word in arguments.split()]
    plain, for_programs = quantroute(*words), quantroute(*words, "--json")
    assert plain.code == for_programs.code == code
    told = plain.out + plain.err
    assert what.format(**names) in told
    assert next_step in told
    assert "Traceback" not in plain.out + plain.err
    data = for_programs.data
    assert data["exit_code"] == code
    assert next_step in data["error"]


#: What they find is in files of JSON that they name; `pipeline status` has `--json`.
TOLD_IN_FILES = {"demo", "pipeline"}


def test_every_command_speaks_json() -> None:
    for name in COMMANDS.keys() - TOLD_IN_FILES:
        options = {option for parameter in load(name).params for option in parameter.opts}
        assert "--json" in options, name


@pytest.mark.parametrize("name", ["generate", "endpoints", "serve", "audit"])
def test_who_may_serve_is_said_alike_everywhere(name: str) -> None:
    command = load(name)
    wanted = {item.name for item in dataclasses.fields(PolicyOptions)}
    assert wanted <= {parameter.name for parameter in command.params}
    assert "policy_options" not in {parameter.name for parameter in command.params}


def test_a_dataset_is_told_to_programs_file_by_file(made: Path) -> None:
    pytest.importorskip("pyarrow")
    ended = quantroute(
        "export", made / "run", "mine", "--format", "dataset", "--license", "mit", "--json"
    )
    assert ended.code == 0
    (file,) = ended.data["files"]
    assert (Path("mine") / file["path"]).stat().st_size == file["size_bytes"]
    assert ended.data["rows"] == file["rows"] == 3
    assert 'license: "mit"' in Path(ended.data["card"]).read_text()
    manifest = json.loads(Path(ended.data["manifest"]).read_text())
    assert manifest["files"] == ended.data["files"]


def test_reconcile_speaks_json(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), 2)
    at = ("--base-url", service.base_url)
    assert quantroute("generate", "p.jsonl", *at, "--cap", "1", "--out", "run").code == 0
    ended = quantroute("reconcile", "run", *at, "--json")
    assert ended.code == 0
    assert ended.data["still_held"] == 0
    assert ended.data["posted_pusd"] == service.bill.total_pusd
    assert ended.data["key_usage"]["is_explained"]


def test_settings_of_the_environment(service: ThreadedSimulator) -> None:
    """`QUANTROUTE_*` stands for an option; the option itself wins."""
    there = {"QUANTROUTE_BASE_URL": service.base_url}
    assert quantroute("endpoints", MODEL, env=there).code == 0
    elsewhere = {"QUANTROUTE_BASE_URL": "http://127.0.0.1:9/api/v1"}
    assert quantroute("endpoints", MODEL, "--base-url", service.base_url, env=elsewhere).code == 0
    ended = quantroute("endpoints", MODEL, env={**there, "QUANTROUTE_CA_FILE": "none.pem"})
    assert ended.code == ExitCode.CONFIGURATION
    slow = quantroute("-v", "endpoints", MODEL, env={**there, "QUANTROUTE_UVLOOP": "false"})
    assert "loop=asyncio" in slow.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quantroute gen", {"generate"}),
        ("quantroute generate --stat", {"--statistical-reserve"}),
        ("quantroute generate --routing del", {"delegated"}),
    ],
)
def test_the_shell_completes_commands_options_and_values(line: str, expected: set[str]) -> None:
    """As bash asks for it after `quantroute --install-completion`."""
    words = line.split(" ")
    variables = {
        "_QUANTROUTE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    asked = CliRunner().invoke(app, [], env=variables, prog_name="quantroute")
    assert expected <= set(asked.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--help"], {}),
        (
            [],
            {
                "_QUANTROUTE_COMPLETE": "complete_bash",
                "COMP_WORDS": "quantroute gen",
                "COMP_CWORD": "1",
            },
        ),
    ],
    ids=["help", "completion"],
)
def test_help_and_completion_load_no_command(
    arguments: list[str], variables: dict[str, str]
) -> None:
    """A shell asks at each press of the tabulator, and waits."""
    code = (
        "import atexit, sys;"
        "unwanted = {'aiohttp', 'msgspec', 'numpy', 'orjson', 'scipy', 'structlog',"
        "  'torch', 'quantroute.client', 'quantroute.generation', 'quantroute.report',"
        "  'quantroute.simulator'};"
        "atexit.register(lambda: print('loaded', unwanted & set(sys.modules)));"
        "sys.argv = ['quantroute', *sys.argv[1:]];"
        "from quantroute.cli import main; main()"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "generate" in asked.stdout
    assert asked.stdout.endswith("loaded set()\n")


def test_the_simulator_tells_programs_where_it_is() -> None:
    process = start("simulate", "--json")
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1].strip() != "}":
            lines.append(process.stdout.readline())
        told = json.loads("".join(lines))
        assert quantroute("endpoints", MODEL, "--base-url", told["base_url"]).code == 0
    finally:
        process.terminate()
        process.communicate(timeout=10)
