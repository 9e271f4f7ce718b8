"""Which examples, in which shards, and how much disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute._shard import Shard
from quantroute.errors import DatasetError
from quantroute.extraction._plan import DiskNeed, Selection, StateLayout, plan_shards
from quantroute.extraction._records import Example
from quantroute.policy import EvidenceTable
from states_support import example, examples

KIMI = StateLayout(slots=4, hidden_size=7_168, dtype="bfloat16")
MANY = examples(40)
ALL = Selection()


def test_kimi_takes_57_gigabytes_a_million_tokens() -> None:
    assert KIMI.state_bytes_per_token == 57_344
    need = DiskNeed(tokens=1_000_000, shards=1, layout=KIMI, free_bytes=0, margin_bytes=0)
    assert round(need.need_bytes / 1e9, 1) == 57.4  # 57.344 and 9 bytes of ids and mask
    half = StateLayout(slots=4, hidden_size=7_168, dtype="bfloat16", fp8=True)
    assert half.state_bytes_per_token == 28_672 + 16


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (-1, False)])
def test_the_disk_must_hold_need_and_margin(spare_bytes: int, fits: bool) -> None:
    bare = DiskNeed(tokens=1_000, shards=2, layout=KIMI, free_bytes=0, margin_bytes=0)
    need = DiskNeed(
        tokens=1_000,
        shards=2,
        layout=KIMI,
        margin_bytes=5_000,
        free_bytes=bare.need_bytes + 5_000 + spare_bytes,
    )
    assert need.fits is fits
    if not fits:
        with pytest.raises(DatasetError, match=r"fp8 = true .* or set max_tokens = \d"):
            need.check("states")


def test_a_full_disk_is_not_advised_to_take_no_tokens() -> None:
    need = DiskNeed(tokens=1_000, shards=2, layout=KIMI, free_bytes=10, margin_bytes=100)
    with pytest.raises(DatasetError, match=r"another disk, or set fp8 = true \(half the size\)$"):
        need.check("states")


@given(shard_tokens=st.integers(1, 300))
def test_shards_hold_every_example_once_in_order(shard_tokens: int) -> None:
    plan = plan_shards(lambda: MANY, shard_tokens=shard_tokens, selection=ALL)
    parts = dict(plan.members(lambda: MANY, set(range(len(plan.shards)))))
    assert [one.key for members in parts.values() for one in members] == [o.key for o in MANY]
    for span, members in parts.items():
        assert span.tokens == sum(map(len, members))
        assert span.tokens <= shard_tokens or len(members) == 1


@given(budget=st.integers(0, 1_000), seed=st.randoms(use_true_random=False))
def test_a_budget_is_kept_and_chooses_alike_in_any_order(budget: int, seed: object) -> None:
    selection = Selection(max_tokens=budget)
    plan = plan_shards(lambda: MANY, shard_tokens=100, selection=selection)
    shuffled = list(MANY)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    again = plan_shards(lambda: shuffled, shard_tokens=100, selection=selection)
    assert plan.tokens == again.tokens <= budget
    assert _keys(plan.taken, MANY) == _keys(again.taken, shuffled)
    assert plan.tokens + 40 > min(budget, sum(map(len, MANY)))  # no room left for the longest


def _keys(taken: bytes, of: list[Example]) -> set[str]:
    return {one.key for one, is_taken in zip(of, taken, strict=True) if is_taken}


def test_budgets_of_datasets_and_endpoints_hold_each() -> None:
    rows = [
        example(n, 10, dataset="ab"[n % 2], endpoint="xyz"[n % 3], row_class="good")
        for n in range(60)
    ]
    selection = Selection(max_tokens_per_dataset=100, max_tokens_per_endpoint=70)
    plan = plan_shards(lambda: rows, shard_tokens=1_000, selection=selection)
    ((_, members),) = plan.members(lambda: rows, {0})
    for name, limit in (("dataset", 100), ("endpoint", 70)):
        for value in {one.provenance[name] for one in members}:
            assert sum(len(o) for o in members if o.provenance[name] == value) <= limit
    assert plan.tokens >= 190
    assert plan.left_out == {"budget": 60 - plan.examples}


def test_classes_lengths_and_duplicates_are_left_out_and_counted() -> None:
    rows = [
        example(1, 10, row_class="good"),
        example(1, 10, row_class="good"),
        example(2, 10, row_class="truncated"),
        example(3, 50, row_class="good"),
    ]
    selection = Selection(row_classes={"good"}, max_example_tokens=20)
    plan = plan_shards(lambda: rows, shard_tokens=1_000, selection=selection)
    assert plan.examples == 1
    assert plan.left_out == {"duplicate": 1, "row_class": 1, "too_long": 1}


FAILED = """
[[serving]]
model = "maker/model"
provider = "Cheap"
tag = "cheap/int4"
quantization = "nvfp4"
source = "audit of run r"
date = 2026-11-30
expires = 2026-12-01
failed = true
"""


def test_answers_of_endpoints_that_failed_an_audit_are_left_out_for_good() -> None:
    rows = [
        example(1, 10, endpoint="cheap/int4", model="maker/model"),
        example(2, 10, endpoint="cheap/int4", model="maker/model:free"),
        example(3, 10, endpoint="cheap/int4", model="another/model"),
        example(4, 10, endpoint="honest/int4", model="maker/model"),
        example(5, 10, endpoint="cheap/int4"),  # of which model is not known: to be sure, left out
    ]
    selection = Selection(without_failed=EvidenceTable.parse(FAILED))
    plan = plan_shards(lambda: rows, shard_tokens=1_000, selection=selection)
    assert list(plan.taken) == [0, 0, 1, 1, 0]
    assert plan.left_out == {"endpoint_failed": 3}
    assert selection.as_dict()["without_failed"] == ["maker/model cheap/int4"]
    assert "without_failed" not in ALL.as_dict()


def test_rows_that_change_between_two_readings_are_noticed() -> None:
    readings: Iterator[list[Example]] = iter([MANY, MANY[1:]])
    plan = plan_shards(lambda: next(readings), shard_tokens=100, selection=ALL)
    with pytest.raises(DatasetError, match="changed between planning and extraction"):
        list(plan.members(lambda: next(readings), {0}))


def test_workers_share_out_every_file_once() -> None:
    workers = [Shard.parse(f"{number}/3") for number in (0, 1, 2)]
    assert [sum(worker.has(index) for worker in workers) for index in range(10)] == [1] * 10
