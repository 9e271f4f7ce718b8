"""What the writers put on disk, and that a pass that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantroute.errors import ConfigurationError, DatasetError, JournalError
from quantroute.extraction import (
    FormatReport,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.storage import FileLock
from trainer_support import HIDDEN, VOCAB, RmsNorm, facts, make_examples, random_states

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
safetensors = pytest.importorskip("safetensors.torch")

NORM = RmsNorm(torch.linspace(0.5, 2.0, HIDDEN).to(torch.bfloat16), 1e-6)
Writer = Callable[..., FormatReport]
WRITERS: dict[str, Writer] = {
    "speculators": write_speculators,
    "specforge": partial(write_specforge, norm=NORM),
    "modelopt": partial(write_modelopt, norm=NORM),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def files(folder: Path) -> dict[str, bytes]:
    """The example files by name."""
    found = sorted((folder / "hidden_states").rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


class Stopped(BaseException):
    """As a kill: nothing catches it."""


def cut(states: Iterator[States], after: int) -> Iterator[States]:
    for number, item in enumerate(states):
        if number == after:
            raise Stopped
        yield item


def test_speculators_rows_and_hidden_files_agree_by_number(tmp_path: Path) -> None:
    examples = make_examples(5)
    report = write_speculators(
        random_states(examples), tmp_path, facts=facts(), draft_vocab_size=100, forced=[1, 2]
    )
    rows = datasets.load_from_disk(str(tmp_path))
    assert len(rows) == report.examples == 5
    for number, item in enumerate(random_states(examples)):
        stored = safetensors.load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert torch.equal(stored["hidden_states"], item.hidden)
        assert torch.equal(stored["token_ids"], rows[number]["input_ids"])
        assert rows[number]["input_ids"].tolist() == item.example.input_ids.tolist()
        assert rows[number]["loss_mask"].tolist() == item.example.loss_mask.astype(int).tolist()
        assert int(rows[number]["seq_len"]) == len(item.example)
    offsets = np.load(tmp_path / "d2t-100.npy")
    assert {1, 2} <= set((offsets + np.arange(100)).tolist())
    counts = torch.load(tmp_path / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == report.supervised_tokens == 5 * 18


def test_specforge_files_hold_the_state_after_the_norm_in_order(tmp_path: Path) -> None:
    examples = make_examples(12)
    WRITERS["specforge"](random_states(examples), tmp_path, facts=facts(), draft_vocab_size=64)
    paths = sorted(map(str, (tmp_path / "hidden_states").rglob("*.ckpt")))
    assert len(paths) == 12
    for path, item in zip(paths, random_states(examples), strict=True):
        stored = torch.load(path, weights_only=True)
        assert stored["input_ids"].tolist() == item.example.input_ids.tolist()
        assert stored["loss_mask"].tolist() == item.example.loss_mask.astype(int).tolist()
        assert torch.equal(stored["aux_hidden_state"][0], item.hidden[:, :3].flatten(1))
        assert torch.equal(stored["hidden_state"][0], NORM.apply(item.hidden[:, 3]))
    mapping = torch.load(tmp_path / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    assert mapping["d2t"].shape == (64,)
    assert mapping["t2d"].dtype == torch.bool
    assert mapping["t2d"].shape == (VOCAB,)


@pytest.mark.parametrize("with_norm", [True, False])
def test_modelopt_files_say_whether_the_norm_is_applied(tmp_path: Path, with_norm: bool) -> None:
    examples = make_examples(2)
    norm = NORM if with_norm else None
    write_modelopt(random_states(examples), tmp_path, facts=facts(), norm=norm)
    for item in random_states(examples):
        path = tmp_path / "hidden_states" / f"{item.example.key}.pt"
        stored = torch.load(path, weights_only=True)
        last = item.hidden[:, 3]
        assert torch.equal(stored["hidden_states"], NORM.apply(last) if with_norm else last)
        assert torch.equal(stored["aux_hidden_states"], item.hidden[:, :3].flatten(1))
        assert stored.get("hidden_states_prenorm", False) is not with_norm
        assert stored["conversation_id"] == item.example.key


def test_the_manifest_names_convention_and_state(tmp_path: Path) -> None:
    found = {}
    for name, write in WRITERS.items():
        write(random_states(make_examples(2)), tmp_path / name, facts=facts())
        content = manifest(tmp_path / name)
        found[name] = (content["layers"]["ids"], content["layers"]["convention"])
        assert content["state"] == "complete"
        assert content["last_state"].split()[0] == ("before" if name == "speculators" else "after")
    assert found["speculators"] == ([2, 4, 5], "boundary")
    assert found["specforge"] == found["modelopt"] == ([1, 3, 4], "output")


def test_a_pass_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(
    tmp_path: Path, write: Writer
) -> None:
    examples = make_examples(6)
    write(random_states(examples), tmp_path / "whole", facts=facts(), draft_vocab_size=50)
    with pytest.raises(Stopped):
        write(cut(random_states(examples), 4), tmp_path / "cut", facts=facts(), draft_vocab_size=50)
    assert manifest(tmp_path / "cut")["state"] == "writing"
    (tmp_path / "cut/.work-1/cache").mkdir(parents=True)  # a kill leaves them
    (tmp_path / "cut/.work-1/cache/rows.arrow").write_bytes(b"0")
    report = write(random_states(examples), tmp_path / "cut", facts=facts(), draft_vocab_size=50)
    assert (report.kept, report.written) == (4, 2)
    assert manifest(tmp_path / "cut") == manifest(tmp_path / "whole")
    assert files(tmp_path / "cut").keys() == files(tmp_path / "whole").keys()
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_a_damaged_file_and_one_of_other_tokens_are_written_anew(
    tmp_path: Path, write: Writer
) -> None:
    examples = make_examples(4)
    write(random_states(examples), tmp_path, facts=facts())
    good = files(tmp_path)
    torn, foreign, *_ = names = list(good)
    (tmp_path / torn).write_bytes(good[torn][:-40])
    (tmp_path / foreign).write_bytes(good[names[-1]])
    report = write(random_states(examples), tmp_path, facts=facts())
    assert (report.kept, report.written) == (2, 2)
    assert files(tmp_path).keys() == good.keys()
    again = write(random_states(examples), tmp_path, facts=facts())
    assert (again.kept, again.written) == (4, 0)


def test_a_shorter_pass_leaves_nothing_of_a_longer_one(tmp_path: Path, write: Writer) -> None:
    examples = make_examples(6)
    write(random_states(examples), tmp_path, facts=facts(), draft_vocab_size=50)
    write(random_states(examples[:3]), tmp_path, facts=facts(), draft_vocab_size=40)
    assert len(files(tmp_path)) == 3
    assert manifest(tmp_path)["examples"] == 3
    assert not list(tmp_path.glob("*-50.npy"))


def test_states_that_are_not_numbers_are_left_out_and_counted(
    tmp_path: Path, write: Writer
) -> None:
    def with_infinity() -> Iterator[States]:
        for number, item in enumerate(random_states(make_examples(4))):
            if number in (0, 2):
                item.hidden[3, 1, 5] = float("inf" if number else "nan")
            yield item

    report = write(with_infinity(), tmp_path, facts=facts())
    assert (report.examples, report.non_finite) == (2, 2)
    assert len(files(tmp_path)) == 2


def test_nothing_but_bad_states_is_an_error(tmp_path: Path, write: Writer) -> None:
    def bad() -> Iterator[States]:
        for item in random_states(make_examples(1)):
            item.hidden.fill_(float("nan"))
            yield item

    with pytest.raises(DatasetError, match="no example"):
        write(bad(), tmp_path, facts=facts())


def test_equal_examples_have_one_name_in_modelopts_folder(tmp_path: Path) -> None:
    examples = make_examples(2)
    report = WRITERS["modelopt"](random_states([*examples, examples[0]]), tmp_path, facts=facts())
    assert (report.examples, report.duplicates) == (2, 1)


def test_states_of_another_shape_are_refused(tmp_path: Path, write: Writer) -> None:
    four = facts(layers=LayerIds((1, 2, 4, 5)))
    with pytest.raises(ConfigurationError, match=r"\[24, 4, 64\]"):
        write(random_states(make_examples(1)), tmp_path, facts=four)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, write: Writer) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(DatasetError, match="not empty"):
        write(random_states(make_examples(1)), tmp_path, facts=facts())
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_a_folder_of_other_layers_is_refused(tmp_path: Path, write: Writer) -> None:
    write(random_states(make_examples(1)), tmp_path, facts=facts())
    with pytest.raises(DatasetError, match="layers"):
        write(random_states(make_examples(1)), tmp_path, facts=facts(layers=LayerIds((1, 4, 5))))


def test_two_writers_exclude_each_other(tmp_path: Path, write: Writer) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(JournalError, match="in use"):
        write(random_states(make_examples(1)), tmp_path, facts=facts())


def test_examples_are_also_there_as_text(tmp_path: Path, write: Writer) -> None:
    examples: list[Example] = make_examples(3)
    write(random_states(examples), tmp_path, facts=facts())
    rows = [json.loads(line) for line in (tmp_path / "examples.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == [example.key for example in examples]
    assert rows[1]["input_ids"] == examples[1].input_ids.tolist()
