"""Events as JSON lines: every name documented, none per answer, no key, a file that stays whole."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from cli_support import MODEL, ROOT, quantroute, write_prompts
from quantroute._log import get_logger
from quantroute.cli._log import EventFile, configure_logging
from quantroute.secrets import EnvKey
from quantroute.simulator import DEFAULT_API_KEY

PAGE = (ROOT / "docs/events.md").read_text()
SOURCES = sorted((ROOT / "src/quantroute").rglob("*.py"))
LEVELS = {"debug", "info", "warning", "error"}


#: Of no known shape, and spelled otherwise inside JSON.
ODD_KEY = 'an-odd"looking\\key-123456'


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@functools.cache
def spoken(path: Path) -> tuple[tuple[str, str, frozenset[str]], ...]:
    """Name, level and facts of each event that a module can tell."""
    text = path.read_text()
    return tuple(_spoken(path, text)) if re.search(r"\b_?log\.", text) else ()


def _spoken(path: Path, text: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("log", "_log")
            and node.func.attr in LEVELS
        ):
            assert isinstance(node.args[0], ast.Constant), (path, node.lineno)
            facts = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
            yield node.args[0].value, node.func.attr, facts


def documented() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| (.*?) \|", PAGE, flags=re.MULTILINE)
    return {name: (level, facts) for name, level, facts in rows}


def test_every_event_in_the_source_is_documented_and_no_other() -> None:
    told = {(name, level) for path in SOURCES for name, level, _ in spoken(path)}
    assert len(told) > 15
    assert told == {(name, level) for name, (level, _) in documented().items()}


def test_facts_are_documented() -> None:
    rows = documented()
    for path in SOURCES:
        for name, _, facts in spoken(path):
            described = set(re.findall(r"`(\w+)`", rows[name][1]))
            assert facts == described if facts else described, name  # none seen: `**facts`


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(
        f'name = "odd"\ntime_scale = 0.0\n[[models]]\nid = "{MODEL}"\n[[models.endpoints]]\n'
        'tag = "alpha/int4"\nquantization = "int4"\n'
        'pricing = { prompt = "0.00000045", completion = "0.0000022" }\nuptime_last_30m = 99.0\n'
        "[faults]\nupstream_502 = 0.3\nusage_missing = 0.2\nkey_echo_in_errors = 1.0\n"
    )
    return path


def test_a_run_tells_what_happened_and_nothing_per_answer(tmp_path: Path, scenario: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 60)
    arguments = ["generate", prompts, "--cap", "1", "--out", tmp_path / "run", "--json"]
    arguments += ["--simulate", "--scenario", scenario]
    first = quantroute(*arguments)
    assert first.code == 0, first.err
    file = tmp_path / "run/events.jsonl"
    events = events_of(file)
    names = Counter(item["event"] for item in events)
    assert names["run begins"] == names["run ends"] == 1
    assert names["attempt failed"] > 5
    assert names["key usage compared"] == 2
    settled = [item["amount_pusd"] for item in events if item["event"] == "charge settled"]
    assert len(settled) > 3
    assert first.data["held_charges"] == 0
    assert first.data["key_usage"]["at_end"]["difference_pusd"] == 0
    assert sum(names.values()) < 60 + names["attempt failed"] + names["charge settled"]
    assert set(names) <= set(documented())
    for item in events:
        assert list(item)[:3] == ["at", "level", "event"]
        assert item["at"].endswith("Z")
    assert "sk-or-v1" not in file.read_text()
    assert first.data["key_usage"]["at_end"]["is_explained"]
    # A second start appends.
    quantroute(*arguments)
    assert events_of(file)[: len(events)] == events
    assert Counter(item["event"] for item in events_of(file))["run begins"] == 2


def test_another_file_can_be_named(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    file = tmp_path / "logs/mine.jsonl"
    arguments = ["generate", prompts, "--simulate", "--cap", "1", "--out", tmp_path / "run"]
    assert quantroute(*arguments, "--log-json", file).code == 0
    assert "run ends" in {item["event"] for item in events_of(file)}
    assert not (tmp_path / "run/events.jsonl").exists()
    ended = quantroute(*arguments, "--log-json", tmp_path)
    assert ended.code == 2


def test_the_key_is_cut_out_whoever_says_it(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", ODD_KEY)
    monkeypatch.setenv("OTHER", DEFAULT_API_KEY)
    configure_logging(verbose=True)
    from quantroute.cli._log import EVENTS

    log = get_logger("quantroute.test")
    log.info("before", problem=ODD_KEY)
    with EVENTS.written_to(tmp_path / "e.jsonl", key=EnvKey("OTHER")):
        log.warning("during", problem=f"Bearer {DEFAULT_API_KEY}", nested=[DEFAULT_API_KEY])
    log.info("after")
    text = (tmp_path / "e.jsonl").read_text()
    assert [item["event"] for item in events_of(tmp_path / "e.jsonl")] == ["before", "during"]
    assert events_of(tmp_path / "e.jsonl")[0]["problem"] == "[redacted]"
    shown = capsys.readouterr().err
    assert "during" in shown
    for secret in (ODD_KEY, DEFAULT_API_KEY):
        assert secret not in text
        assert ODD_KEY not in shown


@pytest.mark.parametrize(("verbose", "shown"), [(False, "b"), (True, "ab")])
def test_people_see_warnings_and_the_file_sees_all(
    verbose: bool, shown: str, capsys: Any, tmp_path: Path
) -> None:
    configure_logging(verbose=verbose)
    log = get_logger("quantroute.test")
    log.debug("nothing")
    log.info("event-a")
    log.warning("event-b")
    text = capsys.readouterr().err
    assert [name for name in "ab" if f"event-{name}" in text] == list(shown)


def test_a_full_disk_ends_the_writing_and_not_the_run(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    events = EventFile()
    with events.written_to(full, key=EnvKey()):
        assert events.keep(None, "info", {"event": "x"}) == {"event": "x"}
        assert events.keep(None, "info", {"event": "y"}) == {"event": "y"}


@pytest.fixture(autouse=True)
def _structlog_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
