"""A shared ledger's name, and a server of the test's own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from redis_support import RedisServer, redis_server


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder) as server:
        yield server
