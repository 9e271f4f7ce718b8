"""Fixtures for every folder."""

from __future__ import annotations

import pytest

from quantroute.simulator import DEFAULT_API_KEY


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """The simulator's key, in the environment."""
    monkeypatch.setenv("OPENROUTER_API_KEY", DEFAULT_API_KEY)
    return DEFAULT_API_KEY
