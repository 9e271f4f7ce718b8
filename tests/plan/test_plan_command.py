"""`quantroute plan` and `quantroute generate run.toml`, against the simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_support import Ended, quantroute
from plan_support import write_prompts, write_spec
from quantroute import Client, Service
from quantroute.generation import StopReason, load_run_spec, read_rows, run_datasets
from quantroute.money import PUSD_PER_USD, to_usd
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/run.toml"
MISSION = "\n".join(
    f'[[dataset]]\nname = "b{number}"\nprompts = "b{number}.jsonl"\nmax_output_tokens = 8192\n'
    "expected_output_tokens = 2000\ntarget_output_tokens = 10_000_000\n"
    for number in range(3, 9)
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)


def example(folder: Path, **changes: str) -> Path:
    path = folder / "run.toml"
    text = EXAMPLE.read_text()
    for old, new in changes.items():
        key = f"{old} = "
        assert text.count(key) >= 1
        head, tail = text.split(key, 1)
        text = f"{head}{key}{new}\n{tail.split(chr(10), 1)[1]}"
    path.write_text(text)
    return path


def plan(*arguments: object) -> Ended:
    return quantroute("plan", *arguments, "--simulate")


def dataset_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in data["datasets"] if item["dataset"] == name)


def test_the_missions_plan_says_what_matters_before_a_cent_is_spent(tmp_path: Path) -> None:
    """Exit code 3: 60M wanted, at least $132, and $100 affords some 6.8M of each."""
    for number in range(3, 9):
        prompts = [f"{number}: question {line}? " + "x" * 1_500 for line in range(80)]
        write_prompts(tmp_path / f"b{number}.jsonl", prompts)
    path = write_spec(tmp_path, MISSION.replace("8192", "8192\nrollouts = 80"), cap="100")
    path.write_text(path.read_text().replace("max_in_flight = 16", "max_in_flight = 2000"))
    ended = plan(path)
    assert ended.code == 3
    words = " ".join(ended.out.split())
    assert "60,000,000 output tokens cost at least $132.00" in words
    assert "at $2.20 per million" in words
    assert "tokens, about 6.8M each; a cap of $1" in words
    assert "2,000 are asked" in words
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    data = plan(path, "--json").data
    assert (data["floor_pusd"], data["fits"]) == (132 * PUSD_PER_USD, False)
    for item in data["datasets"]:
        assert item["share_pusd"] == pytest.approx(100 / 6 * PUSD_PER_USD)
        assert 6_500_000 < item["affordable_tokens"] < 7_100_000
        assert item["prompts_suffice"]
    assert not (tmp_path / "runs").exists()


def test_too_few_prompts_end_the_plan_and_the_run_with_the_same_code(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", [f"question {n}?" for n in range(5)])
    path = write_spec(
        tmp_path,
        '[[dataset]]\nname = "d"\nprompts = "p.jsonl"\nmax_output_tokens = 500\n'
        "expected_output_tokens = 100\ntarget_output_tokens = 100_000\n",
        cap="5",
    )
    ended = plan(path)
    assert ended.code == 4
    words = " ".join(ended.out.split())
    assert "add prompts, or set rollouts = " in words
    assert "the prompts do not give as many; what they give costs $0.0" in words
    assert "the cap of $5.00 suffices for that" in words
    data = plan(path, "--json").data
    assert (data["fits"], data["prompts_suffice"], data["exit_code"]) == (True, False, 4)
    assert quantroute("generate", path, "--simulate", "--json").code == 4


def test_a_plan_that_fits_exits_with_zero_and_names_assumptions(tmp_path: Path) -> None:
    ended = plan(example(tmp_path))
    assert ended.code == 0
    assert "suffices" in ended.out
    assert "assumed: 1,024 tokens an answer" in " ".join(ended.out.split())
    assert 'accept_unknown = ["Novita"]' in " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("tokens_target = 5", "dataset[1].tokens_target: unknown field"),
        ("target_rows = -5", "dataset[1].target_rows: "),
    ],
)
def test_a_mistake_in_a_run_file_is_told_in_its_own_words(
    tmp_path: Path, lines: str, problem: str
) -> None:
    prompts = '[[dataset]]\nname = "d"\nprompts = "builtin"\nmax_output_tokens = 500\n'
    ended = plan(write_spec(tmp_path, prompts + lines))
    assert ended.code == 2
    assert problem in ended.err
    assert "--" not in ended.err


def test_a_wrong_deadline_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[run]\nmodel = "m/x"\ncap_usd = "1"\ndeadline = "soon"\n'
        '[[dataset]]\nname = "d"\nprompts = "builtin"\nmax_output_tokens = 5\n'
    )
    ended = plan(path)
    assert ended.err.count("job.toml") == 1
    assert "job.toml:4: run.deadline: a deadline is a time like" in ended.err


def test_nobody_eligible_exits_with_five_and_the_reasons(tmp_path: Path) -> None:
    ended = plan(example(tmp_path, max_output_usd_per_million='"0.10"'))
    assert ended.code == 5
    assert "for chat: inceptron/int4" in ended.err


def test_duplicates_are_reported_before_anything_is_sent(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", ["one", "one", "two"])
    write_prompts(tmp_path / "b.jsonl", ["two", "three"])
    lines = '[[dataset]]\nname = "{0}"\nprompts = "{0}.jsonl"\nmax_output_tokens = 64'
    ended = plan(write_spec(tmp_path, lines.format("a") + "\n" + lines.format("b")))
    words = " ".join(ended.out.split())
    assert "a: 1 prompts repeat others of this dataset, 0 those of datasets before it" in words
    assert "b: 0 prompts repeat others of this dataset, 1 those of datasets before it" in words


def test_a_probe_is_part_of_the_run_and_makes_the_plan_sure(tmp_path: Path) -> None:
    path = example(tmp_path)
    probed = plan(path, "--probe", 20, "--json")
    assert (probed.code, probed.data["probe_rows"]) == (0, 20)
    chat = dataset_of(probed.data, "chat")
    assert chat["expectation"]["answers"] == 20  # ten conversations of two turns
    assert chat["expectation"]["low"] < chat["expectation"]["output_tokens"]
    assert 0.3 < chat["expectation"]["reasoning_share"] < 0.8
    assert dataset_of(probed.data, "instant")["expectation"]["reasoning_share"] == 0
    done = quantroute("generate", path, "--simulate", "--json")
    assert done.code == 0
    assert done.data["finished"] + 20 == sum(item["rows"] for item in done.data["rows"])
    for item in done.data["datasets"]:
        assert item["is_reached"]
    spent = sum(item["spent_pusd"] for item in done.data["datasets"])
    assert spent == done.data["spent_pusd"]
    after = plan(path, "--json").data
    assert after["spent_pusd"] == spent
    assert dataset_of(after, "chat")["needed_rows"] == 0


def test_the_rows_of_a_run_file_are_found_by_the_other_commands(tmp_path: Path) -> None:
    path = example(tmp_path, target_output_tokens="20_000")
    assert quantroute("generate", path, "--simulate").code == 0
    folder = tmp_path / "runs/k25-simulated"
    assert "instant" in quantroute("status", folder, "--verify").out
    assert quantroute("export", folder, tmp_path / "rows.jsonl").code == 0
    rows = list(read_rows(tmp_path / "rows.jsonl"))
    assert len({row["key"] for row in rows}) == len(rows)
    tokens = sum(t["output_tokens"] for r in rows if r["dataset"] == "chat" for t in r["turns"])
    assert 20_000 <= tokens <= 32_000


def test_a_cap_that_is_too_small_stops_with_three_and_a_higher_one_goes_on(tmp_path: Path) -> None:
    path = example(tmp_path, cap_usd='"0.05"')
    first = quantroute("generate", path, "--simulate", "--json")
    assert (first.code, first.data["stop_reason"]) == (3, "cap reached")
    assert first.data["spent_pusd"] <= 5 * 10**10
    second = quantroute("generate", example(tmp_path), "--simulate", "--json")
    assert (second.code, second.data["stop_reason"]) == (0, "done")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cap", "3"], "--cap: set that in run.toml instead"),
        (["--rollouts", "3", "--out", "x"], "--out, --rollouts: set that in run.toml instead"),
        (["more.jsonl"], "a run file stands alone"),
    ],
)
def test_a_run_file_stands_alone(tmp_path: Path, arguments: list[str], expected: str) -> None:
    example(tmp_path)
    ended = quantroute("generate", "run.toml", "--simulate", *arguments)
    assert ended.code == 2
    assert expected in ended.err


@pytest.mark.parametrize("arguments", [["--probe", "3"], ["--simulate"]])
def test_a_snapshot_answers_no_request(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "s.json").write_text("{}")
    ended = quantroute("plan", example(tmp_path), "--snapshot", "s.json", *arguments)
    assert (ended.code, "--snapshot" in ended.err) == (2, True)


def test_a_plan_from_a_snapshot_needs_no_network(tmp_path: Path) -> None:
    path = example(tmp_path)
    saved = quantroute(
        "endpoints", "moonshotai/kimi-k2.5", "--simulate", "--save-snapshot", "s.json"
    )
    assert saved.code == 0
    ended = quantroute("plan", path, "--snapshot", "s.json", "--json")
    assert ended.code == 0
    assert json.dumps(ended.data["datasets"]) == json.dumps(plan(path, "--json").data["datasets"])


def test_without_a_key_a_probe_makes_no_file(tmp_path: Path) -> None:
    ended = quantroute(
        "plan", example(tmp_path), "--probe", 3, "--base-url", "http://127.0.0.1:9/x"
    )
    assert ended.code in (5, 6)
    assert not (tmp_path / "runs").exists()


async def test_faults_and_a_tight_cap_lose_nothing_and_exceed_nothing(
    tmp_path: Path, key: str
) -> None:
    """Errors, odd answers and a cap that bites; in the end the books equal the bill."""
    shutil.copy(EXAMPLE, tmp_path / "run.toml")
    faults = Faults(upstream_429=0.1, error_in_200=0.05, length=0.1, usage_null=0.05)
    async with Simulator(kimi_mission_scenario(faults=faults), seed=5) as service:
        for cap_pusd in (10**11, 5 * 10**12):
            spec = load_run_spec(example(tmp_path, cap_usd=f'"{to_usd(cap_pusd):f}"'))
            async with Client(
                cap_usd=to_usd(cap_pusd),
                ledger=tmp_path / "run.sqlite",
                service=Service(base_url=service.base_url),
                policy=spec.policy,
                max_in_flight=32,
            ) as client:
                await client.note_baseline()
                report = await run_datasets(client, spec)
                await client.reconcile(quiet_s=0)
                await client.ledger.verify()
                balance = client.ledger.balance()
            assert balance.posted_pusd == service.bill.total_pusd <= cap_pusd
            if cap_pusd == 10**11:
                assert report.stop_reason is StopReason.CAP_REACHED
    assert report.stop_reason is StopReason.DONE
    chat, instant = report.datasets
    assert chat.is_reached
    assert chat.accepted_tokens >= 60_000
    assert instant.spent_pusd <= PUSD_PER_USD
