"""The command's event loop: uvloop's if it is there, asyncio's if it is not or not wanted."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cli_support import quantroute
from quantroute.cli import _loop


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_where_it_is_installed_and_not_declined() -> None:
    pytest.importorskip("uvloop")
    _loop.choose(uvloop=True)
    assert _loop.run(loop_module()).startswith("uvloop")
    assert _loop.loop_name().startswith("uvloop ")
    _loop.choose(uvloop=False)
    assert _loop.run(loop_module()).startswith("asyncio")
    assert _loop.loop_name() == "asyncio"


def test_without_the_extra_the_command_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # an import that fails
    _loop.choose(uvloop=True)
    assert _loop.run(loop_module()).startswith("asyncio")
    assert "(asyncio)" in quantroute("--version").out


@pytest.mark.parametrize("declined", [False, True])
def test_verbose_says_which_loop_runs(declined: bool) -> None:
    options = ["--no-uvloop"] if declined else []
    ended = quantroute("-v", *options, "endpoints", "moonshotai/kimi-k2.5", "--simulate")
    assert ended.code == 0
    assert "event loop" in ended.err
    assert ("uvloop" in ended.err) is (_loop.loop_name() != "asyncio")
    if declined:
        assert "uvloop" not in ended.err
