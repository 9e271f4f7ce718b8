"""Parts of a run: whose row is whose, how wholes are divided, and merging them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import ConfigurationError
from quantroute.generation import Shard

COUNTS = st.integers(1, 64)


@given(mark=st.binary(min_size=16, max_size=32), count=COUNTS)
def test_each_row_belongs_to_exactly_one_shard(mark: bytes, count: int) -> None:
    owners = [Shard(index, count).owns(mark) for index in range(count)]
    assert sum(owners) == 1
    assert owners == [Shard(index, count).owns(mark[:16]) for index in range(count)]


@given(whole=st.integers(0, 10**9), count=COUNTS)
def test_the_parts_of_all_shards_make_up_the_whole(whole: int, count: int) -> None:
    parts = [Shard(index, count).share(whole) for index in range(count)]
    assert sum(parts) == max(whole, count)  # nobody is left with nothing
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("text", ["8/8", "-1/8", "1", "1/0", "a/b", "", "1/8/9", "0/100000"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a shard is"):
        Shard.parse(text)


SLURM = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "3",
    "SLURM_ARRAY_TASK_MAX": "10",
    "SLURM_ARRAY_TASK_COUNT": "8",
}


def test_the_place_in_a_slurm_array_or_a_kubernetes_job_is_read() -> None:
    assert Shard.parse("auto", environment=SLURM) == Shard(2, 8)
    job = {"JOB_COMPLETION_INDEX": "7", "JOB_COMPLETIONS": "8"}
    assert Shard.parse("auto", environment=job) == Shard(7, 8)
    assert Shard.parse("3/8", environment=job) == Shard(3, 8)


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        ({}, "say --shard I/N"),
        ({"JOB_COMPLETION_INDEX": "1"}, "number of completions"),
        (SLURM | {"SLURM_ARRAY_TASK_COUNT": "4"}, "has gaps"),
        (SLURM | {"SLURM_ARRAY_TASK_MIN": ""}, "SLURM_ARRAY_TASK_MIN"),
    ],
)
def test_a_scheduler_that_does_not_say_enough_is_an_error(
    environment: dict[str, str], hint: str
) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        Shard.parse("auto", environment=environment)


def test_folders_sort_as_shards_do(tmp_path: Path) -> None:
    names = [Shard(index, 12).folder for index in range(12)]
    assert names == sorted(names)
    assert names[3] == "shard-003-of-012"
