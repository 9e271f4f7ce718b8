"""`[train]`, the command it becomes, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import quantroute
from drafter.drafter_support import (
    TARGET_WEIGHTS,
    fake_interpreter,
    save_tensors,
    write_data,
    write_target,
    zeros,
)
from quantroute.drafter import Prepared, TrainingData, TrainSpec, load_train_spec, prepare_training
from quantroute.drafter._specforge import SpecForgeLog, specforge_launch
from quantroute.drafter._speculators import SpeculatorsLog, speculators_launch
from quantroute.drafter._versions import Installed
from quantroute.errors import ConfigurationError, DatasetError

STEP = (
    "           INFO     train/loss_0=0.025, train/full_acc_0=0.500, train/cond_acc_0=0.500, "
    "train/loss_1=0.025, train/full_acc_1=2.50e-01, train/cond_acc_1=0.500, train/loss=0.050, "
    "train/error_records=0.00e+00, profile/tokens_per_s=1.02e+03, epoch=1, lr/Muon=0.002, "
    "lr/AdamW=8.33e-04, global_step=41                         trainer.py:587"
)
VALIDATION = (
    "[10:18:20] INFO     val/loss_0_epoch=0.026, val/full_acc_0_epoch=0.75, "
    "val/cond_acc_0_epoch=0.75, val/loss_epoch=nan, epoch=1   trainer.py:671"
)


def spec_of(folder: Path, **changes: Any) -> TrainSpec:
    trainer = changes.get("trainer", "speculators")
    write_target(folder / "target")
    data = write_data(folder / "data", trainer)
    return TrainSpec(data=data, out=folder / "out", python="python", **changes)


def arguments(spec: TrainSpec, *, gpus: int = 0) -> list[str]:
    data = TrainingData.read(spec.data)
    launch = speculators_launch(spec, data, Installed(python=spec.python, gpus=gpus))
    return list(launch.argv)


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


# -- the file -------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(
        '[train]\ndata = "data"\ntarget = "target"\ntrainer = "specforge"\nepochs = 2\n'
    )
    spec = load_train_spec(path)
    assert (spec.data, spec.out) == (tmp_path / "data", tmp_path / "drafter")
    assert spec.target == str(tmp_path / "target")
    assert (spec.trainer, spec.epochs) == ("specforge", 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epoch = 2", "run.toml:3: train.epoch: unknown field"),
        ('trainer = "modelopt"', "train.trainer: must be 'speculators' or 'specforge'"),
        ("epochs = 0", "train.epochs"),
        ("learning_rate = nan", "train.learning_rate"),
        ("batch_size = 4", "max_tokens"),
        ('python = "no/such/python"', "no/such/python does not exist"),
        ('trainer = "specforge"\nhead = "eagle3.1"', "'eagle3' only"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\ndata = "data"\n{line}\n')
    with pytest.raises(ConfigurationError) as caught:
        load_train_spec(path)
    assert words in str(caught.value)


# -- the data -------------------------------------------------------------------------------------


def test_layers_are_the_same_in_both_conventions(tmp_path: Path) -> None:
    one = TrainingData.read(write_data(tmp_path / "a", "speculators"))
    other = TrainingData.read(write_data(tmp_path / "b", "specforge"))
    assert one.layers == other.layers == (2, 4, 5)
    assert one.output_layers == other.output_layers == (1, 3, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "writing"}, "not finished"),
        ({"version": 2}, "this version"),
        ({"kind": "rows"}, "this version"),
        ({"layers": {"ids": [1], "convention": "sideways"}}, "sideways"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DatasetError, match=words):
        TrainingData.read(write_data(tmp_path, **changes))


def test_a_folder_without_a_manifest_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="quantroute extract"):
        TrainingData.read(tmp_path)


# -- speculators ----------------------------------------------------------------------------------


def test_one_gpu_gets_the_stock_command_and_several_get_torchrun(tmp_path: Path) -> None:
    one = arguments(spec_of(tmp_path), gpus=1)
    assert one[:4] == ["python", "-m", "speculators", "train"]
    assert "--draft-attn-impl" not in one
    many = arguments(spec_of(tmp_path, processes=8), gpus=8)
    assert many[:5] == [
        "python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
    ]  # fmt: skip
    assert many[5:8] == ["8", "-m", "speculators.train"]


def test_the_cpu_gets_the_launcher_and_what_works_there(tmp_path: Path) -> None:
    argv = arguments(spec_of(tmp_path))
    assert argv[1].endswith("drafter/_cpu_launcher.py")
    assert value(argv, "--draft-attn-impl") == "sdpa"
    assert value(argv, "--loss-implementation") == "eager"
    assert value(argv, "--num-workers") == "0"
    assert arguments(spec_of(tmp_path, device="cpu"), gpus=2)[1] == argv[1]


def test_the_command_names_layers_vocabulary_and_head(tmp_path: Path) -> None:
    argv = arguments(spec_of(tmp_path, max_steps=7, learning_rate=5e-5, extra=("--muon-lr", "1")))
    at = argv.index("--target-layer-ids")
    assert argv[at + 1 : at + 4] == ["2", "4", "5"]
    assert value(argv, "--draft-vocab-size") == "10"
    assert value(argv, "--d2t-path").endswith("d2t-10.npy")
    assert value(argv, "--on-missing") == "raise"
    assert {"--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output"} <= set(argv)
    assert value(argv, "--full-attention-indices") == "0"
    assert value(argv, "--lr") == "5e-05"
    assert argv[-2:] == ["--muon-lr", "1"]
    newer = arguments(spec_of(tmp_path, head="eagle3.1"))
    assert not [item for item in newer if item.startswith("--no-norm")]


def test_a_lost_vocabulary_map_is_not_replaced_by_the_trainers_own(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (spec.data / "t2d-10.npy").unlink()
    with pytest.raises(DatasetError, match=r"t2d-10\.npy"):
        arguments(spec)


def test_speculators_lines_become_figures() -> None:
    log = SpeculatorsLog()
    assert log.read("INFO     Training epoch 1/2 started") is None
    step = log.read(STEP)
    assert step is not None
    assert (step.step, step.epoch, step.loss) == (42, 1, 0.05)
    assert (step.accuracy, step.cumulative) == ((0.5, 0.5), (0.5, 0.25))
    assert step.accept_length == 1.75
    assert (step.learning_rate, step.tokens_per_s) == (8.33e-4, 1020.0)
    after = log.read(VALIDATION)
    assert after is not None
    assert (after.split, after.step, after.accuracy) == ("validation", 42, (0.75,))
    assert after.loss != after.loss  # NaN is told, not hidden
    assert json.dumps(after.as_dict(), allow_nan=False)
    assert after.as_dict()["loss"] is None


@pytest.mark.parametrize(("state", "step"), [('{"global_step": 40}', 40), ("{", 0), ("[]", 0)])
def test_validation_right_after_a_restart_has_the_checkpoints_step(
    tmp_path: Path, state: str, step: int
) -> None:
    spec = spec_of(tmp_path)
    for number, content in (("2", "{}"), ("10", state)):
        folder = spec.out / "checkpoints" / number
        folder.mkdir(parents=True)
        (folder / "training_state.json").write_text(content)
    data = TrainingData.read(spec.data)
    launch = speculators_launch(spec, data, Installed(python=spec.python))
    found = launch.parser.read(VALIDATION)
    assert found is not None
    assert found.step == step


# -- SpecForge ------------------------------------------------------------------------------------


def test_specforges_config_names_what_it_cannot_guess(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, trainer="specforge", epochs=3, depth=5, batch_size=2)
    data = TrainingData.read(spec.data)
    launch = specforge_launch(spec, data, Installed(python="python"))
    config = json.loads(launch.files[spec.out / "specforge.json"])
    draft = json.loads(launch.files[spec.out / "draft_config.json"])
    assert draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (draft["draft_vocab_size"], draft["rope_theta"]) == (10, 50_000.0)
    assert config["data"]["max_length"] == 900
    assert config["training"]["ttt_length"] == 5
    assert config["training"]["fsdp_sharding"] == "NO_SHARD"
    assert config["model"]["vocab_mapping_path"].endswith("vocab_mapping.pt")
    assert "resume_from" not in config["training"]
    assert launch.total_steps == 150
    assert launch.env["TRITON_INTERPRET"] == "1"


def test_specforge_on_gpus_gets_the_stock_command(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, trainer="specforge", processes=4)
    data = TrainingData.read(spec.data)
    launch = specforge_launch(spec, data, Installed(python="python", gpus=4))
    config = json.loads(launch.files[spec.out / "specforge.json"])
    assert launch.argv[:4] == ("python", "-m", "specforge.cli", "train")
    assert config["deployment"]["trainer"]["nproc_per_node"] == 4
    assert "fsdp_sharding" not in config["training"]


def test_specforge_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, trainer="specforge")
    done = spec.out / "checkpoints" / "drafter-step20"
    done.mkdir(parents=True)
    (done / "training_state.pt").touch()
    launch = specforge_launch(spec, TrainingData.read(spec.data), Installed(python="python"))
    config = json.loads(launch.files[spec.out / "specforge.json"])
    assert config["training"]["resume_from"] == str(spec.out / "checkpoints")


def test_a_target_in_one_file_gets_the_index_that_specforge_wants(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, trainer="specforge")
    target = tmp_path / "target"
    (target / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigurationError, match="save_pretrained"):
        specforge_launch(spec, TrainingData.read(spec.data), Installed(python="python"))
    save_tensors(target / "model.safetensors", {name: zeros(2, 2) for name in TARGET_WEIGHTS})
    launch = specforge_launch(spec, TrainingData.read(spec.data), Installed(python="python"))
    shown = spec.out / "target"
    model = json.loads(launch.files[spec.out / "specforge.json"])["model"]
    assert model["target_model_path"] == str(shown)
    assert launch.files[shown / "config.json"] == (target / "config.json").read_text()
    names = json.loads(launch.files[shown / "model.safetensors.index.json"])["weight_map"]
    # SpecForge joins its folder and this name: an absolute one leads to the target's own file.
    assert shown / names["lm_head.weight"] == target / "model.safetensors"


@pytest.mark.parametrize(
    ("names", "embedding", "head"),
    [
        (TARGET_WEIGHTS, "model.embed_tokens.weight", "lm_head.weight"),
        (("model.embed_tokens.weight",), "model.embed_tokens.weight", "model.embed_tokens.weight"),
        (
            ("lm.model.embed_tokens.weight", "lm.lm_head.weight", "vision.embed_tokens.weight"),
            "lm.model.embed_tokens.weight",
            "lm.lm_head.weight",
        ),
    ],
)
def test_specforge_is_told_the_targets_own_names(
    tmp_path: Path, names: tuple[str, ...], embedding: str, head: str
) -> None:
    spec = spec_of(tmp_path, trainer="specforge")
    index = tmp_path / "target" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    launch = specforge_launch(spec, TrainingData.read(spec.data), Installed(python="python"))
    model = json.loads(launch.files[spec.out / "specforge.json"])["model"]
    assert (model["embedding_key"], model["lm_head_key"]) == (embedding, head)
    index.write_text('{"weight_map": {"transformer.wte.weight": "a.safetensors"}}')
    with pytest.raises(ConfigurationError, match=r"no embed_tokens\.weight"):
        specforge_launch(spec, TrainingData.read(spec.data), Installed(python="python"))


def test_specforges_lines_become_figures() -> None:
    log = SpecForgeLog()
    line = "step 7: {'acc_0': 0.5, 'acc_1': nan, 'loss': 6.25, 'lr': 0.001, 'perf/x': -inf}"
    step = log.read(line)
    assert step is not None
    assert (step.step, step.loss, step.learning_rate) == (7, 6.25, 0.001)
    assert step.accuracy[0] == 0.5
    assert step.accept_length is None
    assert log.read("step 7: {broken") is None
    assert log.read("epoch 3") is None


# -- before the start -----------------------------------------------------------------------------


def prepared(folder: Path, **changes: Any) -> Prepared:
    versions = changes.pop("versions", {})
    spec = spec_of(folder, **changes)
    python = fake_interpreter(folder / "python", "raise SystemExit(1)", **versions)
    return prepare_training(replace(spec, python=python))


@pytest.mark.parametrize("trainer", ["speculators", "specforge"])
def test_known_versions_pass_without_a_word(tmp_path: Path, trainer: str) -> None:
    assert prepared(tmp_path, trainer=trainer).notes == ("on the CPU: slow, for rehearsals",)


def test_a_missing_package_is_named_with_the_versions_that_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"install 'speculators>=0\.9\.0,<0\.10'"):
        prepared(tmp_path, versions={"speculators": None})


def test_another_version_is_refused_unless_it_is_let_pass(tmp_path: Path) -> None:
    newer = {"speculators": "0.11.2"}
    with pytest.raises(ConfigurationError, match=r"speculators 0\.11\.2 .*any_version"):
        prepared(tmp_path, versions=newer)
    passed = prepared(tmp_path, versions=newer, any_version=True)
    assert any("0.11.2" in note for note in passed.notes)


def test_an_interpreter_that_is_none_is_told_apart_from_a_missing_trainer(tmp_path: Path) -> None:
    spec = replace(spec_of(tmp_path), python=str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match=r"train\.python"):
        prepare_training(spec)


def test_data_of_another_trainer_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    write_data(spec.data, "specforge")
    with pytest.raises(ConfigurationError, match="written for specforge"):
        prepare_training(spec)


def test_more_processes_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="4 GPUs are wanted"):
        prepared(tmp_path, processes=4)


def test_the_command_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_data(tmp_path / "data")
    python = fake_interpreter(tmp_path / "python", "raise SystemExit(1)")
    path = tmp_path / "run.toml"
    path.write_text(f'[train]\ndata = "data"\npython = "{python}"\n')
    ended = quantroute("train", path, "--dry-run")
    assert ended.code == 0
    assert "--target-layer-ids 2 4 5" in ended.out
    assert "97.00%" in ended.err
    assert not (tmp_path / "drafter").exists()
    as_json = quantroute("train", path, "--dry-run", "--json").data
    assert as_json["command"][0] == python
    assert as_json["packages"]["speculators"] == "0.9.0"
