"""Lists in the documents against what they list: rooms, variables, fields of files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from quantroute.cli._audit import AuditTable
from quantroute.client._classify import Kind
from quantroute.drafter._spec import _TrainTable
from quantroute.extraction._spec import _ExtractTable
from quantroute.extraction._tokens_report import RefusalReason
from quantroute.generation._rowdata import TURN_FIELDS
from quantroute.pipeline._spec import DataTable, DeployTable, EvaluateTable
from quantroute.proxy._reply import _STATUS
from quantroute.simulator._scenario import (
    AccountSpec,
    AnswerSpec,
    EndpointChange,
    EndpointSpec,
    Event,
    ModelSpec,
    ProviderSpec,
    Scenario,
    TrafficSpec,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/quantroute"
STAGES = {
    "extraction.md": (_ExtractTable,),
    "pipeline.md": (DataTable, EvaluateTable, DeployTable),
    "training.md": (_TrainTable,),
    "audit.md": (AuditTable,),
}
#: First cell of a row of docs/files.md, and the forms whose fields stand in that row.
SCENARIO = {
    "top of the file": Scenario,
    "`[[providers]]`": ProviderSpec,
    "`[[models]]`": ModelSpec,
    "`[[models.endpoints]]`": EndpointSpec,
    "`[account]`": AccountSpec,
    "`[traffic]`, `[provider_traffic.SLUG]`": TrafficSpec,
    "`[answers]`": AnswerSpec,
    "`[[events]]`": Event,
    "`endpoints`": EndpointChange,
}
#: Set for a program that is started here, or for this process by itself; no setting of a user.
OUR_OWN = {"QUANTROUTE_SIMULATOR_KEY", "HF_HUB_DISABLE_PROGRESS_BARS"}


def house() -> list[str]:
    """The rooms as the page about the design draws them, from the top."""
    page = (ROOT / "docs/design/README.md").read_text()
    drawn = re.search(r"^```\n(cli/ .*?)^```", page, re.DOTALL | re.MULTILINE)
    assert drawn is not None
    return re.findall(r"^(\w+)/? ", drawn[1], re.MULTILINE)


def test_the_house_has_every_room() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    assert set(house()) == rooms - {"__init__", "__main__", "__pycache__", "_version"}


def test_the_rooms_stand_in_the_order_of_imports() -> None:
    (layers, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    level = {
        room: number
        for number, layer in enumerate(layers["layers"])
        for room in re.findall(r"quantroute\.(\w+)", layer)
    }
    drawn = [room for room in house() if room not in ("simulator", "testing", "data")]
    assert set(drawn) == set(level)
    assert [level[room] for room in drawn] == sorted(level.values())


def test_the_way_of_a_request_names_every_outcome() -> None:
    page = " ".join((ROOT / "docs/design/README.md").read_text().split())
    assert f"one Kind ({', '.join(kind.value for kind in Kind)})" in page


def test_the_page_about_the_proxy_names_every_error() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    told = dict(re.findall(r"\| (?:4\d\d-)?(\d+) \| `(\w+)` \|$", page, re.MULTILINE))
    assert {"502", "499"} <= set(told)  # whatever is not in the table, and what a service refused
    for _, status, code in _STATUS:
        assert re.search(rf"\| ({status}|{status}-499) \| `{code}` \|$", page, re.MULTILINE), code


def test_the_page_about_the_environment_names_every_variable() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    pattern = re.compile(r"\"((?:OPENROUTER_API|QUANTROUTE|SLURM|JOB|HF|RAY)_[A-Z_]+)\"")
    found = {name for path in SOURCE.rglob("*.py") for name in pattern.findall(path.read_text())}
    assert {"OPENROUTER_API_KEY", "QUANTROUTE_UVLOOP", "JOB_COMPLETIONS"} <= found
    assert sorted(name for name in found - OUR_OWN if f"`{name}`" not in page) == []


def test_the_page_about_files_names_every_field_of_an_answer() -> None:
    _, _, text = (ROOT / "docs/files.md").read_text().partition("\nOf each answer:\n")
    cells = re.findall(r"^\| (`[^|]*) \|", text.partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(TURN_FIELDS)


def test_the_page_about_tokens_names_every_reason_to_refuse() -> None:
    page = (ROOT / "docs/extraction-tokens.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert named == [reason.value for reason in RefusalReason]


@pytest.mark.parametrize("name", STAGES)
def test_the_page_of_a_stage_names_every_field(name: str) -> None:
    """In its text, or at the beginning of a line of an example."""
    page = (ROOT / "docs" / name).read_text()
    missing = [
        field
        for form in STAGES[name]
        for field in form.model_fields
        if f"`{field}`" not in page and not re.search(rf"^{field} = ", page, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("place", SCENARIO)
def test_the_page_about_files_names_every_field_of_a_scenario(place: str) -> None:
    (row,) = re.findall(
        rf"^\| {re.escape(place)} \| (.*) \|$", (ROOT / "docs/files.md").read_text(), re.MULTILINE
    )
    form: type[BaseModel] = SCENARIO[place]
    named = re.findall(r"`(?:\{ )?(\w+)[` ]", row)
    assert sorted(set(form.model_fields) - set(named)) == []
