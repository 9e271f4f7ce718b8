"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quantroute.simulator import Scenario, ThreadedSimulator, kimi_mission_scenario


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder of its own, without a key and without a service."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.delenv("QUANTROUTE_BASE_URL", raising=False)


@pytest.fixture
def scenario() -> Scenario:
    """What `service` offers; override it in a test module or with parametrize."""
    return kimi_mission_scenario()


@pytest.fixture
def service(scenario: Scenario, key: str) -> Iterator[ThreadedSimulator]:
    """A simulator beside the command, with its key in the environment."""
    with ThreadedSimulator(scenario) as simulator:
        assert simulator.api_key == key
        yield simulator
