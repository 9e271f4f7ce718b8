"""Folders that were renamed, files that may not be written, names that need quotes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_support import Ended, quantroute, write_prompts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A rehearsal of three rows."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    folder = tmp_path / "runs" / "first"
    assert quantroute("generate", prompts, "--simulate", "--cap", "1", "--out", folder).code == 0
    return folder


@pytest.fixture
def sealed(run: Path) -> Iterator[Path]:
    """The same run in a folder that may only be read."""
    for file in run.iterdir():
        file.chmod(0o444)
    run.chmod(0o555)
    yield run
    run.chmod(0o755)


def ordinary_user(*arguments: object) -> Ended:
    """A command that file modes bind, even where the tests run as root."""
    command = [sys.executable, "-m", "quantroute", *map(str, arguments)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("file modes do not bind root, and there is no setpriv")
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", "--bounding-set", rights, "--inh-caps", rights, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def spent(folder: Path) -> object:
    return quantroute("status", folder, "--json").data["posted_pusd"]


@pytest.mark.parametrize("name", ["second", "über uns", "(1)", "-"])
def test_a_renamed_folder_holds_the_same_run(run: Path, name: str) -> None:
    """Nothing is bought again, and every command finds its rows."""
    before, renamed = spent(run), run.rename(run.with_name(name))
    again = quantroute("generate", "prompts.jsonl", "--simulate", "--cap", "1", "--out", renamed)
    assert again.code == 0
    assert "3 rows done before" in again.out
    assert spent(renamed) == before
    assert quantroute("export", renamed, "rows.jsonl").code == 0
    assert len(Path("rows.jsonl").read_text().splitlines()) == 3


def test_which_of_several_runs_is_not_guessed(run: Path) -> None:
    """A guess that is wrong buys everything again."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as writer:
        writer.execute("INSERT INTO generation_runs (name, created_at_s) VALUES ('other', 0)")
        writer.execute(
            "INSERT INTO generation_configs SELECT 2, config_hash, config, since_s "
            "FROM generation_configs"
        )
        writer.commit()
    renamed = run.rename(run.with_name("third"))
    for command in (("generate", "--simulate", "--cap", "1", "--out"), ("status",), ("report",)):
        ended = quantroute(*command, renamed)
        assert ended.code == 2
        assert "it holds several runs (first, other): name the folder as the one" in ended.err


def test_a_renamed_folder_of_a_run_file(tmp_path: Path) -> None:
    """The file may be told the new folder; a name of another run is refused."""
    write_prompts(tmp_path / "prompts.jsonl", 3)
    file = tmp_path / "my run.toml"
    assert quantroute("init", file, "--prompts", "prompts.jsonl", "--cap", "1").code == 0
    assert quantroute("generate", file, "--simulate").code == 0
    folder = tmp_path / "runs" / "my run-simulated"
    before = spent(folder)
    folder.rename(tmp_path / "runs" / "other-simulated")
    file.write_text(file.read_text().replace("runs/my run", "runs/other"))
    assert quantroute("generate", file, "--simulate").code == 0
    assert spent(tmp_path / "runs" / "other-simulated") == before


def test_another_name_for_a_run_that_was_begun_is_refused(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert quantroute("init", file, "--prompts", "prompts.jsonl", "--cap", "1").code == 0
    text = file.read_text().replace("runs/run", "runs/second")
    file.write_text(text.replace("[run]", '[run]\nname = "second"', 1))
    run.rename(run.with_name("second"))
    ended = quantroute("plan", file, "--simulate")
    assert ended.code == 2
    assert "second holds the run 'first'" in " ".join(ended.err.split())


def test_a_run_that_may_only_be_read_tells_all(sealed: Path) -> None:
    before = sorted(file.name for file in sealed.iterdir())
    status = ordinary_user("status", sealed, "--json")
    assert status.code == 0, status.err
    assert json.loads(status.out)["rows"]
    assert ordinary_user("export", sealed, "rows.jsonl").code == 0
    assert ordinary_user("report", sealed, "--out", "page.html").code == 0
    assert sorted(file.name for file in sealed.iterdir()) == before


def test_what_only_the_log_holds_is_read_too(run: Path, tmp_path: Path) -> None:
    """A killed run leaves its last transactions in the log; read-only, they must not be missing."""
    killed = tmp_path / "killed" / "first"
    killed.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as writer:
        writer.execute("UPDATE accounts SET cap_pusd = 7770000000000 WHERE path = ''")
        writer.commit()
        for name in ("run.sqlite", "run.sqlite-wal"):
            shutil.copyfile(run / name, killed / name)
    killed.chmod(0o555)
    try:
        assert ordinary_user("report", killed, "--out", "page.html").code == 0
        status = ordinary_user("status", killed)
    finally:
        killed.chmod(0o755)
    assert "cap $7.77" in status.out
    assert "$7.77" in Path("page.html").read_text()


@pytest.mark.parametrize(
    "command",
    [("report",), ("report", "--out", "{sealed}/page.html"), ("export", "{sealed}/r.jsonl")],
)
def test_a_file_that_cannot_be_written_is_named(sealed: Path, command: tuple[str, ...]) -> None:
    name, *rest = (part.format(sealed=sealed) for part in command)
    ended = ordinary_user(name, sealed, *rest)
    assert ended.code == 2
    assert "Permission denied; choose a place that you may read and write" in ended.err
    assert ".tmp" not in ended.err
    assert len(ended.err.splitlines()) == 1


def test_the_next_step_can_be_copied(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "run 1"
    ended = quantroute("generate", "--simulate", "--cap", "1", "--out", folder)
    (line,) = [line for line in ended.out.splitlines() if "next: " in line]
    words = shlex.split(line.partition("next: quantroute ")[2])
    assert words[:2] == ["export", str(folder)]


def test_a_run_file_with_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert quantroute("init", file).code == 0
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert quantroute("plan", file, "--simulate").code == 0


def test_prompts_in_place_of_a_run_file(run: Path) -> None:
    ended = quantroute("plan", "prompts.jsonl")
    assert ended.code == 2
    assert "`quantroute init --prompts FILE` writes one" in ended.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_standard_streams(tmp_path: Path, closed: str) -> None:
    """As a daemon starts it: no file and no socket gets the number of a terminal's."""
    command = [sys.executable, "-m", "quantroute", "generate", "--simulate", "--cap", "1"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, "--out", str(tmp_path / "run")]
    assert subprocess.run(shell, capture_output=True, check=False).returncode == 0
    assert quantroute("status", tmp_path / "run", "--json").data["rows"][0]["rows"] == 80


def test_names_that_the_output_cannot_spell(tmp_path: Path) -> None:
    """With an ASCII-only output they are printed by number; rows and files have them."""
    Path("über.jsonl").write_text(json.dumps({"prompt": "Größe?"}), encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [sys.executable, "-m", "quantroute", "generate", "über.jsonl", "--simulate"]
    done = subprocess.run(
        [*command, "--cap", "1", "--out", "größe"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert rb"gr\xf6\xdfe/\xfcber" in done.stdout
    assert quantroute("status", "größe", "--json").data["rows"][0]["dataset"] == "über"


def test_why_a_row_has_no_answer_is_told(tmp_path: Path) -> None:
    """At the end of the run and by `status`, in words and as JSON; a plan says it before."""
    Path("big.jsonl").write_text(json.dumps({"prompt": "word " * 400_000}))
    run = ("generate", "big.jsonl", "--simulate", "--cap", "5", "--out", "run")
    why = "fits no eligible endpoint; shorten it"
    assert why in quantroute(*run).out
    assert why in quantroute("status", "run").out
    (failure,) = quantroute("status", "run", "--json").data["failures"]
    assert (failure["state"], failure["rows"], failure["status"]) == ("refused", 1, 413)
    (again,) = quantroute(*run, "--retry-refused", "--json").data["failures"]
    assert again == failure
    assert quantroute("init", "run.toml", "--prompts", "big.jsonl").code == 0
    planned = quantroute("plan", "run.toml", "--simulate")
    assert planned.code == 5
    assert "inceptron/int4: has room for 262,144 tokens" in planned.err


@pytest.mark.parametrize("command", [("plan",), ("generate",), ("train",), ("pipeline", "run")])
def test_a_run_file_that_is_not_there(command: tuple[str, ...]) -> None:
    """What to do next, and no number of an error."""
    ended = quantroute(*command, "my run.toml")
    assert ended.code == 2
    assert "there is no such file; `quantroute init 'my run.toml'` writes one" in ended.err


def test_serve_asks_for_its_cap_as_an_option() -> None:
    ended = quantroute("serve", "--simulate")
    assert ended.code == 2
    assert "--cap is needed" in ended.err


def test_a_pipe_of_prompts_is_refused_and_hangs_nobody(tmp_path: Path) -> None:
    """As the shell makes it of `generate <(zcat prompts.gz)`."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_prompts(tmp_path / "prompts.jsonl", 3)
    assert quantroute("init", "run.toml", "--prompts", "prompts.jsonl").code == 0
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace("prompts.jsonl", "pipe.jsonl"))
    for command in (
        ("generate", "pipe.jsonl", "--simulate", "--cap", "1"),
        ("generate", file, "--simulate"),
        ("plan", file, "--simulate"),
        ("doctor", file, "--simulate"),
    ):
        ended = quantroute(*command)
        assert ended.code == 2
        assert "is a pipe or a device" in ended.err + ended.out


def test_a_plan_fits_forty_columns(tmp_path: Path) -> None:
    write_prompts(tmp_path / "questions.jsonl", 3)
    assert quantroute("init", "run.toml", "--prompts", "questions.jsonl").code == 0
    ended = quantroute("plan", "run.toml", "--simulate", env={"COLUMNS": "40"})
    assert "…" not in ended.out
    assert "questions" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 40


def test_completion_for_a_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").touch()
    (tmp_path / ".bashrc").chmod(0o400)
    tmp_path.chmod(0o555)
    try:
        ended = ordinary_user("--install-completion", "bash")
    finally:
        tmp_path.chmod(0o755)
    assert ended.code == 2
    assert "choose a place that you may read and write" in ended.err
    assert "Traceback" not in ended.err
