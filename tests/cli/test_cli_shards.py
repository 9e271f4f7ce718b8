"""One run by several workers: on one file, and on files of their own with a shared ledger."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from cli_support import Ended, finished, quantroute, start, write_prompts
from quantroute.simulator import ThreadedSimulator, kimi_mission_scenario
from redis_support import RedisServer

ROWS = 40


@pytest.fixture
def service(key: str) -> Any:
    with ThreadedSimulator(kimi_mission_scenario(time_scale=0.0), seed=3) as simulator:
        yield simulator


def generate(service: ThreadedSimulator, shard: str, *more: object, cap: str = "1") -> Ended:
    return quantroute(
        "generate", "p.jsonl", "--cap", cap, "--out", "run", "--base-url", service.base_url,
        "--shard", shard, "--max-output-tokens", 512, "--json", *more,
    )  # fmt: skip


def exported(*more: object) -> list[dict[str, Any]]:
    ended = quantroute("export", "run", "rows.jsonl", "--overwrite", *more)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]


def accepted(rows: list[dict[str, Any]]) -> set[str]:
    keys = [row["key"] for row in rows]
    assert keys == sorted(set(keys))  # one order, whoever did which part
    return set(keys)


ALL_CLASSES = ("--class", "good", "--class", "truncated")


def test_two_workers_on_one_file_make_one_run(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), ROWS)
    first, second = generate(service, "0/2"), generate(service, "1/2")
    assert (first.code, second.code) == (0, 0)
    assert first.data["finished"] + second.data["finished"] == ROWS
    assert min(first.data["finished"], second.data["finished"]) > 0
    assert len(accepted(exported(*ALL_CLASSES))) == ROWS
    status = quantroute("status", "run", "--verify", "--json").data
    assert status["posted_pusd"] == service.bill.total_pusd
    again = generate(service, "0/2")
    assert (again.data["finished"], again.data["resumed"]) == (0, first.data["finished"])


@pytest.mark.slow
def test_two_processes_at_once_share_one_file(service: ThreadedSimulator) -> None:
    write_prompts(Path("p.jsonl"), ROWS)
    workers = [
        start(
            "generate", "p.jsonl", "--cap", "1", "--out", "run", "--base-url", service.base_url,
            "--shard", f"{index}/2", "--json",
        )
        for index in range(2)
    ]  # fmt: skip
    ends = [finished(worker, timeout_s=40) for worker in workers]
    assert [end.code for end in ends] == [0, 0], ends
    assert sum(end.data["finished"] for end in ends) == ROWS
    status = quantroute("status", "run", "--verify", "--json").data
    assert status["posted_pusd"] == service.bill.total_pusd


@pytest.mark.redis
def test_workers_with_files_of_their_own_share_a_cap(
    service: ThreadedSimulator, redis: RedisServer
) -> None:
    write_prompts(Path("p.jsonl"), ROWS)
    ledger = ("--ledger", f"{redis.url}#{uuid.uuid4().hex}")
    ends = [generate(service, f"{index}/3", *ledger) for index in range(3)]
    assert [end.code for end in ends] == [0, 0, 0]
    assert sum(end.data["finished"] for end in ends) == ROWS
    assert sorted(path.name for path in Path("run").iterdir() if path.is_dir()) == [
        f"shard-{index:03d}-of-003" for index in range(3)
    ]
    assert len(accepted(exported(*ALL_CLASSES))) == ROWS
    for more in ((), ledger):
        status = quantroute("status", "run", "--verify", "--json", *more).data
        assert status["posted_pusd"] == service.bill.total_pusd
        assert sum(count["rows"] for count in status["rows"]) == ROWS
    assert quantroute("reconcile", "run", "--base-url", service.base_url, *ledger).code == 0


@pytest.mark.redis
def test_the_cap_is_of_all_workers_together(service: ThreadedSimulator, redis: RedisServer) -> None:
    write_prompts(Path("p.jsonl"), ROWS)
    ledger = ("--ledger", f"{redis.url}#{uuid.uuid4().hex}")
    ends = [generate(service, f"{index}/2", *ledger, cap="0.01") for index in range(2)]
    assert [end.code for end in ends] == [3, 3]
    billed = service.bill.total_pusd
    assert 0 < billed <= 10**10
    assert billed == quantroute("status", "run", "--json", *ledger).data["posted_pusd"]


@pytest.mark.redis
def test_a_row_in_two_shards_is_an_error_that_names_both(
    service: ThreadedSimulator, redis: RedisServer
) -> None:
    write_prompts(Path("p.jsonl"), 6)
    ledger = ("--ledger", f"{redis.url}#{uuid.uuid4().hex}")
    for index in range(2):
        assert generate(service, f"{index}/2", *ledger).code == 0
    shutil.rmtree("run/shard-001-of-002")
    shutil.copytree("run/shard-000-of-002", "run/shard-001-of-002")
    ended = quantroute("export", "run", "rows.jsonl", *ALL_CLASSES)
    assert ended.code == 2
    assert "shard-000-of-002" in ended.err
    assert "shard-001-of-002" in ended.err
    assert not Path("rows.jsonl").exists()


@pytest.mark.redis
def test_another_division_of_a_run_is_refused(
    service: ThreadedSimulator, redis: RedisServer
) -> None:
    write_prompts(Path("p.jsonl"), 6)
    ledger = ("--ledger", f"{redis.url}#{uuid.uuid4().hex}")
    assert generate(service, "0/2", *ledger).code == 0
    for shard, more in (("0/3", ledger), ("0/2", ())):
        ended = generate(service, shard, *more)
        assert ended.code == 2
        assert "another division" in ended.err


RUN_FILE = """
[run]
model = "moonshotai/kimi-k2.5"
cap_usd = "1.00"
name = "run"
out = "run"
{ledger}
[[dataset]]
name = "a"
prompts = "a.jsonl"
max_output_tokens = 2048
target_rows = 9
[[dataset]]
name = "b"
prompts = "b.jsonl"
max_output_tokens = 2048
"""


@pytest.mark.redis
@pytest.mark.parametrize("is_shared", [False, True])
def test_targets_are_divided_and_caps_are_global(
    service: ThreadedSimulator, redis: RedisServer, is_shared: bool
) -> None:
    """Each of two workers has its part of a target; the caps of datasets are set once."""
    for name in "ab":
        write_prompts(Path(f"{name}.jsonl"), 40 if name == "a" else 10)
    url = f"{redis.url}#{uuid.uuid4().hex}"
    Path("run.toml").write_text(RUN_FILE.format(ledger=f'ledger = "{url}"' if is_shared else ""))
    ends = [
        quantroute(
            "generate", "run.toml", "--shard", f"{i}/2", "--base-url", service.base_url, "--json"
        )
        for i in range(2)
    ]
    assert [end.code for end in ends] == [0, 0], ends
    parts = {item["dataset"]: item["accepted_rows"] for item in ends[0].data["datasets"]}
    other = {item["dataset"]: item["accepted_rows"] for item in ends[1].data["datasets"]}
    assert parts["a"] >= 5
    assert other["a"] >= 4
    caps = [{item["dataset"]: item["cap_pusd"] for item in end.data["datasets"]} for end in ends]
    assert caps[0] == caps[1]
    assert sum(caps[0].values()) <= 10**12


def test_workers_that_divide_one_file_differently_are_refused_while_others_work(
    service: ThreadedSimulator,
) -> None:
    from quantroute.storage import FileLock

    write_prompts(Path("p.jsonl"), 4)
    assert generate(service, "0/2").code == 0
    with FileLock(Path("run/run.sqlite.run-run.shard-001-of-002.lock")):
        assert generate(service, "0/2").code == 0
        ended = generate(service, "0/3")
        assert ended.code == 7
        assert "same number of shards" in ended.err


@pytest.mark.redis
def test_a_rehearsal_does_not_spend_from_that_of_another_run(key: str, redis: RedisServer) -> None:
    """The second one's cap is below what the first has made up."""
    write_prompts(Path("p.jsonl"), ROWS)
    runs = [f"{uuid.uuid4().hex}-{number}" for number in range(2)]
    first, second = (
        quantroute(
            "generate", "p.jsonl", "--cap", cap, "--out", run, "--simulate", "--json",
            "--shard", "0/1", "--ledger", redis.url, "--max-output-tokens", 256,
        )
        for run, cap in zip(runs, ("1", "0.01"), strict=True)
    )  # fmt: skip
    assert first.data["spent_by_this_start_pusd"] > 10**10
    assert 0 < second.data["spent_by_this_start_pusd"] <= 10**10
