"""`quantroute doctor`: each check fails for its own reason and says what to do next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_support import Ended, quantroute, write_prompts
from quantroute.cli import _checks
from quantroute.simulator import AccountSpec, Scenario, ThreadedSimulator, kimi_mission_scenario


def checks(ended: Ended) -> dict[str, Any]:
    """The findings by name."""
    return {item["name"]: item for item in ended.data["checks"]}


def doctor(*arguments: object, **variables: str) -> dict[str, Any]:
    """The findings of a call with `--json`."""
    return checks(quantroute("doctor", *arguments, "--json", env=variables))


def with_account(**account: Any) -> Scenario:
    """The embedded case, its key or account limited."""
    scenario = kimi_mission_scenario()
    return scenario.model_copy(update={"account": AccountSpec(**account)})


def test_a_rehearsal_needs_nothing() -> None:
    ended = quantroute("doctor", "--simulate")
    assert ended.code == 0
    assert "6 of 11 may serve" in ended.out
    assert "a run can begin" in ended.out
    assert list(Path().iterdir()) == []


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    found = doctor("--offline", "--max-in-flight", "100000000", "--out", "/proc/none")
    bad = [item for item in found.values() if item["status"] != "ok"]
    assert {item["name"] for item in bad} >= {"key", "descriptors", "out folder"}
    for item in bad:
        assert item["next_step"] or "raise the limit" in item["text"], item


def test_no_key_is_exit_code_6() -> None:
    ended = quantroute("doctor", "--offline", "--json")
    assert (ended.code, ended.data["exit_code"]) == (6, 6)
    assert "OPENROUTER_API_KEY" in checks(ended)["key"]["next_step"]


def test_a_key_of_another_company_is_noticed_and_not_shown() -> None:
    ended = quantroute("doctor", "--offline", "--json", env={"OPENROUTER_API_KEY": "sk-proj-abc"})
    assert checks(ended)["key"]["status"] == "warn"
    assert "sk-proj-abc" not in ended.out + ended.err


def test_a_key_the_service_rejects_is_exit_code_6(
    service: ThreadedSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-wrong")
    ended = quantroute("doctor", "--base-url", service.base_url, "--json")
    assert ended.code == 6
    assert "rejects the key" in checks(ended)["account"]["text"]


def test_nobody_there_is_exit_code_5(key: str) -> None:
    ended = quantroute("doctor", "--base-url", "http://127.0.0.1:9/api/v1", "--json")
    found = checks(ended)
    assert found["account"]["status"] == found["endpoints"]["status"] == "fail"
    assert key not in ended.out
    assert ended.code == 5


@pytest.mark.parametrize(
    ("scenario", "cap", "status", "words"),
    [
        (with_account(), "5", "warn", "no limit of its own"),
        (with_account(key_limit_usd="2.00"), "1.00", "ok", "$2.00 of $2.00 left"),
        (with_account(key_limit_usd="2.00"), "5.00", "warn", "the cap leaves $5.00"),
        (with_account(key_limit_usd="0"), "5.00", "fail", "every request will be refused"),
    ],
)
def test_the_keys_limit_is_compared_with_the_cap(
    service: ThreadedSimulator, cap: str, status: str, words: str
) -> None:
    found = doctor("--base-url", service.base_url, "--cap", cap)["key limit"]
    assert (found["status"], words in found["text"]) == (status, True), found


@pytest.mark.parametrize("scenario", [with_account(key_limit_usd="1.00")])
def test_what_the_run_has_spent_counts(service: ThreadedSimulator) -> None:
    at = ("--base-url", service.base_url)
    assert quantroute("generate", *at, "--cap", "1.00", "--out", "run").code == 0
    found = doctor(*at, "--cap", "1.00", "--out", "run")
    assert found["key limit"]["status"] == "ok"
    assert "goes on" in found["out folder"]["text"]


def test_a_run_file_is_checked_with_its_prompts() -> None:
    write_prompts(Path("p.jsonl"), 3)
    quantroute("init", "--prompts", "p.jsonl", "--cap", "1")
    assert doctor("run.toml", "--simulate")["prompts"]["text"].startswith("3 in 1 dataset")
    with Path("p.jsonl").open("a") as file:
        file.write("{}\n[]\n")
    broken = doctor("run.toml", "--simulate")["prompts"]
    assert broken["status"] == "fail"
    assert "p.jsonl:4" in broken["text"]
    assert "2 lines" in broken["next_step"]
    Path("run.toml").write_text("[run]\n")
    ended = quantroute("doctor", "run.toml", "--simulate")
    assert ended.code == 2
    assert "run file" in ended.out


def test_no_eligible_endpoint_is_exit_code_5() -> None:
    quantroute("init")
    text = Path("run.toml").read_text().replace('# native = "int4"', 'native = "bf16"')
    Path("run.toml").write_text(text)
    ended = quantroute("doctor", "run.toml", "--simulate", "--json")
    assert ended.code == 5
    assert "shows the reasons" in checks(ended)["endpoints"]["next_step"]


def test_names_that_match_nothing_and_models_nobody_lists() -> None:
    ended = quantroute("doctor", "--simulate", "--model", "none/such", "--json")
    assert ended.code == 5
    assert "none/such" in checks(ended)["endpoints"]["text"]


@pytest.mark.parametrize(
    ("variables", "name", "status", "words"),
    [
        ({"HTTPS_PROXY": "socks5://x:1"}, "route", "fail", "HTTPS_PROXY must be"),
        ({"HTTPS_PROXY": "http://me:secret@x:1"}, "route", "ok", "via HTTPS_PROXY"),
        ({"SSL_CERT_FILE": "none.pem"}, "certificates", "fail", "does not exist"),
        ({"REQUESTS_CA_BUNDLE": "a.pem"}, "certificates", "warn", "not read"),
    ],
)
def test_proxies_and_certificates(
    variables: dict[str, str], name: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("no_proxy", "https_proxy", "all_proxy", "ssl_cert_dir", "ssl_cert_file"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    found = doctor("--offline", **variables)[name]
    assert (found["status"], words in found["text"]) == (status, True), found
    assert "secret" not in found["text"]


@pytest.mark.parametrize(
    ("folder", "kind"), [("here", "ext4"), ("shared/runs", "nfs4"), ("a b", "fuse.sshfs")]
)
def test_the_filesystem_is_that_of_the_innermost_mount(
    folder: str, kind: str, tmp_path: Path
) -> None:
    listed = (("/", "ext4"), (f"{tmp_path}/shared", "nfs4"), (f"{tmp_path}/a\\040b", "fuse.sshfs"))
    mounts = tmp_path / "mounts"
    mounts.write_text("".join(f"device {point} {name} rw 0 0\n" for point, name in listed))
    assert _checks.filesystem_of(tmp_path / folder, mounts=mounts) == kind
    assert _checks.filesystem_of(tmp_path, mounts=tmp_path / "none") is None


@pytest.mark.parametrize(
    ("free_bytes", "status"), [(2**40, "ok"), (2**30, "warn"), (2**20, "fail")]
)
def test_disk_space(free_bytes: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(Path())._replace(free=free_bytes)
    monkeypatch.setattr(_checks.shutil, "disk_usage", lambda _: usage)
    assert doctor("--offline")["disk"]["status"] == status


def test_a_network_filesystem_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "filesystem_of", lambda _: "nfs4")
    assert "SQLite" in doctor("--offline")["filesystem"]["text"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_folder_without_rights(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert doctor("--offline", "--out", closed / "run")["out folder"]["status"] == "fail"


@pytest.mark.parametrize(
    ("installed", "status"), [({}, "ok"), ({"aiohttp": "3.9.5"}, "fail"), ({"rich": None}, "fail")]
)
def test_packages_that_are_too_old_or_missing(
    installed: dict[str, str | None], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really: Callable[[str], str | None] = _checks._installed
    monkeypatch.setattr(
        _checks,
        "_installed",
        lambda name: installed.get(name, None if name in installed else really(name)),
    )
    found = doctor("--offline")["packages"]
    assert found["status"] == status
    assert all(name in found["text"] for name in installed)


def test_extras_made_of_extras_are_followed() -> None:
    wanted = _checks._requirements(
        ["a>=1", "b>=2.5; extra == 'x'", "quantroute[x,y]; extra == 'all'", 'c; extra == "y"']
    )
    assert wanted[""] == [("a", "1")]
    assert wanted["all"] == [("b", "2.5"), ("c", "")]
