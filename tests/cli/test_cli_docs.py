"""What the documents and the help texts say is true: commands run, codes agree, options exist."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cli_support import ROOT, code_blocks, quantroute
from quantroute.cli._app import app
from quantroute.cli._commands import COMMANDS, load
from quantroute.cli._exit import ExitCode
from quantroute.generation import RowClass
from quantroute.simulator import DEFAULT_API_KEY, Faults, ThreadedSimulator
from quantroute.simulator._scenario import Change

README = ROOT / "README.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
]
#: Ray's example needs a cluster and a Redis; tests/jobs/test_ray_generation.py runs it.
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples/generate_on_ray.py"})

#: Commands that no test of the documents runs, and why. Each has tests of its own.
NOT_RUN = {
    "simulate": "serves until it is interrupted",
    "serve": "serves until it is interrupted",
    "extract": "needs a target's weights",
    "convert": "needs extracted states",
    "train": "needs a trainer",
    "export-drafter": "needs a trained drafter",
    "audit": "needs a target's weights",
    "demo": "trains; minutes",
    "pipeline": "trains; minutes",
    "ledger": "needs a shared server",
    "worker": "needs a shared server",
    "--install-completion": "changes the reader's shell",
}
#: Programs of other people, and of the shell that a test already is in.
NOT_OURS = {
    "python": "another program",
    "python3": "makes an environment; the whole set-up is run by CI",
    "pip": "installs; the whole set-up is run by CI",
    "pytest": "these tests",
    ".": "an environment that the tests have",
    "make": "runs these tests, or builds the site: CI does both",
    "pre-commit": "needs a repository",
    "git": "needs a repository",
    "docker": "another program",
    "redis-server": "another program",
    "valkey-server": "another program",
    "vllm": "another program",
    "twine": "part of a release",
    "rm": "part of a release",
    "uv": "makes an environment",
}
#: Commands that ask the service, and so a simulator in its place.
ASKING = {"generate", "endpoints", "reconcile", "plan", "doctor"}
PAGES_WITH_CONSOLE = [page for page in PAGES if code_blocks(page, "console")]


def console_lines(page: Path) -> Iterator[tuple[str, int]]:
    """Each command of a page with the exit code that a comment announces, 0 without one."""
    for block in code_blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                announced = re.search(r"# exit code (\d+)", line)
                yield line, int(announced[1]) if announced else 0


def run_line(line: str, code: int, service: ThreadedSimulator) -> None:
    """Run one line as a reader would; what asks the service asks the simulator."""
    words = shlex.split(line, comments=True)
    program, arguments = Path(words[0]).name or words[0], words[1:]
    if program == "export":  # a key and a base URL; those of the test stand already
        return
    if program == "echo":
        subprocess.run(line, shell=True, check=True)
        return
    if program in NOT_OURS:
        return
    assert program == "quantroute", f"{line}: neither run nor in NOT_OURS"
    if arguments[0] in NOT_RUN:
        return
    if arguments[0] in ASKING and "--simulate" not in arguments and "--snapshot" not in arguments:
        arguments = [item for item in arguments if not item.startswith("http://")]
        arguments = [item for item in arguments if item != "--base-url"]
        arguments += ["--base-url", service.base_url]
    ended = quantroute(*arguments)
    assert ended.code == code, (line, ended.out, ended.err)


@pytest.mark.timeout(300)  # a page may have a dozen runs
@pytest.mark.parametrize("page", PAGES_WITH_CONSOLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_one_after_the_other(
    page: Path, service: ThreadedSimulator
) -> None:
    """Rehearsals as they stand; the others against a simulator in the service's place."""
    Path("my-prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    Path("examples").mkdir()
    shutil.copy(ROOT / "examples/run.toml", "examples/run.toml")
    for line, code in console_lines(page):
        run_line(line, code, service)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documents_show_every_command(name: str) -> None:
    assert any(f"quantroute {name}" in page.read_text() for page in PAGES)


def test_the_readme_names_the_key_of_the_simulator() -> None:
    assert f"export OPENROUTER_API_KEY={DEFAULT_API_KEY}" in README.read_text()


def test_the_exit_codes_of_the_readme_are_those_of_the_command() -> None:
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", README.read_text(), re.M)]
    assert documented == [code.value for code in ExitCode]
    for code in ExitCode:
        assert str(code.value) in (app.info.epilog or "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_documents_every_option(name: str) -> None:
    """Whole, as wide as a terminal is by default: nothing cut short, no table's name swallowed."""
    ended = quantroute(name, "--help", env={"COLUMNS": "80"})
    assert ended.code == 0
    assert "…" not in ended.out
    for paragraph in (load(name).help or "").replace("\b", "").split("\n\n"):
        if paragraph.strip().startswith("quantroute "):
            assert f"  {' '.join(paragraph.split())}\n" in ended.out  # to be copied in one piece
    for parameter in load(name).params:
        assert parameter.help, f"{name} {parameter.name} has no help"
        for table in re.findall(r"\[\w+\]", parameter.help):
            assert table in ended.out
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option in ended.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_begins_with(name: str) -> None:
    assert " ".join(load(name).help.partition("\n\n")[0].split()) == COMMANDS[name].summary


def test_help_lists_every_command_and_how_to_begin() -> None:
    ended = quantroute("--help", env={"COLUMNS": "200"})
    for name, place in COMMANDS.items():
        assert re.search(rf"^\W+{name} +{re.escape(place.summary)} *\W$", ended.out, re.MULTILINE)
    assert "quantroute generate --simulate --cap 1.00" in ended.out


def test_the_version_is_the_packages() -> None:
    import quantroute as package

    assert quantroute("--version").out.startswith(f"quantroute {package.__version__} (")


def test_the_files_of_the_documents_are_accepted_as_they_are() -> None:
    """A prompt file, a scenario and a table of evidence, copied from the page."""
    page = ROOT / "docs/files.md"
    (prompts,), (scenario, evidence) = code_blocks(page, "json"), code_blocks(page, "toml")
    scenario = scenario.replace("time_scale = 1.0", "time_scale = 0.0")
    for name, text in (("p.jsonl", prompts), ("s.toml", scenario), ("e.toml", evidence)):
        Path(name).write_text(text)
    ended = quantroute(
        "generate", "p.jsonl", "--simulate", "--scenario", "s.toml", "--cap", "1", "--out", "run",
        "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert sum(row["rows"] for row in ended.data["rows"]) == 4
    model = "moonshotai/kimi-k2.5"
    judged = quantroute("endpoints", model, "--simulate", "--evidence", "e.toml", "--json")
    (novita,) = [row for row in judged.data["endpoints"] if row["endpoint"] == "novita"]
    assert novita["eligible"]
    assert novita["precision"]["source"] == "evidence"


def python_blocks() -> list[Any]:
    """Every Python block of the documents, as test parameters."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(code_blocks(page, "python"))
    ]


@pytest.mark.parametrize("block", python_blocks())
@pytest.mark.usefixtures("_prepared")
async def test_python_blocks_run(
    block: str, service: ThreadedSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook's cell, with the simulator where the service would be.

    The blocks show what a reader types, so it is the default base URL that is exchanged.
    """
    monkeypatch.setattr("quantroute._http.Service.__init__.__kwdefaults__", {
        "base_url": service.base_url, "ca_file": None, "use_env_proxy": True,
    })  # fmt: skip
    code = compile(block, "<block>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, {})
    if inspect.iscoroutine(result):
        await result
    assert service.bill.total_pusd > 0 or "Client" not in block


@pytest.fixture
def _prepared(request: pytest.FixtureRequest) -> None:
    """What a page on extraction takes for granted: a target's tokenizer, and bought rows."""
    if "quantroute.extraction" not in request.getfixturevalue("block"):
        return
    pytest.importorskip("transformers", reason="needs the extra `extract`")
    from quantroute.extraction import write_kimi_style_tokenizer

    write_kimi_style_tokenizer("models/kimi-k2.5", ["Why is the sky blue?"] * 20)
    for name in ("b3.jsonl", "b4.parquet"):
        run = ("generate", "--simulate", "--cap", "1", "--out", "run")
        assert quantroute(*run).code == 0
        assert quantroute("export", "run", name).code == 0


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_without_a_key(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "out"])
    monkeypatch.setenv("SIMULATOR_KEY", "")  # so that what the script sets is undone
    runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    expected = {
        "endpoints_table": ["6 of 11 may serve", "'ignore': ['moonshotai'"],
        "one_question": ["by Inceptron (inceptron/int4)"],
        "many_rows": ["done: 80 new rows, 0 old", "80 rows in out/rows.jsonl"],
        "shared_budget": ["the cap of 'team/chat'"],
        "rehearse_faults": ["the books agree"],
        "plan_datasets": ["fits: True", "chat: ", "instant: ", "reached: True"],
        "catalogue_changes": ["inceptron", "monday: 6 of 11 may serve", "tuesday: 5 of 10"],
        "statistical_cap": ["none with a lowered limit", "never above the hard cap"],
        "proxy": ["answered by inceptron/int4", "refused with 402: budget_exceeded"],
    }
    for words in expected[script.stem]:
        assert words in shown
    assert len(script.read_text().splitlines()) < 60
    assert script.name in (script.parent / "README.md").read_text()


@pytest.mark.parametrize("model", [Faults, Change], ids=lambda model: model.__name__)
def test_the_page_about_files_names_whatever_a_scenario_can_do(model: type[BaseModel]) -> None:
    page = (ROOT / "docs/files.md").read_text()
    assert [name for name in model.model_fields if f"`{name}`" not in page] == []


def test_every_class_of_rows_is_described() -> None:
    page = (ROOT / "docs/how-to/resume.md").read_text()
    assert [item.value for item in RowClass if f"| `{item.value}` |" not in page] == []
