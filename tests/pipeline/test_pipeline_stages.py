"""Which stages run again, and what is left of the others; stages here only write files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafter.drafter_support import speculators_checkpoint, write_target
from quantroute.errors import ConfigurationError, DatasetError, StageFailed
from quantroute.pipeline import (
    STAGES,
    PipelineSpec,
    Stage,
    load_pipeline_spec,
    run_pipeline,
    status_of,
)
from quantroute.pipeline import _contents as contents
from quantroute.pipeline._contents import Content
from quantroute.pipeline._judge import _prompts

RUN = """\
[run]
name = "r"
[[dataset]]
name = "d"
prompts = "prompts.jsonl"
[extract]
target = "target"
[data]
held_out_share = 0.2
[train]
data = "data"
"""


class Chain:
    """Two stages: `first` copies the prompts into a folder, `second` its output into a file."""

    def __init__(self, folder: Path) -> None:
        (folder / "prompts.jsonl").write_text("one\n")
        (folder / "run.toml").write_text(RUN)
        self.folder = folder
        self.ran: list[str] = []
        self.fails = False
        self.stages = (
            Stage(
                name="first",
                tables=("run",),
                inputs=lambda spec: {"prompts": spec.prompts[0]},
                outputs=lambda spec: {"made": spec.states / "made"},
                owns=lambda spec: (spec.states,),
                work=self._first,
            ),
            Stage(
                name="second",
                tables=("data",),
                inputs=lambda spec: {"made": spec.states / "made"},
                outputs=lambda spec: {"end": spec.evaluation},
                owns=lambda _: (),
                work=self._second,
            ),
        )

    @property
    def spec(self) -> PipelineSpec:
        return load_pipeline_spec(self.folder / "run.toml")

    def run(self, only: Sequence[str] | None = None) -> str:
        self.ran.clear()
        return run_pipeline(self.spec, stages=self.stages, only=only)

    def states(self) -> list[str]:
        return [status_of(self.spec, stage).state for stage in self.stages]

    def _first(self, spec: PipelineSpec, _: Sequence[str]) -> None:
        self.ran.append("first")
        spec.states.mkdir(parents=True, exist_ok=True)
        (spec.states / "half").write_text("half")
        if self.fails:
            raise StageFailed(stage="first", status=3)
        (spec.states / "made").write_bytes(spec.prompts[0].read_bytes())

    def _second(self, spec: PipelineSpec, _: Sequence[str]) -> None:
        self.ran.append("second")
        spec.evaluation.write_bytes((spec.states / "made").read_bytes())


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_a_second_run_does_nothing_and_has_the_same_manifest(chain: Chain) -> None:
    assert chain.states() == ["waiting", "waiting"]
    first = chain.run()
    assert chain.ran == ["first", "second"]
    assert chain.run() == first
    assert chain.ran == []
    assert chain.states() == ["done", "done"]


def test_changed_settings_run_their_stage_alone(chain: Chain) -> None:
    before = chain.run()
    (chain.folder / "run.toml").write_text(RUN.replace("0.2", "0.3"))
    assert chain.states() == ["done", "changed"]
    assert chain.run() != before
    assert chain.ran == ["second"]


def test_changed_input_runs_all_that_hangs_on_it_and_keeps_the_old(chain: Chain) -> None:
    chain.run()
    (chain.folder / "prompts.jsonl").write_text("two\n")
    status = status_of(chain.spec, chain.stages[0])
    assert (status.state, status.why) == ("changed", "new: prompts")
    chain.run()
    assert chain.ran == ["first", "second"]
    assert chain.spec.evaluation.read_text() == "two\n"
    aside = chain.spec.states.with_name("states.before-1")
    assert (aside / "made").read_text() == "one\n"


def test_a_touched_output_is_made_again(chain: Chain) -> None:
    chain.run()
    chain.spec.evaluation.write_text("edited")
    assert chain.states() == ["done", "changed"]
    chain.run()
    assert (chain.ran, chain.spec.evaluation.read_text()) == (["second"], "one\n")


def test_a_stage_that_failed_goes_on_with_its_own_files(chain: Chain) -> None:
    chain.fails = True
    with pytest.raises(StageFailed, match="first ended with status 3"):
        chain.run()
    assert chain.states() == ["begun", "waiting"]
    chain.fails = False
    digest = chain.run()
    assert (chain.spec.states / "half").exists()
    assert not chain.spec.states.with_name("states.before-1").exists()
    other = Chain(_folder(chain.folder / "other"))
    assert other.run() == digest  # an interrupted run ends as one that was not


def test_half_made_files_of_other_inputs_are_set_aside(chain: Chain) -> None:
    chain.fails = True
    with pytest.raises(StageFailed):
        chain.run()
    (chain.folder / "prompts.jsonl").write_text("two\n")
    chain.fails = False
    chain.run()
    assert chain.spec.states.with_name("states.before-1").exists()
    assert (chain.spec.states / "made").read_text() == "two\n"


def test_a_stage_alone_elsewhere_needs_but_its_inputs(chain: Chain) -> None:
    digest = chain.run()
    there = Chain(_folder(chain.folder / "there"))
    with pytest.raises(DatasetError, match="is wanted as made"):
        there.run(only=["second"])
    chain.spec.states.rename(_folder(there.spec.run_folder) / "states")
    there.run(only=["second"])
    assert there.ran == ["second"]
    assert there.spec.evaluation.read_text() == "one\n"
    assert digest


def test_unknown_stages_are_named(chain: Chain) -> None:
    with pytest.raises(ConfigurationError, match="no stage third; there are first, second"):
        chain.run(only=["third"])


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ('[extract]\ntarget = "target"\n', "extract: is required"),
        ('data = "data"\n', "train.data: is required"),
    ],
)
def test_a_run_file_without_what_joins_the_stages_is_refused(
    chain: Chain, removed: str, message: str
) -> None:
    (chain.folder / "run.toml").write_text(RUN.replace(removed, ""))
    with pytest.raises(ConfigurationError, match=message):
        _ = chain.spec


def test_the_shipped_chain_hands_files_from_stage_to_stage(chain: Chain) -> None:
    spec = chain.spec
    others = [stage for stage in STAGES if stage.name != "train"]  # finds its weights when made
    made = {item for stage in others for item in stage.outputs(spec).items()}
    assert set(STAGES[-1].inputs(spec).items()) <= made


def test_contents_leave_out_where_and_by_whom(tmp_path: Path) -> None:
    def hashed(content: Content, facts: object) -> str:
        content.path.write_text(json.dumps(facts))
        return content.sha256(content.path)

    stored, data = contents.states(tmp_path), contents.training_data(tmp_path)
    shard = {"sha256": "a", "rows_sha256": "b"}
    assert hashed(stored, {"shards": [shard]}) == hashed(stored, {"shards": [{"sha256": "a"}]})
    assert hashed(stored, {"shards": [shard]}) != hashed(stored, {"shards": [{"sha256": "c"}]})
    here, there = ({"target": {"model": name, "num_layers": 8}} for name in ("here", "there"))
    assert hashed(data, here) == hashed(data, there)
    assert hashed(data, here) != hashed(data, {"target": {"num_layers": 9}})
    drafter = contents.config_of_drafter(tmp_path)
    config = {"speculators_config": {"verifier": {"name_or_path": "here"}}, "hidden_size": 4}
    assert hashed(drafter, config) != hashed(drafter, config | {"hidden_size": 5})
    with pytest.raises(DatasetError, match="not a JSON object"):
        hashed(drafter, [])


def test_another_trainer_makes_the_data_again(chain: Chain) -> None:
    data = next(stage for stage in STAGES if stage.name == "data")
    before = chain.spec.settings_sha256(data.tables)
    (chain.folder / "run.toml").write_text(f"{RUN}epochs = 9\n")
    assert chain.spec.settings_sha256(data.tables) == before
    (chain.folder / "run.toml").write_text(f'{RUN}trainer = "specforge"\n')
    assert chain.spec.settings_sha256(data.tables) != before


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_rows_that_are_all_answer_have_no_prompt_to_decode() -> None:
    np = pytest.importorskip("numpy")
    from quantroute.extraction import Example

    masks = ([True, True], [False, True])
    rows = [Example(input_ids=np.array([7, 8]), loss_mask=np.array(mask)) for mask in masks]
    assert list(_prompts(rows)) == [[7]]


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "tiktoken.model"])
def test_what_makes_tokens_of_rows_counts_as_the_target(chain: Chain, name: str) -> None:
    extract = next(stage for stage in STAGES if stage.name == "extract")
    _folder(chain.spec.target)
    (chain.spec.target / "model.safetensors").write_text("weights")
    before = set(extract.inputs(chain.spec))
    (chain.spec.target / name).write_text("other")
    assert set(extract.inputs(chain.spec)) - before == {f"target {name}"}


def test_a_chat_template_of_ones_own_counts_too(chain: Chain) -> None:
    text = RUN.replace('target = "target"\n', 'target = "target"\nchat_template = "mine.jinja"\n')
    (chain.folder / "run.toml").write_text(text)
    extract = next(stage for stage in STAGES if stage.name == "extract")
    assert extract.inputs(chain.spec)["chat template"] == chain.folder / "mine.jinja"


@pytest.mark.parametrize("left", ["model.safetensors", "config.json"])
def test_an_export_that_was_cut_short_is_made_anew(chain: Chain, left: str) -> None:
    spec = chain.spec
    target = write_target(spec.target)
    spec.drafter.mkdir(parents=True)
    speculators_checkpoint(spec.drafter / "checkpoints/0", target)
    export = tuple(stage for stage in STAGES if stage.name == "export")
    run_pipeline(spec, stages=export)
    whole = {path.name: path.read_bytes() for path in spec.exported.iterdir()}
    for path in (spec.home / "export.json", spec.exported / left):
        path.unlink()
    run_pipeline(spec, stages=export)
    assert {path.name: path.read_bytes() for path in spec.exported.iterdir()} == whole
    assert status_of(spec, export[0]).state == "done"
