"""The live page: this machine alone, the latest state, one script that nobody else can use."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from browser_support import needs_browser, opened_tab
from cli_support import start
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.report import ReportServer, RunWatcher
from sqlite_support import database


def watcher_of(folder: Path) -> RunWatcher:
    return RunWatcher(folder, [folder / "run.sqlite"], folder.name)


async def test_it_serves_the_page_and_what_it_shows(run_folder: Path) -> None:
    async with (
        ReportServer(watcher_of(run_folder), port=0) as server,
        aiohttp.ClientSession() as web,
    ):
        pages = []
        for _ in range(2):
            async with web.get(server.url) as answer:
                assert answer.status == 200
                assert answer.headers["Cache-Control"] == "no-store"
                pages.append(await answer.text())
        nonces = [re.findall(r"nonce-([\w-]+)", page) for page in pages]
        assert len(nonces[0]) == 1
        assert nonces[0] != nonces[1]
        assert all(page.count("<script") == 1 for page in pages)
        async with web.get(f"{server.url}data.json") as answer:
            told = await answer.json()
        assert told["html"] in pages[0]
        assert f'data-version="{told["version"]}"' in pages[0]
        assert told["again_ms"] >= 2_000


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8788", "127.0.0.1.evil.example"])
async def test_other_names_for_this_machine_are_refused(run_folder: Path, host: str) -> None:
    async with (
        ReportServer(watcher_of(run_folder), port=0) as server,
        aiohttp.ClientSession() as web,
    ):
        for path in ("", "data.json", "nowhere"):
            async with web.get(server.url + path, headers={"Host": host}) as answer:
                assert answer.status == 403
                assert "shown" not in await answer.text()
        async with web.get(server.url, headers={"Host": "localhost:1"}) as answer:
            assert answer.status == 200


async def test_a_run_that_vanishes_is_said_and_not_a_traceback(run_folder: Path) -> None:
    watcher = watcher_of(run_folder)
    async with ReportServer(watcher, port=0) as server, aiohttp.ClientSession() as web:
        server._due_s = 0.0  # look again at once
        (run_folder / "run.sqlite").write_bytes(b"gone" * 1_000)
        async with web.get(f"{server.url}data.json") as answer:
            assert answer.status == 503
            assert "run.sqlite" in await answer.text()


async def test_nothing_to_show_is_an_error_before_anything_listens(tmp_path: Path) -> None:
    from quantroute.ledger import BudgetLedger

    async with BudgetLedger.open(tmp_path / "run.sqlite", cap="1.00"):
        pass
    with pytest.raises(DatasetError, match="no run"):
        await ReportServer(watcher_of(tmp_path), port=0).__aenter__()


async def test_a_port_that_is_taken_is_said(run_folder: Path) -> None:
    async with ReportServer(watcher_of(run_folder), port=0) as server:
        with pytest.raises(ConfigurationError, match="name another port"):
            await ReportServer(watcher_of(run_folder), port=server.port).__aenter__()


def test_the_command_ends_with_ctrl_c(run_folder: Path) -> None:
    process = start("report", run_folder, "--live", "--port", 0)
    assert process.stdout is not None
    assert re.match(r"the page is at http://127\.0\.0\.1:\d+/;", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


@needs_browser
@pytest.mark.browser
async def test_the_page_follows_the_run(run_folder: Path, tmp_path: Path) -> None:
    watcher = watcher_of(run_folder)
    async with (
        ReportServer(watcher, port=0) as server,
        opened_tab(tmp_path / "profile") as tab,
    ):
        await tab.visit(server.url)
        await tab.evaluate("document.querySelector('details').open = true")
        with database(run_folder / "run.sqlite") as store:
            store.execute("UPDATE accounts SET posted_pusd = 654321000000 WHERE path = ''")
            store.execute("INSERT INTO journal (at_s, kind) VALUES (0, 'noted')")
        server._due_s = 0.0
        async with asyncio.timeout(20):
            shows = (
                "new Promise(done => { const look = () => document.body.innerText.includes("
                "'$0.6543') ? done(true) : setTimeout(look, 50); look(); })"
            )
            assert await tab.evaluate(shows)
        assert await tab.evaluate("document.querySelector('details').open")
        assert tab.complaints == []
        assert all(url.startswith((server.url, "data:")) for url in tab.requests)
