"""`status`, `export` and `reconcile`: looking at a run that exists, or does not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from cli_support import quantroute, write_prompts
from quantroute.cli._output import print_reconciliation
from quantroute.client import Reconciliation
from quantroute.simulator import Faults, ThreadedSimulator, kimi_mission_scenario


@pytest.fixture
def run() -> str:
    """A finished rehearsal of two files of two prompts."""
    write_prompts(Path("b3.jsonl"), 2)
    Path("b4.txt").write_text("One question?\nAnother one?\n")
    ended = quantroute(
        "generate", "b3.jsonl", "b4.txt", "--simulate", "--cap", "1", "--out", "runs/demo"
    )
    assert ended.code == 0
    return "runs/demo"


def test_status_shows_ledger_balance_and_rows(run: str) -> None:
    ended = quantroute("status", run, "--verify")
    assert ended.code == 0
    for part in ("demo/b3", "demo/b4", "inceptron/int4", "total", "cap $1.000000"):
        assert part in ended.out
    assert "rows of b3: 2 good\nrows of b4: 2 good\n" in ended.out
    assert "replayed, agrees" in ended.out


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_ledger_is_never_cut(run: str, columns: int) -> None:
    ended = quantroute("status", run, env={"COLUMNS": str(columns)})
    assert "…" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= columns
    assert "inceptron/int4" in ended.out


def test_status_as_json_adds_up(run: str) -> None:
    facts = quantroute("status", run, "--json").data
    assert facts["posted_pusd"] == sum(line["posted_pusd"] for line in facts["by_endpoint"]) > 0
    assert {line["account"] for line in facts["by_endpoint"]} == {"demo/b3", "demo/b4"}
    assert sum(row["rows"] for row in facts["rows"]) == 4


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_export_writes_rows_and_a_manifest_that_fits_them(run: str, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    ended = quantroute("export", run, name, "--json")
    assert ended.code == 0
    assert ended.data["rows"] == 4
    manifest = json.loads(Path(ended.data["manifest"]).read_text())
    digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
    assert manifest["sha256"] == ended.data["sha256"] == digest
    assert manifest["rows"] == 4
    assert manifest["policy_class"] == "simulated:native"


def test_export_replaces_a_file_only_when_told(run: str) -> None:
    Path("rows.jsonl").write_text("precious")
    refused = quantroute("export", run, "rows.jsonl")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert Path("rows.jsonl").read_text() == "precious"
    assert quantroute("export", run, "rows.jsonl", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "runs/demo", "rows.csv"], ["rows.csv", ".parquet"]),
        (["export", "runs/demo", "r.jsonl", "--class", "ugly"], ["--class 'ugly'", "truncated"]),
        (["export", "runs/demo", "r.jsonl", "--class", "wrong-provider"], ["quarantined"]),
        (["export", "elsewhere", "r.jsonl"], ["elsewhere", "quantroute generate"]),
        (["status", "elsewhere"], ["elsewhere", "quantroute generate"]),
        (["reconcile", "elsewhere"], ["elsewhere", "quantroute generate"]),
    ],
)
def test_an_error_says_what_and_where(run: str, arguments: list[str], words: list[str]) -> None:
    ended = quantroute(*arguments)
    assert ended.code == 2
    assert not Path("r.jsonl").exists()
    for word in words:
        assert word in ended.err


def test_a_damaged_run_is_7(run: str) -> None:
    Path(run, "run.sqlite").write_bytes(b"this is no database at all" * 100)
    ended = quantroute("status", run)
    assert ended.code == 7
    assert "run.sqlite" in ended.err


def test_reconcile_needs_a_key(run: str) -> None:
    ended = quantroute("reconcile", run)
    assert ended.code == 6
    assert "OPENROUTER_API_KEY is not set" in ended.err


@pytest.mark.parametrize(("quiet_in_s", "when"), [(0.0, "again later"), (3_541.0, "in 60 min")])
def test_what_stays_unknown_comes_with_what_to_do(
    capsys: pytest.CaptureFixture[str], quiet_in_s: float, when: str
) -> None:
    print_reconciliation(Reconciliation(still_held=3, quiet_in_s=quiet_in_s))
    said = capsys.readouterr().out
    assert "3 still unknown" in said
    assert when in said
    assert "--charge-bound" in said


@pytest.mark.parametrize(
    "scenario",
    [kimi_mission_scenario(faults=Faults(reset=0.3), generation_delay_s=0.2)],
)
def test_lost_answers_are_settled_until_the_books_agree(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), 12)
    url = ("--base-url", service.base_url)
    quantroute("generate", "p.jsonl", *url, "--cap", "1", "--out", "run")
    done = quantroute("reconcile", "run", *url, "--quiet-s", "0")
    assert done.code == 0
    assert "0 still unknown" in done.out
    facts = quantroute("status", "run", "--json").data
    assert facts["held_entries"] == facts["pending_pusd"] == 0
    assert facts["posted_pusd"] == service.bill.total_pusd
