"""Manners in a notebook: a loop that runs already, cells one after the other, tables as HTML."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import json
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli_support import MODEL, ROOT
from quantroute import Client, Service
from quantroute.simulator import ThreadedSimulator


async def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell as notebooks do: in the loop that runs, `await` allowed at the top."""
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


async def test_cells_share_one_open_client(service: ThreadedSimulator) -> None:
    names: dict[str, Any] = {"URL": service.base_url, "MODEL": MODEL}
    await run_cell("from quantroute import Client, Service", names)
    await run_cell("client = Client(cap_usd='1.00', service=Service(base_url=URL))", names)
    await run_cell("await client.__aenter__()", names)
    await run_cell("table = (await client.verdicts(MODEL))._repr_html_()", names)
    await run_cell("one = await client.chat(MODEL, 'One?')", names)
    await run_cell(
        "import asyncio\n"
        "many = await asyncio.gather(*(client.chat(MODEL, f'{i}?') for i in range(5)))\n",
        names,
    )
    await run_cell("await client.aclose()", names)
    paid = sum(answer.cost_pusd for answer in (names["one"], *names["many"]))
    assert paid == service.bill.total_pusd


def test_two_runs_of_the_loop_one_after_the_other(service: ThreadedSimulator) -> None:
    """The same client serves a second loop, and so does a new one; nothing is left open."""
    client = Client(cap_usd="1.00", service=Service(base_url=service.base_url))

    async def ask(chosen: Client) -> str:
        async with chosen:
            return (await chosen.chat(MODEL, "Why?")).provenance.endpoint.tag

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = [asyncio.run(ask(client)), asyncio.run(ask(client))]
        asked.append(
            asyncio.run(ask(Client(cap_usd="1", service=Service(base_url=service.base_url))))
        )
        gc.collect()
    assert asked == ["inceptron/int4"] * 3


@pytest.fixture
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training has written."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"split": "validation", "cumulative": [0.8, 0.5]}\n')
    monkeypatch.setenv("DRAFTER_METRICS", str(path))
    monkeypatch.setenv("SIMULATOR_KEY", "")  # so that what the notebook sets is undone


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_metrics")
async def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell in order, in one loop; what a cell ends with can be shown."""
    names: dict[str, Any] = {}
    shown: list[str] = []
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "committed without outputs"
            source = "".join(cell["source"])
            await run_cell(source, names)
            last = source.rstrip().splitlines()[-1]
            value = names.get(last)
            if last.startswith(("bars(", "curve(")):
                value = eval(last, names)
            if hasattr(value, "_repr_html_"):
                shown.append(value._repr_html_())
    listing, verdicts, plan, by_endpoint, over_time, audit, _acceptance = shown
    assert listing.count("<tr") == verdicts.count("<tr") == 12
    assert all(name in plan for name in ("chat", "short"))
    assert all(line.endpoint in by_endpoint for line in names["statement"])
    assert "cap $0.50" in over_time
    assert "inceptron/int4" in audit
    assert "passes" in audit
    out = capsys.readouterr().out
    assert "done: 80 new rows, 0 old" in out
    assert "80 rows; left out: none" in out
    assert out.count("\r") > 3, "nothing to watch"


class _Cells(HTMLParser):
    """The texts of a table's cells, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


async def test_verdicts_show_as_a_table_with_every_reason(service: ThreadedSimulator) -> None:
    async with Client(cap_usd="1", service=Service(base_url=service.base_url)) as client:
        bound = await client.verdicts(MODEL)
    cells = _Cells()
    cells.feed(bound._repr_html_())
    assert cells.tags.count("tr") == 1 + 11
    assert cells.texts.count("yes") == 6
    for verdict in bound.verdicts:
        assert str(verdict.endpoint.key) in cells.texts
        for reason in verdict.reasons:
            assert any(reason.text in text for text in cells.texts)


async def test_a_forgotten_client_warns_by_name(service: ThreadedSimulator) -> None:
    client = Client(cap_usd="1", service=Service(base_url=service.base_url))
    await client.__aenter__()
    await client.chat(MODEL, "Why?")
    with pytest.warns(ResourceWarning, match="unclosed Client"):
        client.__del__()
    await client.aclose()
