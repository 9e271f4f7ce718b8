"""The trainers' own commands and readers take what the writers wrote.

Each runs as a process of its own, as it does for a user: none is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from extraction.fake_vllm import serve
from quantroute.extraction import write_modelopt, write_specforge, write_speculators
from trainer_support import (
    facts,
    final_norm,
    hidden_of,
    make_examples,
    make_target,
    needs,
    states_of,
)

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), folder


def run(*command: object) -> str:
    """Standard output of a command that has to end well."""
    env = os.environ | {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@needs("speculators", "hs_connectors")
def test_stock_speculators_prepares_and_extracts_the_same(
    target: tuple[Any, Path], tmp_path: Path
) -> None:
    """`prepare-data` takes our rows; what `generate-offline-data` then fetches equals ours."""
    model, folder = target
    examples = make_examples(8)
    ours = tmp_path / "ours"
    write_speculators(states_of(model, examples), ours, facts=facts(str(folder)))
    prepared, fetched = tmp_path / "prepared", tmp_path / "fetched"
    run(
        "-m", "speculators", "prepare-data", "--model", folder, "--data", ours / "examples.jsonl",
        "--output", prepared, "--no-skip-token-freq", "--num-preprocessing-workers", 1,
    )  # fmt: skip
    counts = torch.load(prepared / "token_freq.pt", weights_only=True)
    assert counts == torch.load(ours / "token_freq.pt", weights_only=True)
    (tmp_path / "staging").mkdir()
    with serve(tmp_path / "staging", lambda ids: hidden_of(model, ids), model=str(folder)) as url:
        run(
            "-m", "speculators", "generate-offline-data", "--model", folder,
            "--preprocessed-data", prepared, "--output", fetched, "--endpoint", url,
            "--validate-outputs", "--fail-on-error", "--concurrency", 2,
        )  # fmt: skip
    own = {}
    for number, row in enumerate(datasets.load_from_disk(str(ours))):
        own[tuple(row["input_ids"].tolist())] = number
    theirs = list(fetched.glob("hs_*.safetensors"))
    assert len(theirs) == len(own) == 8
    for path in theirs:
        stock = safetensors.load_file(path)
        number = own[tuple(stock["token_ids"].tolist())]
        mine = safetensors.load_file(ours / "hidden_states" / f"hs_{number}.safetensors")
        assert torch.equal(stock["hidden_states"], mine["hidden_states"])


@needs("speculators", "hs_connectors")
def test_speculators_own_dataset_reads_every_row(target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    examples = make_examples(4)
    write_speculators(states_of(model, examples), tmp_path, facts=facts(str(folder)))
    script = """
import json, sys, warnings
warnings.simplefilter("error", UserWarning)
from speculators.train.data import ArrowDataset
rows = ArrowDataset(max_len=64, datapath=sys.argv[1], on_missing="raise")
print(json.dumps([
    [list(rows[i]["hidden_states"].shape), rows[i]["input_ids"].tolist(),
     rows[i]["loss_mask"].tolist()] for i in range(len(rows))]))
"""
    found = json.loads(run("-c", script, tmp_path).splitlines()[-1])
    assert found == [
        [[24, 192], example.input_ids.tolist(), example.loss_mask.astype(int).tolist()]
        for example in examples
    ]


@needs("specforge", "triton")
def test_specforges_own_reader_takes_the_folder_in_order(
    target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = target
    examples = make_examples(12)
    write_specforge(
        states_of(model, examples), tmp_path, facts=facts(str(folder)), norm=final_norm(model)
    )
    script = """
import json, sys
from specforge.data.preprocessing import process_offline_eagle3_sample
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.training.vocab_mapping import count_effective_feature_tokens
refs = OfflineManifestReader(sys.argv[1], validate_files=True).read()
rows = [process_offline_eagle3_sample(
    load_feature_file(ref.feature_store_uri.removeprefix("file://")), 64) for ref in refs]
counts = count_effective_feature_tokens(sys.argv[1], target_vocab_size=256)
print(json.dumps({
    "ids": [row["input_ids"][0].tolist() for row in rows],
    "shapes": [[list(row["hidden_state"].shape), list(row["target"].shape)] for row in rows],
    "counts": counts}))
"""
    found = json.loads(run("-c", script, tmp_path / "hidden_states").splitlines()[-1])
    assert found["ids"] == [example.input_ids.tolist() for example in examples]
    assert found["shapes"] == [[[1, 24, 192], [1, 24, 64]]] * 12
    supervised = Counter(
        int(token) for example in examples for token in example.input_ids[example.loss_mask]
    )
    assert found["counts"] == {str(token): count for token, count in supervised.items()}


def test_the_state_written_for_specforge_is_what_the_head_of_the_target_sees(
    target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = target
    (example,) = make_examples(1)
    write_specforge(
        states_of(model, [example]), tmp_path, facts=facts(str(folder)), norm=final_norm(model)
    )
    (path,) = (tmp_path / "hidden_states").rglob("*.ckpt")
    stored = torch.load(path, weights_only=True)
    with torch.no_grad():
        ids = torch.tensor(example.input_ids)[None]
        assert torch.equal(model.model(ids).last_hidden_state, stored["hidden_state"])
        assert torch.equal(model(ids).logits, model.lm_head(stored["hidden_state"]))


@needs("modelopt", "omegaconf", "pulp")
def test_modelopts_own_dataset_reads_every_file(target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    examples = make_examples(3)
    write_modelopt(states_of(model, examples), tmp_path, facts=facts(str(folder)))
    script = """
import json, sys
from pathlib import Path
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
paths = sorted(Path(sys.argv[1]).glob("*.pt"))
rows = OfflineSupervisedDataset(paths, answer_only_loss=True)
print(json.dumps({path.stem: [
    list(row["base_model_hidden_states"].shape), list(row["aux_hidden_states"].shape),
    row["input_ids"].tolist(), row["loss_mask"].tolist(), row["base_hidden_prenorm"]]
    for path, row in zip(paths, rows)}))
"""
    found = json.loads(run("-c", script, tmp_path / "hidden_states").splitlines()[-1])
    assert found == {
        example.key: [
            [24, 64],
            [24, 192],
            example.input_ids.tolist(),
            example.loss_mask.astype(int).tolist(),
            True,
        ]
        for example in examples
    }
