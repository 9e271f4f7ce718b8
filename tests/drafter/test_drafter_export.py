"""A head for an engine: the layers it will take, the wiring it knows, the map of the vocabulary."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cli_support import quantroute
from drafter.drafter_support import (
    DRAFT_VOCAB,
    VOCAB,
    decoder,
    head_tensors,
    save_tensors,
    speculators_checkpoint,
    write_target,
    zeros,
)
from quantroute.drafter import DrafterExport, export_drafter
from quantroute.drafter._engines import Engine, Family, layers_as_read, layers_to_write
from quantroute.drafter._tensors import read_tensors
from quantroute.errors import ConfigurationError, DatasetError

EngineName = Literal["vllm", "sglang"]


def exported(
    tmp_path: Path,
    engine: EngineName,
    *,
    architecture: str = "LlamaForCausalLM",
    layers: tuple[int, ...] = (2, 4, 5),
    **changes: Any,
) -> DrafterExport:
    target = write_target(tmp_path / "target", architecture)
    source = speculators_checkpoint(tmp_path / "checkpoint", target, layers=layers, **changes)
    return export_drafter(source, tmp_path / "made", engine=engine)


def config_of(done: DrafterExport) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((done.folder / "config.json").read_text())
    return content


# -- layers ---------------------------------------------------------------------------------------


@given(
    layers=st.lists(st.integers(0, 80), min_size=3, max_size=3, unique=True).map(sorted),
    engine=st.sampled_from(get_args(Engine)),
    family=st.sampled_from(get_args(Family)),
    nested=st.booleans(),
)
def test_an_engine_takes_the_layers_that_were_trained(
    layers: list[int], engine: EngineName, family: Family, nested: bool
) -> None:
    try:
        ids = layers_to_write(tuple(layers), engine=engine, family=family)
    except ConfigurationError:
        assume(False)
        raise
    config: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}
    if engine == "vllm" and not nested:
        config = {"eagle_aux_hidden_state_layer_ids": list(ids)}
    read = layers_as_read(config, engine=engine, family=family, num_layers=81)
    assert read == tuple(layers)


def test_the_layers_of_kimi_in_both_engines() -> None:
    """A blind copy of [1, 29, 57] would be one layer low in vLLM (sglang 25454, vllm 43671)."""
    kimi: Family = "plus one if the first is 1"
    assert layers_to_write((2, 30, 58), engine="vllm", family=kimi) == (2, 30, 58)
    assert layers_to_write((2, 30, 58), engine="sglang", family=kimi) == (2, 30, 58)
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}
    taken = {
        name: layers_as_read(config, engine=name, family=kimi, num_layers=61)
        for name in get_args(Engine)
    }
    assert taken == {"sglang": (2, 30, 58), "vllm": (1, 29, 57)}


@pytest.mark.parametrize(("first", "is_possible"), [(0, True), (1, False), (2, True)])
def test_layers_that_no_ids_can_name_are_refused(first: int, is_possible: bool) -> None:
    family: Family = "plus one if the first is 1"
    if is_possible:
        layers_to_write((first, 5, 9), engine="sglang", family=family)
    else:
        with pytest.raises(ConfigurationError, match="cannot be made"):
            layers_to_write((first, 5, 9), engine="sglang", family=family)


@pytest.mark.parametrize(
    ("engine", "architecture", "ids"),
    [
        ("vllm", "LlamaForCausalLM", [2, 4, 5]),
        ("vllm", "KimiK25ForConditionalGeneration", [2, 4, 5]),
        ("sglang", "LlamaForCausalLM", [1, 3, 4]),
        ("sglang", "Qwen3MoeForCausalLM", [1, 3, 4]),
        ("sglang", "KimiK25ForConditionalGeneration", [2, 4, 5]),
    ],
)
def test_ids_are_written_as_the_engine_counts(
    tmp_path: Path, engine: EngineName, architecture: str, ids: list[int]
) -> None:
    done = exported(tmp_path, engine, architecture=architecture)
    config = config_of(done)
    assert list(done.layer_ids) == ids
    if engine == "vllm":
        assert config["eagle_aux_hidden_state_layer_ids"] == ids
    else:
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert "eagle_aux_hidden_state_layer_ids" not in config
    assert done.layers == (2, 4, 5)


def test_a_target_whose_counting_is_unknown_is_not_guessed(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "NovelForCausalLM")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    with pytest.raises(ConfigurationError, match="--like"):
        export_drafter(source, tmp_path / "made", engine="sglang")
    assert not (tmp_path / "made").exists()
    done = export_drafter(source, tmp_path / "made", engine="sglang", like="Qwen3ForCausalLM")
    assert done.layer_ids == (1, 3, 4)
    export_drafter(source, tmp_path / "other", engine="vllm")  # vLLM never shifts: nothing to know


# -- weights --------------------------------------------------------------------------------------


def test_vllm_gets_the_checkpoint_with_every_setting(tmp_path: Path) -> None:
    done = exported(tmp_path, "vllm", norm_before_fc=True, norm_before_residual=True)
    config = config_of(done)
    assert config["norm_before_fc"]
    assert config["norm_before_residual"]
    assert config["speculators_model_type"] == "eagle3"
    assert "auto_map" not in config
    found = read_tensors(done.folder)
    assert found.keys() == read_tensors(tmp_path / "checkpoint").keys()
    assert "input_norm.weight" in found


def test_sglang_gets_its_own_names_and_flags(tmp_path: Path) -> None:
    done = exported(tmp_path, "sglang", norm_before_fc=True, norm_output=True)
    config = config_of(done)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["norm_before_fc"]
    assert config["norm_output"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (DRAFT_VOCAB, VOCAB)
    assert config["rope_theta"] == 50_000.0
    found = read_tensors(done.folder)
    assert "midlayer.self_attn.q_proj.weight" in found
    assert "embed_tokens.weight" not in found
    ids = [draft + offset for draft, offset in enumerate(found["d2t"].numbers())]
    assert ids == list(range(0, 2 * DRAFT_VOCAB, 2))


def test_bytes_are_copied_as_they_are(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    weights = head_tensors()
    for number, (name, (dtype, shape, content)) in enumerate(weights.items()):
        if name not in ("d2t", "t2d"):
            weights[name] = (dtype, shape, bytes([number]) * len(content))
    save_tensors(source / "model.safetensors", weights)
    done = export_drafter(source, tmp_path / "made", engine="vllm")
    for name, tensor in read_tensors(done.folder).items():
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            assert file.read(tensor.size) == weights[name][2], name


def test_wiring_that_sglang_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="norm_before_residual"):
        exported(tmp_path, "sglang", norm_before_residual=True)


def test_a_sliding_window_becomes_a_server_option(tmp_path: Path) -> None:
    window = decoder() | {"layer_types": ["sliding_attention"]}
    done = exported(tmp_path, "sglang", transformer_layer_config=window)
    assert "--speculative-draft-window-size 2048" in done.serve
    assert done.notes


Damage = tuple[str, tuple[str, tuple[int, ...], bytes] | None]
DAMAGE: dict[str, Damage] = {
    "fc.weight is missing": ("fc.weight", None),
    r"lm_head.weight is \[9, 16\], not \[10, 16\]": ("lm_head.weight", zeros(9, 16)),
    "mystery.weight belongs to no part": ("mystery.weight", zeros(2)),
    "t2d is missing": ("t2d", None),
    "do not describe the same tokens": (
        "d2t",
        ("I64", (DRAFT_VOCAB,), struct.pack(f"<{DRAFT_VOCAB}q", *range(1, DRAFT_VOCAB + 1))),
    ),
    "integers are wanted where BF16 is": ("d2t", zeros(DRAFT_VOCAB)),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_head_that_is_not_one_is_refused(tmp_path: Path, words: str) -> None:
    name, tensor = DAMAGE[words]
    target = write_target(tmp_path / "target")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    weights = head_tensors()
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    save_tensors(source / "model.safetensors", weights)
    with pytest.raises(DatasetError, match=words):
        export_drafter(source, tmp_path / "made", engine="vllm")
    assert not (tmp_path / "made").exists()


def test_offsets_stored_as_ids_are_found_out(tmp_path: Path) -> None:
    """d2t that holds target ids, not offsets, is the mistake people make."""
    target = write_target(tmp_path / "target")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    ids = list(range(0, 2 * DRAFT_VOCAB, 2))
    weights = head_tensors(ids)
    weights["d2t"] = ("I64", (DRAFT_VOCAB,), struct.pack(f"<{DRAFT_VOCAB}q", *ids))
    save_tensors(source / "model.safetensors", weights)
    with pytest.raises(DatasetError, match="offsets"):
        export_drafter(source, tmp_path / "made", engine="sglang")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match="not whole"):
        export_drafter(source, tmp_path / "made", engine="vllm")


def test_a_checkpoint_that_names_no_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="names no layers"):
        exported(tmp_path, "vllm", eagle_aux_hidden_state_layer_ids=None)


# -- where from and where to ----------------------------------------------------------------------


def test_the_best_checkpoint_of_a_training_is_taken(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    folder = tmp_path / "out" / "checkpoints"
    for number in (0, 1):
        speculators_checkpoint(folder / str(number), target)
    done = export_drafter(tmp_path / "out", tmp_path / "latest", engine="vllm")
    assert done.source == folder / "1"
    (folder / "checkpoint_best").symlink_to("0")
    best = export_drafter(tmp_path / "out", tmp_path / "best", engine="vllm")
    assert best.source == folder / "0"


def test_an_export_for_sglang_can_be_exported_again(tmp_path: Path) -> None:
    done = exported(tmp_path, "sglang")
    again = export_drafter(
        done.folder, tmp_path / "again", engine="vllm", target=str(tmp_path / "target")
    )
    assert again.layers == (2, 4, 5)
    assert config_of(again)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_a_folder_in_use_and_an_empty_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").touch()
    with pytest.raises(DatasetError, match="not empty"):
        export_drafter(tmp_path, tmp_path / "made", engine="vllm")
    with pytest.raises(DatasetError, match="no checkpoint"):
        export_drafter(tmp_path, tmp_path / "new", engine="vllm")


def test_the_command_prints_how_to_serve(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    source = speculators_checkpoint(tmp_path / "checkpoint", target)
    ended = quantroute("export-drafter", source, tmp_path / "a", "--engine", "sglang")
    assert ended.code == 0, ended.err
    assert "layer ids [1, 3, 4] for sglang" in ended.out
    assert "--speculative-algorithm EAGLE3" in ended.out
    data = quantroute("export-drafter", source, tmp_path / "b", "--engine", "vllm", "--json").data
    assert data["layer_ids"] == data["boundary_layers"] == [2, 4, 5]
    assert data["serve"].startswith(f"vllm serve {target} --speculative-config ")
