"""The audit of answers whose hidden states are stored: no forward pass of the claim."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from audit_target import make_target, served_rows
from cli_support import quantroute
from quantroute.audit import (
    AuditReport,
    AuditSettings,
    CauseKind,
    Outcome,
    Target,
    TargetHead,
    audit_rows_of,
    audit_states,
    score_rows,
    score_states,
)
from quantroute.audit._rows import example_row
from quantroute.errors import ConfigurationError
from quantroute.extraction import StateStore
from quantroute.extraction import Target as ExtractTarget

pytestmark = pytest.mark.timeout(180)  # torch alone takes long to import on a busy machine

CLASSES = ("good", "truncated", "loop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, rows of two endpoints, and their states."""
    folder = tmp_path_factory.mktemp("stored")
    target = Target.load(make_target(folder / "target"))
    rows = [
        *served_rows(target, "honest/int4", rollouts=32, seed=2),
        *served_rows(target, "cheap/int4", form="nvfp4", rollouts=32, seed=3),
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(
        "[extract]\ntarget = 'target'\nrows = 'rows.jsonl'\nout = 'states'\nlayers = [0, 1]\n"
        f"layer_convention = 'boundary'\ndevice = 'cpu'\nclasses = {list(CLASSES)}\n"
        "[audit]\nstates = 'states'\ntarget = 'target'\nformats = ['nvfp4', 'int8']\n"
        "fewest_tokens = 100\n"
    )
    ended = quantroute("extract", folder / "run.toml")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> StateStore:
    return StateStore.open(folder / "states")


@pytest.fixture(scope="module")
def head(folder: Path, store: StateStore) -> TargetHead:
    return TargetHead.read(folder / "target", store)


SETTINGS = AuditSettings(formats=("nvfp4", "int8"), fewest_tokens=100)


def outcomes(report: AuditReport) -> dict[str, Outcome]:
    return {item.endpoint: item.outcome for item in report.endpoints}


def test_stored_states_give_the_scores_of_a_forward_pass(
    folder: Path, store: StateStore, head: TargetHead
) -> None:
    target = Target.load(folder / "target")
    for number, states in zip(range(5), store, strict=False):
        row = example_row(states.example)
        (forward,) = score_rows(target.model, [row])
        stored = score_states(states, row, head)
        for name in ("surprise", "entropy", "varentropy", "above", "position", "heated_entropy"):
            assert getattr(stored, name) == pytest.approx(getattr(forward, name), abs=1e-3), number


def test_rows_and_states_hold_the_same_answers(folder: Path, store: StateStore) -> None:
    target = Target.load(folder / "target")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    intakes = audit_rows_of(rows, target.tokenizer)
    of_rows = {row.input_ids.tobytes() for item in intakes.values() for row in item.rows}
    assert {states.example.input_ids.tobytes() for states in store} == of_rows


def test_departures_are_seen_without_the_model(store: StateStore, head: TargetHead) -> None:
    report = audit_states(store, head, SETTINGS)
    assert outcomes(report) == {"cheap/int4": Outcome.FAILS, "honest/int4": Outcome.PASSES}
    assert report.model == "example/letters"
    assert not report.hypotheses
    assert any("stored states" in line for line in report.notes)


def test_the_model_is_asked_about_suspects_alone(
    folder: Path, store: StateStore, head: TargetHead
) -> None:
    asked = []

    def load() -> Target:
        asked.append(1)
        return Target.load(folder / "target")

    report = audit_states(store, head, SETTINGS, load=load)
    found = {item.endpoint: item.cause for item in report.endpoints}
    assert found["cheap/int4"].hypothesis.kind is CauseKind.PRECISION
    assert "precision: nvfp4" in found["cheap/int4"].log_ratios
    assert "precision: nvfp4" not in found["honest/int4"].log_ratios
    assert len(asked) == 1
    trusting = AuditSettings(formats=("nvfp4",), fewest_tokens=100, alpha=1e-200)
    audit_states(store, head, trusting, load=load)
    assert len(asked) == 1  # nobody departs as far as that


def test_the_command_reads_states(folder: Path) -> None:
    ended = quantroute("audit", folder / "run.toml", "--json")
    assert ended.code == 4, ended.err
    assert ended.data["endpoints"][0]["endpoint"] == "cheap/int4"
    assert ended.data["endpoints"][0]["cause"]["text"] == "precision: nvfp4"


def test_what_states_cannot_tell_is_refused(
    folder: Path, store: StateStore, head: TargetHead, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="from rows"):
        audit_states(store, head, AuditSettings(system_prompts=("Be brief.",)))
    with pytest.raises(ConfigurationError, match="author/int4"):
        audit_states(store, head, AuditSettings(reference="author/int4"))
    other = shutil.copytree(folder / "target", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    with pytest.raises(ConfigurationError, match="not that of the target"):
        TargetHead.read(other, store)
    same = {**store.manifest["target"], "config_sha256": ExtractTarget.read(other).config_sha256()}
    moved = StateStore(
        folder=store.folder, manifest={**store.manifest, "target": same}, shards=store.shards
    )
    with pytest.raises(ConfigurationError, match="more than states times head"):
        TargetHead.read(other, moved)
