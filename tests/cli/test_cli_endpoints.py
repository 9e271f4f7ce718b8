"""`quantroute endpoints`: the table, the JSON, snapshots, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import DATA, MODEL, quantroute
from quantroute.simulator import ThreadedSimulator


def test_the_table_gives_every_endpoint_and_every_reason() -> None:
    ended = quantroute("endpoints", MODEL, "--simulate")
    assert ended.code == 0
    assert "6 of 11 endpoints are eligible" in ended.out
    table, reasons = ended.out.split("left out:")
    assert table.count(" yes ") == 6
    assert table.count(" no ") == 5
    for name in ("novita", "fireworks", "phala", "venice", "baseten/fp4"):
        assert f"  {name}: " in reasons
    assert "is a re-quantization" in reasons


def test_advice_is_in_the_words_of_the_command_line() -> None:
    ended = quantroute("endpoints", MODEL, "--simulate")
    assert "--accept-unknown Novita" in ended.out
    assert "accept_unknown" not in ended.out
    followed = quantroute("endpoints", MODEL, "--simulate", "--accept-unknown", "Novita", "--json")
    assert "novita" in [row["endpoint"] for row in followed.data["endpoints"] if row["eligible"]]


def test_json_is_exact_and_nothing_else_is_on_stdout() -> None:
    rows = quantroute("endpoints", MODEL, "--simulate", "--json").data["endpoints"]
    assert len(rows) == 11
    venice = next(row for row in rows if row["endpoint"] == "venice")
    assert venice["usd_per_million"]["prompt"] == "0.532"
    assert not venice["eligible"]
    assert {reason["code"] for reason in venice["reasons"]} >= {"precision_unknown"}


def test_prices_stand_one_below_the_other() -> None:
    lines = quantroute("endpoints", MODEL, "--simulate").out.splitlines()
    rows = [line for line in lines if line.strip().startswith(("yes", "no "))]
    assert len(rows) == 11
    assert len({tuple(at for at, sign in enumerate(row) if sign == ".") for row in rows}) == 1


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_shipped_case_is_never_cut(columns: int) -> None:
    ended = quantroute("endpoints", MODEL, "--simulate", env={"COLUMNS": str(columns)})
    assert "…" not in ended.out
    assert "siliconflow/int4" in ended.out
    assert "nvfp4 (evidence)" in ended.out
    assert max(map(len, ended.out.split("left out:")[0].splitlines())) <= columns


def test_a_snapshot_is_saved_and_read_without_a_service(service: ThreadedSimulator) -> None:
    first = quantroute(
        "endpoints", MODEL, "--base-url", service.base_url, "--save-snapshot", "s.json", "--json"
    )
    service.close()
    again = quantroute("endpoints", MODEL, "--snapshot", "s.json", "--json")
    assert again.data["endpoints"] == first.data["endpoints"]
    assert again.code == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded catalogues (../shared/data) are absent")
def test_a_recorded_catalogue_is_read_offline() -> None:
    file = DATA / "openrouter/catalogue-2026-08-22.json.gz"
    ended = quantroute("endpoints", MODEL, "--snapshot", file, "--exclude", "moonshot-ai")
    assert ended.code in (0, 5)
    assert "STALE" in ended.out or "listed 2026-08" in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["moonshotai/kimi-k9", "--simulate"], 5, ["moonshotai/kimi-k9", "no model"]),
        ([MODEL, "--simulate", "--exclude", "Firework"], 2, ["--exclude 'Firework'", "Fireworks?"]),
        ([MODEL, "--simulate", "--exclude", "zzz"], 2, ["--exclude 'zzz'", "quantroute endpoints"]),
        ([MODEL, "--simulate", "--only", "Moonshoot"], 2, ["--only 'Moonshoot'", "Moonshot AI"]),
        ([MODEL, "--simulate", "--accept-unknown", "Novitaa"], 2, ["--accept-unknown 'Novitaa'"]),
        ([MODEL, "--simulate", "--accept", "bananas"], 2, ["'bananas'", "fp8"]),
        ([MODEL, "--simulate", "--max-output-price", "abc"], 2, ["--max-output-price", "'abc'"]),
        ([MODEL, "--evidence", "missing.toml"], 2, ["--evidence", "missing.toml"]),
        ([MODEL, "--snapshot", "missing.json"], 2, ["--snapshot", "missing.json"]),
        ([MODEL, "--ca-file", "missing.pem"], 2, ["--ca-file", "missing.pem"]),
        ([MODEL, "--base-url", "nonsense"], 2, ["--base-url", "http(s)"]),
    ],
)
def test_an_error_says_what_and_where(arguments: list[str], code: int, words: list[str]) -> None:
    ended = quantroute("endpoints", *arguments)
    assert ended.code == code
    assert not ended.out
    for word in words:
        assert word in ended.err


def test_no_eligible_endpoint_is_told_by_the_code_and_the_table() -> None:
    ended = quantroute("endpoints", MODEL, "--simulate", "--max-output-price", "0.10")
    assert ended.code == 5
    assert "0 of 11 endpoints are eligible" in ended.out
    assert "above your $0.10/M" in ended.out


def test_a_damaged_snapshot_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{")
    ended = quantroute("endpoints", MODEL, "--snapshot", "s.json")
    assert ended.code == 5
    assert "s.json" in ended.err


def test_a_scenario_of_ones_own_is_judged_and_an_empty_list_is_called_one() -> None:
    Path("nobody.toml").write_text('[[models]]\nid = "m/x"\n')
    at = ("m/x", "--native", "int4", "--simulate", "--scenario", "nobody.toml")
    assert quantroute("endpoints", *at).code == 5
    ended = quantroute("generate", "--model", *at, "--cap", "1", "--out", "run")
    assert ended.code == 5
    assert "nobody serves it; try again later" in ended.err
    assert quantroute("endpoints", "m/x", "--scenario", "nobody.toml").code == 2
