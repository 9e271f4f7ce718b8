"""The draft vocabulary: what is in it, and that the map there and back is exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction import DraftVocabulary, count_supervised, special_token_ids
from quantroute.extraction._records import Example


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=60))
    size = draw(st.integers(1, len(counts)))
    forced = draw(st.lists(st.integers(0, len(counts) - 1), max_size=size, unique=True))
    return np.array(counts, dtype=np.int64), size, forced


@given(choices())
def test_every_draft_token_goes_to_its_target_token_and_back(
    case: tuple[np.ndarray, int, list[int]],
) -> None:
    counts, size, forced = case
    vocabulary = DraftVocabulary.choose(counts, size=size, forced=forced)
    assert len(vocabulary) == size
    there = [draft + int(vocabulary.d2t[draft]) for draft in range(size)]
    assert there == vocabulary.target_ids.tolist()
    assert there == sorted(set(there))
    back = np.cumsum(vocabulary.t2d) - 1  # how engines find the draft id of a target id
    assert [int(back[target]) for target in there] == list(range(size))
    assert int(vocabulary.t2d.sum()) == size


@given(choices())
def test_forced_tokens_are_in_and_no_left_out_token_is_more_frequent(
    case: tuple[np.ndarray, int, list[int]],
) -> None:
    counts, size, forced = case
    vocabulary = DraftVocabulary.choose(counts, size=size, forced=forced)
    chosen = set(vocabulary.target_ids.tolist())
    assert chosen >= set(forced)
    free = chosen - set(forced)
    left_out = set(range(len(counts))) - chosen
    if free and left_out:
        # The order of choice: frequent before rare, low ids before high ones.
        worst = min((counts[token], -token) for token in free)
        assert worst > max((counts[token], -token) for token in left_out)


@given(choices())
def test_coverage_is_the_share_of_what_is_learnt_from(
    case: tuple[np.ndarray, int, list[int]],
) -> None:
    counts, size, forced = case
    vocabulary = DraftVocabulary.choose(counts, size=size, forced=forced)
    inside = sum(int(counts[token]) for token in vocabulary.target_ids)
    assert vocabulary.coverage * max(int(counts.sum()), 1) == pytest.approx(inside)


def test_unused_room_is_filled_with_the_lowest_ids() -> None:
    counts = np.array([0, 0, 0, 5, 0, 9, 0, 0])
    vocabulary = DraftVocabulary.choose(counts, size=5, forced=[7])
    assert vocabulary.target_ids.tolist() == [0, 1, 3, 5, 7]
    assert vocabulary.d2t.tolist() == [0, 0, 1, 2, 3]
    assert vocabulary.coverage == 1.0


def test_only_supervised_tokens_count() -> None:
    examples = [
        Example(input_ids=np.array([4, 4, 5, 5]), loss_mask=np.array([0, 1, 1, 1], dtype=bool)),
        Example(input_ids=np.array([5, 0]), loss_mask=np.array([1, 0], dtype=bool)),
    ]
    assert count_supervised(examples, vocab_size=6).tolist() == [0, 0, 0, 0, 1, 3]


def test_a_token_of_another_model_is_refused() -> None:
    example = Example(input_ids=np.array([1, 300]), loss_mask=np.array([0, 1], dtype=bool))
    with pytest.raises(DatasetError, match="300"):
        count_supervised([example], vocab_size=256)


@pytest.mark.parametrize(("size", "forced"), [(0, []), (9, []), (1, [1, 2]), (4, [8]), (4, [-1])])
def test_an_impossible_vocabulary_is_refused(size: int, forced: list[int]) -> None:
    with pytest.raises(ConfigurationError):
        DraftVocabulary.choose(np.ones(8, dtype=np.int64), size=size, forced=forced)


def test_special_tokens_are_read_from_the_targets_files(tmp_path: Path) -> None:
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 9, "content": "<think>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    decoder = {"11": {"content": "<|tool|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 13]}))
    assert special_token_ids(tmp_path) == (7, 9, 11, 13)


def test_a_folder_without_special_tokens_is_not_taken_for_having_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="added tokens"):
        special_token_ids(tmp_path)
