"""Fixtures for every folder."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator, Iterator

import pytest

from property_support import load_profile
from quantroute.simulator import DEFAULT_API_KEY
from redis_support import RedisServer, redis_server

load_profile()

# What a shell's script starts in the background ignores Ctrl+C, and so does what is started from
# there: commands that tests interrupt would run on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """`-n auto`: two more than processors, as many tests wait for a timer or a process.

    Slow ones compute.
    """
    workers = yield
    return workers + 2 if config.option.markexpr == "not slow" else workers


def pytest_collection_finish() -> None:
    """What is loaded by now stays: garbage collections during the tests need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_as_in_a_library() -> Iterator[None]:
    """A command configures structlog for its process; the next test here knows nothing of it."""
    yield
    if (structlog := sys.modules.get("structlog")) is not None:
        structlog.reset_defaults()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """The simulator's key, in the environment."""
    monkeypatch.setenv("OPENROUTER_API_KEY", DEFAULT_API_KEY)
    return DEFAULT_API_KEY


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for all tests that do not hurt it; each takes a ledger name of its own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
