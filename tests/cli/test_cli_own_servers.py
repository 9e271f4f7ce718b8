"""Commands with `[[local]]` servers: hours against dollars, and no key where none is needed."""

from __future__ import annotations

from pathlib import Path

from cli_support import quantroute, write_prompts
from local_server import LocalServer, running_beside
from plan_support import write_spec
from quantroute.cli._exit import ExitCode
from quantroute.simulator import DEFAULT_API_KEY, ThreadedSimulator, kimi_mission_scenario

SCENARIO = kimi_mission_scenario()


def described(folder: Path, server: LocalServer, *, policy: str = "") -> Path:
    write_prompts(folder / "prompts.jsonl", 30)
    datasets = (
        '[[dataset]]\nname = "d"\nprompts = "prompts.jsonl"\nmax_output_tokens = 512\n'
        f'[[local]]\nname = "box"\nbase_url = "{server.base_url}"\nmodel = "{server.model}"\n'
        f'quantization = "int4"\noutput_tokens_per_s = 500\n{policy}\n'
    )
    return write_spec(folder, datasets, run='deadline = "1h"')


def databases(folder: Path) -> list[Path]:
    return list(folder.rglob("*.sqlite"))


def test_a_plan_compares_own_servers_with_the_service(tmp_path: Path) -> None:
    with running_beside(LocalServer()) as server, ThreadedSimulator(SCENARIO) as simulator:
        path = described(tmp_path, server)
        asked = ("plan", path, "--base-url", simulator.base_url)
        told, printed = quantroute(*asked, "--json"), quantroute(*asked)
    assert told.code == 0, told.err
    own, hosted, both = told.data["ways"]
    assert (own["way"], own["cost_pusd"], own["own_speed"]) == ("all on own servers", 0, "declared")
    assert own["time_s"] == told.data["datasets"][0]["output_tokens"] / 500
    assert hosted["cost_pusd"] > both["cost_pusd"] > 0
    assert both["time_s"] < min(own["time_s"], hosted["time_s"])
    assert {way["in_time"] for way in told.data["ways"]} == {True}
    assert "all on own servers" in printed.out
    assert "in time" in printed.out


def test_own_servers_alone_need_no_key_of_the_service(tmp_path: Path) -> None:
    with running_beside(LocalServer()) as server, ThreadedSimulator(SCENARIO) as simulator:
        path = described(tmp_path, server, policy='[policy]\nonly = ["local"]')
        done = quantroute("generate", path, "--base-url", simulator.base_url, "--json")
        assert simulator.bill.total_pusd == 0
    assert done.code == 0, done.err
    assert len(server.bodies) == 30
    assert done.data["spent_pusd"] == 0


def test_with_hosted_endpoints_the_key_is_asked_for_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with running_beside(LocalServer()) as server, ThreadedSimulator(SCENARIO) as simulator:
        path = described(tmp_path, server)
        refused = quantroute("generate", path, "--base-url", simulator.base_url)
        assert refused.code == ExitCode.ACCOUNT, refused.err
        assert "OPENROUTER_API_KEY is not set" in refused.err
        assert not server.bodies
        assert databases(tmp_path) == []
        with_key = quantroute(
            "generate",
            path,
            "--base-url",
            simulator.base_url,
            "--json",
            env={"OPENROUTER_API_KEY": DEFAULT_API_KEY},
        )
    assert with_key.code == 0, with_key.err
    assert server.bodies
