"""`quantroute extract`, from run.toml to a store; and `kill -9` on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli_support import Ended, quantroute
from quantroute.errors import ConfigurationError
from quantroute.extraction import (
    LayerConvention,
    LayerIds,
    StateStore,
    load_extract_spec,
    read_pretokenized,
)
from quantroute.extraction._records import Example
from states_support import contents, example, examples, tiny_llama

torch = pytest.importorskip("torch", reason="needs quantroute[extract]")
pytest.importorskip("transformers", reason="needs quantroute[extract]")
from extraction_support import CHATML, letters_tokenizer, make_row  # noqa: E402

TABLE = """
[extract]
target = "target"
rows = "tokens.jsonl"
out = "states"
layers = [2, 4, 5]
layer_convention = "boundary"
device = "cpu"
shard_gb = 0.0001
margin_gb = 0
batch_tokens = 256
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "target")


def write_tokens(path: Path, rows: list[Example]) -> None:
    lines = [
        {
            "input_ids": one.input_ids.tolist(),
            "loss_mask": one.loss_mask.astype(int).tolist(),
            **one.provenance,
        }
        for one in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def here(target: Path, tmp_path: Path) -> Path:
    (tmp_path / "target").symlink_to(target)
    (tmp_path / "run.toml").write_text(TABLE)
    write_tokens(tmp_path / "tokens.jsonl", examples(40))
    return tmp_path


def extract(here: Path, *options: str) -> Ended:
    return quantroute("extract", here / "run.toml", *options)


def test_from_token_ids_to_a_verified_store(here: Path) -> None:
    ended = extract(here)
    assert ended.code == 0, ended.err
    assert "40 examples" in ended.out
    assert "512 bytes a token" in ended.out  # 4 x 32 x float32
    assert "a batch agrees with single requests" in ended.out
    store = StateStore.open(here / "states")
    store.verify()
    assert [states.example.key for states in store] == [one.key for one in examples(40)]
    again = extract(here, "--json").data
    assert (again["shards"], again["is_complete"]) == (0, True)


FAILED = """
[[serving]]
model = "maker/model"
provider = "Cheap"
tag = "cheap/int4"
quantization = "unknown"
source = "audit of run r"
date = 2026-11-30
expires = 2026-12-01
failed = true
"""


def test_rows_of_failed_endpoints_stay_out_by_option_or_by_setting(here: Path) -> None:
    write_tokens(
        here / "tokens.jsonl",
        [
            example(n, 8, model="maker/model", endpoint="cheap/int4" if n < 3 else "honest/int4")
            for n in range(10)
        ],
    )
    evidence = here / "audit.toml"
    evidence.write_text(FAILED)
    by_option = extract(here, "--drop-failed-audit", str(evidence), "--json").data["plan"]
    assert (by_option["examples"], by_option["left_out"]) == (7, {"endpoint_failed": 3})
    # Without the option it would be another extraction; with the setting it is the same one.
    assert "selection" in extract(here).err
    (here / "run.toml").write_text(TABLE + 'drop_failed_audit = "audit.toml"\n')
    again = extract(here, "--json").data
    assert (again["plan"]["left_out"], again["shards"]) == ({"endpoint_failed": 3}, 0)
    stored = {states.example.provenance["endpoint"] for states in StateStore.open(here / "states")}
    assert stored == {"honest/int4"}
    evidence.unlink()
    ended = extract(here)
    assert (ended.code, "quantroute audit --write-evidence" in ended.err) == (2, True)


def test_a_dry_run_tells_and_writes_nothing(here: Path) -> None:
    found = extract(here, "--dry-run", "--json").data
    plan = found["plan"]
    assert plan["tokens"] == sum(map(len, examples(40)))
    assert plan["need_bytes"] > plan["tokens"] * plan["bytes_per_token"]
    assert found["tokens_per_s"] > 0
    assert not (here / "states").exists()


def test_parts_fill_one_store(here: Path) -> None:
    first = extract(here, "--shard", "0/2", "--json").data
    assert not first["is_complete"]
    second = extract(here, "--shard", "1/2", "--json").data
    assert second["is_complete"]
    assert first["examples"] + second["examples"] == 40
    StateStore.open(here / "states").verify()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('layer_convention = "boundary"', "layer_convention is missing"),
        ('out = "states"', None),
    ],
)
def test_lines_that_may_be_left_out_or_not(here: Path, line: str, told: str | None) -> None:
    (here / "run.toml").write_text(TABLE.replace(line, ""))
    if told is None:
        assert load_extract_spec(here / "run.toml").out == here / "runs/run/states"
    else:
        with pytest.raises(ConfigurationError, match=told):
            load_extract_spec(here / "run.toml")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('source = "vllm"', "names its server"),
        ('server = "http://127.0.0.1:1"', "has no server"),
        ('server_folder = "/x"', "give both"),
        ("max_tokens = 0", "max_tokens"),
        ('dtype = "int8"', "bfloat16"),
        ("colour = 1", "unknown field 'colour'"),
    ],
)
def test_settings_that_cannot_be_meant_name_their_line(here: Path, more: str, told: str) -> None:
    (here / "run.toml").write_text(f"{TABLE}{more}\n")
    with pytest.raises(ConfigurationError, match=rf"run\.toml:\d+.*{told}"):
        load_extract_spec(here / "run.toml")


def test_conventions_of_the_file_meet_in_one(here: Path) -> None:
    text = TABLE.replace("[2, 4, 5]", "[1, 3, 4]").replace('"boundary"', '"output"')
    (here / "run.toml").write_text(text)
    spec = load_extract_spec(here / "run.toml")
    assert spec.layers == LayerIds((2, 4, 5))
    assert spec.layers.ids(LayerConvention.OUTPUT) == (1, 3, 4)


def test_too_small_a_disk_is_refused_in_numbers(here: Path) -> None:
    (here / "run.toml").write_text(TABLE.replace("margin_gb = 0", "margin_gb = 1e9"))
    ended = extract(here)
    assert ended.code == 2
    assert "of margin, but" in ended.err
    assert not (here / "states").exists()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [1, 2]}, "'loss_mask' is missing"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "all zero"),
        ({"input_ids": [1, 2], "loss_mask": [0]}, "equally long"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "must be integers"),
        ({"input_ids": [1, 2], "loss_mask": [0, 7]}, "0 or 1"),
        ({"input_ids": "ab", "loss_mask": [0, 1]}, "must be integers"),
    ],
)
def test_rows_of_token_ids_that_are_none_are_refused(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    path = tmp_path / "tokens.jsonl"
    good = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    from quantroute.errors import DatasetError

    with pytest.raises(DatasetError, match=rf"tokens\.jsonl:2: no example: .*{told}"):
        list(read_pretokenized(path))


WORKER = """
import sys, time
from quantroute.extraction import _shard
whole = _shard.ShardBuffer.add
def slowly(self, result):
    time.sleep(0.004)
    whole(self, result)
_shard.ShardBuffer.add = slowly
from quantroute.cli import main
main()
"""


def start(here: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, "extract", str(here / "run.toml"), "--no-probe"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def shards_of(here: Path) -> int:
    return len(list((here / "states/shards").glob("*.json")))


def wait_for(process: subprocess.Popen[bytes], here: Path, shards: int) -> None:
    """Until so many shards are committed, or the process has ended."""
    while process.poll() is None and shards_of(here) < shards:
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_nine_and_resume_give_the_bytes_of_an_uninterrupted_run(
    here: Path, target: Path, tmp_path: Path
) -> None:
    write_tokens(here / "tokens.jsonl", examples(400))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run.toml", "tokens.jsonl"):
        (other / name).write_bytes((here / name).read_bytes())
    (other / "target").symlink_to(target)
    assert start(other).wait() == 0
    kills = 0
    for _ in range(3):
        process = start(here)
        wait_for(process, here, shards_of(here) + 3)
        if process.poll() is None:
            time.sleep(0.013 * kills)  # not always at the same place between two commits
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        assert not (here / "states/manifest.json").exists()
    assert kills == 3
    assert start(here).wait() == 0
    assert contents(here / "states") == contents(other / "states")  # and no temporary files
    StateStore.open(here / "states").verify()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_finishes_the_shard_and_says_how_to_go_on(here: Path) -> None:
    write_tokens(here / "tokens.jsonl", examples(400))
    process = start(here)
    wait_for(process, here, 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    done = shards_of(here)
    assert done >= 2
    assert not list((here / "states").rglob("*.tmp"))
    ended = extract(here, "--json").data
    assert (ended["resumed_shards"], ended["is_complete"]) == (done, True)


@pytest.mark.parametrize("trainer", ["speculators", "specforge", "modelopt"])
def test_a_store_becomes_a_trainers_folder(here: Path, trainer: str) -> None:
    pytest.importorskip("datasets", reason="speculators' form is an arrow dataset")
    assert extract(here).code == 0
    words = ("convert", here / "states", here / "data", "--target", here / "target")
    ended = quantroute(*words, "--trainer", trainer, "--json")
    assert ended.code == 0, ended.err
    store = StateStore.open(here / "states")
    lengths = {len(item.example) for item in store}
    assert ended.data["examples"] + ended.data["duplicates"] == sum(1 for _ in store)
    assert ended.data["tokens"] >= max(lengths)
    manifest = json.loads((here / "data" / "manifest.json").read_text())
    assert manifest["state"] == "complete"
    assert ended.data["coverage"] is None
    again = quantroute(*words, "--trainer", trainer)
    assert again.code == 0
    assert f"examples, {ended.data['tokens']:,} tokens" in again.out
    cut = quantroute(*words, "--trainer", trainer, "--draft-vocab-size", 100)
    assert cut.code == 0
    coverage = json.loads((here / "data" / "manifest.json").read_text())["coverage"]
    assert 0 < coverage < 1
    assert f"draft vocabulary of 100: {coverage:.2%} of what is learnt" in cut.out


def test_states_are_read_against_their_checksums_where_that_is_asked(here: Path) -> None:
    pytest.importorskip("datasets", reason="speculators' form is an arrow dataset")
    assert extract(here).code == 0
    shard = here / "states/shards/000000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1_000] ^= 1
    shard.write_bytes(raw)
    words = ("convert", here / "states", here / "data", "--target", here / "target")
    ended = quantroute(*words, "--verify")
    assert ended.code == 2
    assert "differs from its checksum" in ended.err


def test_what_a_template_does_not_show_can_be_said_in_the_file(
    target: Path, tmp_path: Path
) -> None:
    shutil.copytree(target, tmp_path / "target")
    # Neither ends an answer nor keeps to one day.
    template = (
        CHATML.replace("<|im_end|>", "") + "{{ '' if day is defined else strftime_now('%j') }}"
    )
    letters_tokenizer(tmp_path / "target", template)
    (tmp_path / "rows.jsonl").write_text(json.dumps(make_row((None, "A"))) + "\n")
    table = TABLE.replace("tokens.jsonl", "rows.jsonl")
    (tmp_path / "run.toml").write_text(table)
    ended = extract(tmp_path, "--no-probe")
    assert ended.code == 2
    assert "(end_token)" in ended.err
    said = 'end_token = "<|im_end|>"\ntemplate_variables = { day = "1" }\n'
    (tmp_path / "run.toml").write_text(table + said)
    ended = extract(tmp_path, "--no-probe")
    assert ended.code == 0, ended.err
    assert "note: the template writes today's date; fix it with one of template_variables" in (
        ended.out
    )
    (states,) = StateStore.open(tmp_path / "states")
    assert states.example.loss_mask.sum() == 2


def test_rows_that_are_all_refused_are_told_with_the_way_out(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    letters_tokenizer(tmp_path / "target", CHATML)
    row = make_row(("thought", "A"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "run.toml").write_text(TABLE.replace("tokens.jsonl", "rows.jsonl"))
    ended = extract(tmp_path)
    assert ended.code == 2
    assert "1 no reasoning form, such as: the template does not tell how reasoning is" in ended.err
    assert "set think_closer" in ended.err


def test_a_target_that_was_trained_on_between_two_starts_is_refused(
    here: Path, target: Path, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    assert extract(here, "--shard", "0/2").code == 0
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)  # the final norm is as it was
    (here / "target").unlink()
    model.save_pretrained(tmp_path / "target")
    ended = extract(here)
    assert ended.code == 2
    assert "holds another extraction (source.weights_sample_sha256 differ)" in ended.err
    plan = json.loads((here / "states/plan.json").read_text())
    del plan["source"]["weights_sample_sha256"]  # as earlier versions wrote it
    (here / "states/plan.json").write_text(json.dumps(plan))
    assert extract(here).code == 0


def test_a_trainer_nobody_knows_is_refused(here: Path) -> None:
    assert extract(here).code == 0
    words = ("convert", here / "states", here / "data", "--target", here / "target")
    ended = quantroute(*words, "--trainer", "eagle")
    assert ended.code == 2
    assert "speculators, specforge, modelopt" in ended.err
