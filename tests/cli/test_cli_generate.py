"""`quantroute generate`: the main job, its cap, its resume, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_support import DATA, MODEL, quantroute, write_prompts
from quantroute.simulator import DEFAULT_API_KEY, Faults, ThreadedSimulator, kimi_mission_scenario

TO_SERVICE = ("--cap", "1", "--out", "run")


def stored(run: str = "run") -> list[dict[str, Any]]:
    """The rows of a run, exported."""
    assert quantroute("export", run, f"{run}.jsonl", "--overwrite").code == 0
    return [json.loads(line) for line in Path(f"{run}.jsonl").read_text().splitlines()]


def test_the_main_job_without_a_key_or_a_network() -> None:
    ended = quantroute("generate", "--simulate", "--cap", "1.00", "--out", "run")
    assert ended.code == 0
    assert "rows of builtin: 80 good" in ended.out
    assert "bill agrees to the last digit: $" in ended.out
    assert ended.out.rstrip().endswith("done; next: quantroute export run rows.jsonl")
    assert "80/80 rows" in ended.err
    rows = stored()
    assert len(rows) == len({row["key"] for row in rows}) == 80
    endpoints = {turn["endpoint"] for row in rows for turn in row["turns"]}
    assert not any(name.startswith(("fireworks", "baseten")) for name in endpoints)


def test_a_cap_that_bites_stops_with_3_and_a_higher_one_finishes() -> None:
    command = ("generate", "--simulate", "--out", "run", "--json")
    spent = []
    for cap in ("0.05", "0.10"):
        ended = quantroute(*command, "--cap", cap)
        assert ended.code == ended.data["exit_code"] == 3
        assert "raise the cap" in ended.data["error"]
        assert ended.data["spent_by_this_start_pusd"] == ended.data["simulator_bill_pusd"] > 0
        spent.append(ended.data["spent_pusd"])
        assert spent[-1] <= int(float(cap) * 100) * 10**10
    last = quantroute(*command, "--cap", "1.00")
    assert last.code == 0
    assert last.data["spent_pusd"] > spent[1] > spent[0]
    rows = stored()
    assert len(rows) == len({row["key"] for row in rows}) == 80


def test_the_cap_is_kept_from_last_time_and_nothing_is_asked_twice() -> None:
    write_prompts(Path("p.jsonl"), 3)
    assert quantroute("generate", "p.jsonl", "--simulate", "--cap", "1", "--out", "run").code == 0
    again = quantroute("generate", "p.jsonl", "--simulate", "--out", "run")
    assert again.code == 0
    assert "cap $1.000000" in again.out
    assert "3 rows were done before and not asked again" in again.out
    assert "bill" not in again.out


def test_a_new_prompt_file_extends_the_run() -> None:
    write_prompts(Path("b3.jsonl"), 2)
    Path("b4.txt").write_text("One question?\nAnother one?\n")
    assert quantroute("generate", "b3.jsonl", "--simulate", *TO_SERVICE).code == 0
    ended = quantroute("generate", "b3.jsonl", "b4.txt", "--simulate", *TO_SERVICE)
    assert ended.code == 0
    assert "run/b3" in ended.out
    assert "run/b4" in ended.out
    assert len(stored()) == 4


def test_repeated_prompts_are_asked_once_and_counted() -> None:
    Path("p.txt").write_text("Same?\nSame?\nOther?\n")
    ended = quantroute("generate", "p.txt", "--simulate", *TO_SERVICE)
    assert ended.code == 0
    assert "1 prompts repeat others" in ended.out
    assert "3/3 rows" in ended.err


def test_truncated_rows_are_named_and_can_be_had_again_alone() -> None:
    write_prompts(Path("p.jsonl"), 4)
    short = quantroute(
        "generate", "p.jsonl", "--simulate", *TO_SERVICE, "--max-output-tokens", "10"
    )
    assert "--redo truncated" in short.out
    nothing = quantroute("export", "run", "none.jsonl")
    assert nothing.code == 0
    assert "choose others with --class" in nothing.out
    longer = quantroute(
        "generate", "p.jsonl", "--simulate", *TO_SERVICE, "--redo", "truncated",
        "--max-output-tokens", "4096",
    )  # fmt: skip
    assert longer.code == 0
    assert "rows of p: 4 good" in longer.out


@pytest.mark.parametrize(
    "change",
    [
        ("--temperature", "0.5"),
        ("--accept", "fp8"),
        ("--max-output-tokens", "9"),
        ("--thinking",),
    ],
)
def test_other_settings_are_refused_not_mixed(change: tuple[str, ...]) -> None:
    write_prompts(Path("p.jsonl"), 1)
    assert quantroute("generate", "p.jsonl", "--simulate", *TO_SERVICE).code == 0
    ended = quantroute("generate", "p.jsonl", "--simulate", *TO_SERVICE, *change)
    assert ended.code == 2
    assert "was begun with other settings" in ended.err


def test_a_rehearsal_never_ends_in_a_real_run(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), 2)
    assert quantroute("generate", "p.jsonl", "--simulate", *TO_SERVICE).code == 0
    ended = quantroute("generate", "p.jsonl", "--base-url", service.base_url, *TO_SERVICE)
    assert ended.code == 2
    assert '"simulated:native"' in ended.err
    assert service.stats.requests == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--simulate"], 2, ["--cap", "5.00"]),
        (["--simulate", "--cap", "garbage"], 2, ["cap", "'garbage'"]),
        (["--simulate", "--cap", "-1"], 2, ["cap", "negative"]),
        (["--simulate", "--cap", "nan"], 2, ["cap", "finite"]),
        (["--simulate", "--cap", "inf"], 2, ["cap", "finite"]),
        (["none.jsonl", "--simulate", "--cap", "1"], 2, ["none.jsonl", "No such file"]),
        (["empty.jsonl", "--simulate", "--cap", "1"], 2, ["empty.jsonl", "no prompt"]),
        (["bad.jsonl", "--simulate", "--cap", "1"], 2, ["bad.jsonl:2", "1 more lines"]),
        (["--simulate", "--cap", "1", "--model", "foo/bar"], 5, ["foo/bar"]),
        (["--simulate", "--cap", "1", "--exclude", "Firewrks"], 2, ["Fireworks?"]),
        (["--simulate", "--cap", "1", "--temperature", "9"], 2, ["temperature", "9"]),
        (["--simulate", "--cap", "1", "--rollouts", "0"], 2, ["--rollouts"]),
        (["--simulate", "--cap", "1", "--max-output-tokens", "0"], 2, ["--max-output-tokens"]),
        (["--simulate", "--cap", "1", "--max-in-flight", "0"], 2, ["--max-in-flight"]),
        (["--simulate", "--cap", "1", "--redo", "ugly"], 2, ["--redo 'ugly'", "truncated"]),
        (["--simulate", "--cap", "1", "--scenario", "no.toml"], 2, ["--scenario", "no.toml"]),
        (["--cap", "1", "--scenario", "bad.jsonl"], 2, ["--scenario", "--simulate"]),
        (["--cap", "1"], 6, ["OPENROUTER_API_KEY is not set"]),
    ],
)
def test_an_error_says_what_and_where_and_leaves_no_file(
    arguments: list[str], code: int, words: list[str]
) -> None:
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{broken\n{"prompt": "fine too"}\n[]\n')
    ended = quantroute("generate", *arguments, "--out", "run")
    assert ended.code == code
    for word in words:
        assert word in ended.err
    assert "Traceback" not in ended.err
    assert not Path("run").exists()


def test_a_cap_of_zero_sends_nothing() -> None:
    ended = quantroute("generate", "--simulate", "--cap", "0", "--out", "run", "--json")
    assert ended.code == 3
    assert ended.data["simulator_bill_pusd"] == 0
    assert ended.data["by_endpoint"] == []


def test_a_policy_that_leaves_nothing_is_5_with_the_reasons_once() -> None:
    ended = quantroute(
        "generate", "--simulate", "--cap", "1", "--max-output-price", "0.1", "--out", "run"
    )
    assert ended.code == 5
    assert "no eligible endpoint" in ended.err
    assert (ended.out + ended.err).count("  inceptron/int4: ") == 1
    assert not Path("run").exists()


def test_a_rejected_key_is_6(service: ThreadedSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-somebody-elses-0000")
    write_prompts(Path("p.jsonl"), 2)
    ended = quantroute("generate", "p.jsonl", "--base-url", service.base_url, *TO_SERVICE)
    assert ended.code == 6
    assert "does not accept the key in OPENROUTER_API_KEY" in ended.out
    assert "somebody-elses" not in ended.out + ended.err


@pytest.mark.parametrize("scenario", [kimi_mission_scenario(account={"credits_usd": "0.01"})])
def test_an_empty_account_is_6(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), 40)
    ended = quantroute(
        "generate", "p.jsonl", "--base-url", service.base_url, *TO_SERVICE, "--max-in-flight", "2"
    )
    assert ended.code == 6
    assert "stopped: " in ended.out


@pytest.mark.parametrize(
    "scenario", [kimi_mission_scenario(faults=Faults(key_echo=1.0, key_echo_in_errors=1.0))]
)
def test_the_key_is_nowhere_even_when_the_service_echoes_it(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), 3)
    ended = quantroute(
        "--verbose", "generate", "p.jsonl", "--base-url", service.base_url, *TO_SERVICE
    )
    everything = ended.out + ended.err
    for command in (("status", "run"), ("export", "run", "rows.jsonl", "--class", "good",
                                        "--class", "error")):  # fmt: skip
        shown = quantroute(*command)
        everything += shown.out + shown.err
    assert DEFAULT_API_KEY not in everything
    assert service.stats.requests >= 3
    for file in Path().rglob("*"):
        assert file.is_dir() or DEFAULT_API_KEY.encode() not in file.read_bytes(), file


@pytest.mark.skipif(not DATA.is_dir(), reason="the MT-bench questions (../shared/data) are absent")
def test_the_mt_bench_questions_run_as_they_are() -> None:
    file = DATA / "prompts/mt_bench_questions.jsonl"
    ended = quantroute("generate", file, "--simulate", "--cap", "1", "--out", "run", "--json")
    assert ended.code == 0
    assert sum(row["rows"] for row in ended.data["rows"]) == 80


def test_the_model_of_another_catalogue_is_not_assumed() -> None:
    Path("s.toml").write_text('name = "bare"\n')
    ended = quantroute("generate", "--simulate", "--scenario", "s.toml", "--cap", "1")
    assert ended.code == 5
    assert MODEL in ended.err


def test_a_statistical_reserve_needs_a_yes_to_its_worst_case() -> None:
    command = ("generate", "--simulate", "--cap", "0.05", "--out", "run", "--max-in-flight", "20")
    alone = quantroute(*command, "--statistical-reserve", "0.999")
    assert alone.code == 2
    assert "belong together" in alone.err
    timid = quantroute(*command, "--statistical-reserve", "0.999", "--accept-overrun-usd", "0.01")
    assert timid.code == 2
    assert "could be spent" in " ".join(timid.err.split())
    assert not Path("run").exists()
    part = quantroute(*command, "--statistical-reserve", "0.999", "--shard", "0/2")
    assert part.code == 2
    assert "leave out either" in " ".join(part.err.split())
    Path("run.toml").touch()
    file = quantroute("generate", "run.toml", "--statistical-reserve", "0.999")
    assert file.code == 2
    assert "instead of the run file" in " ".join(file.err.split())
    bold = quantroute(*command, "--statistical-reserve", "0.999", "--accept-overrun-usd", "1")
    assert bold.code == 3
    assert "is a target, not a hard cap" in " ".join(bold.out.split())


def test_cut_rows_of_a_run_file_come_with_the_dataset_and_the_way_out() -> None:
    text = """
        [run]
        model = "moonshotai/kimi-k2.5"
        cap_usd = "1.00"
        [[dataset]]
        name = "short"
        prompts = "p.jsonl"
        max_output_tokens = {limit}
        [[dataset]]
        name = "long"
        prompts = "p.jsonl"
        sampling = {{ temperature = 0.5 }}
        max_output_tokens = 4096
    """
    write_prompts(Path("p.jsonl"), 4)
    Path("run.toml").write_text(text.format(limit=8))
    first = quantroute("generate", "run.toml", "--simulate")
    assert "4 rows of short were cut at 8 tokens; have them again with" in first.out
    assert "rows of long were cut" not in first.out
    Path("run.toml").write_text(text.format(limit=4096))
    refused = quantroute("generate", "run.toml", "--simulate")
    assert refused.code == 2
    assert "--max-output-tokens of short was 8 and is 4096; use" in refused.err
    again = quantroute("generate", "run.toml", "--simulate", "--redo", "truncated")
    assert again.code == 0
    assert "rows of short: 4 good" in again.out
