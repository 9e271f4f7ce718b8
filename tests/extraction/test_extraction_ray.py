"""Ray actors on this machine against one process: the same files, though an actor is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_support import Ended, quantroute
from quantroute.errors import ConfigurationError
from quantroute.extraction import ActorPool, StateStore
from states_support import contents, examples, tiny_llama

pytest.importorskip("torch", reason="needs quantroute[extract]")
pytest.importorskip("transformers", reason="needs quantroute[extract]")

TABLE = """
[extract]
target = "target"
rows = "tokens.jsonl"
layers = [2, 4, 5]
layer_convention = "boundary"
device = "cpu"
shard_gb = 0.0001
margin_gb = 0
batch_tokens = 256
"""


def extract(spec: Path, *options: str) -> Ended:
    return quantroute("extract", spec, *options)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "target")
    rows = [
        {"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.astype(int).tolist()}
        for one in examples(3_000)  # work for longer than one actor starts before the other
    ]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("alone", "pool"):
        (tmp_path / f"{name}.toml").write_text(f'{TABLE}out = "{name}"\n')
    return tmp_path


def on_ray(here: Path, *options: str) -> subprocess.Popen[str]:
    """The command, in a process of its own: what Ray leaves behind ends with it."""
    pytest.importorskip("ray", reason="needs quantroute[ray]")
    code = "from quantroute.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "extract", str(here / "pool.toml"), "--ray", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_actor_changes_nothing_in_the_files(here: Path) -> None:
    shards: list[int] = []
    workers: set[str] = set()
    deaths: list[str] = []
    killed: str | None = None
    with on_ray(here, "--actors", "2") as process:
        assert process.stderr is not None
        told: list[str] = []
        for line in process.stderr:
            told.append(line)
            if committed := re.match(r"shard (\d+) of \d+: .*process (\d+)", line):
                shards.append(int(committed[1]))
                workers.add(committed[2])
            elif died := re.search(r"process (\d+)\) died", line):
                deaths.append(died[1])
            if killed is None and len(workers) == 2:
                killed = min(workers)
                os.kill(int(killed), signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, "".join(told[-20:])
    assert set(deaths) == {killed}
    assert len(workers) == 3  # two, and the one in the dead one's place

    assert extract(here / "alone.toml").code == 0
    store = StateStore.open(here / "pool")
    store.verify()
    assert len(shards) > 20
    assert sorted(shards) == list(range(len(shards)))  # each told of once: disjoint
    assert contents(here / "pool") == contents(here / "alone")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_gpus_that_are_not_there_are_refused_not_waited_for(here: Path) -> None:
    process = on_ray(here, "--gpus-per-actor", "64")
    _, told = process.communicate()
    assert process.returncode == 2
    assert "want 128, this machine has" in told


def test_ray_does_all_shards(here: Path) -> None:
    ended = extract(here / "pool.toml", "--ray", "--shard", "1/2")
    assert (ended.code, "leave --shard" in ended.err) == (2, True)


def test_a_pool_has_actors() -> None:
    with pytest.raises(ConfigurationError, match="actors must be positive"):
        ActorPool(actors=0)
