"""Prompt files as people have them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation import DatasetSource, Prompt, builtin_prompts, read_prompts

MT_BENCH = Path(__file__).resolve().parents[3] / "shared/data/prompts/mt_bench_questions.jsonl"


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_all_four_forms_give_the_same_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "forms.jsonl",
        {"prompt": "One"},
        {"turns": ["One"]},
        {"messages": [{"role": "user", "content": "One"}]},
        {"conversations": [{"from": "human", "value": "One"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "One"}]}]},
    )
    assert [prompt.turns for prompt in read_prompts(path)] == [("One",)] * 5


def test_fields_beside_the_text_are_kept_as_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"]}
    )
    (prompt,) = read_prompts(path)
    assert (prompt.id, prompt.dataset, prompt.turns) == ("81", "a", ("a", "b"))
    assert prompt.metadata == {"question_id": 81, "category": "writing"}


def test_foreign_answers_are_left_out_and_counted_or_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "by another model"},
                {"from": "human", "value": "b"},
                {"from": "gpt", "value": "by another model"},
            ]
        },
    )
    (prompt,) = read_prompts(path)
    assert (prompt.system, prompt.turns) == ("Be brief.", ("a", "b"))
    assert prompt.metadata["replaced_answers"] == 2
    with pytest.raises(DatasetError, match="answers by another model"):
        list(read_prompts(path, answers="reject"))


def test_bom_crlf_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [prompt.turns[0] for prompt in read_prompts(path)] == ["a", "b"]


def test_unicode_line_ends_do_not_cut_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c\u2029d"}, ensure_ascii=False) + "\n")
    assert [prompt.turns[0] for prompt in read_prompts(path)] == ["a\u2028b\x85c\u2029d"]


def test_text_files_hold_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "my prompts.txt"
    path.write_text('first\n\n{"second": 2}\n')
    assert [(p.id, p.dataset, p.turns[0]) for p in read_prompts(path)] == [
        ("1", "my-prompts", "first"),
        ("3", "my-prompts", '{"second": 2}'),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "a', "cut short"),
        (b"[1]", "an object"),
        (b'{"text": "a"}', "exactly one of"),
        (b'{"prompt": "a", "turns": ["b"]}', "exactly one of"),
        (b'{"turns": []}', "at least one user turn"),
        (b'{"turns": ["a", "  "]}', "user turn 2 is empty"),
        (b'{"turns": "abc"}', "must be a list"),
        (b'{"prompt": 5}', "must be text"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "score": NaN}', "metadata"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "'tool'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "two user messages",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "come first",
        ),
        (b'{"system": 3, "prompt": "a"}', "system must be text"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    prompts = read_prompts(path)
    assert next(prompts).turns == ("fine",)
    with pytest.raises(DatasetError, match=problem) as caught:
        next(prompts)
    assert (caught.value.path, caught.value.line) == (str(path), 2)


def test_bad_lines_can_be_collected_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\nbroken\n{"prompt": "b"}\n')
    errors: list[DatasetError] = []
    assert [p.turns[0] for p in read_prompts(path, on_error=errors.append)] == ["a", "b"]
    assert [error.line for error in errors] == [2]


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        next(read_prompts(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match="cannot be read"):
        DatasetSource.of(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a b.jsonl.gz", gzip.compress(b'{"prompt": "x"}', mtime=0), "gunzip -k 'a b.jsonl.gz'"),
        ("a.zst", b"\x28\xb5\x2f\xfd....", "unzstd a.zst"),
        ("a.parquet", b"PAR1....", "Parquet"),
        ("a.txt", "eins\n".encode("utf-16"), "iconv -f UTF-16"),
        ("a.json", b'[{"prompt": "x"}]', "jq -c '.[]' a.json"),
        ("a.json", b'{\r\n  "prompt": "x"\n}', "jq -c . a.json"),
        ("a.csv", b"prompt\nx\n", "is a table"),
    ],
)
def test_other_forms_are_named_with_what_makes_them_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    remedy: str,
) -> None:
    """Once for the whole file, not for each of its lines."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(DatasetError, match=re.escape(remedy)):
        list(read_prompts(name, on_error=lambda _: None))


def test_reading_is_lazy(tmp_path: Path) -> None:
    """A fault further down does not keep the first prompts back."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 3 + b"broken\n")
    prompts = read_prompts(path)
    assert [next(prompts).turns[0] for _ in range(3)] == ["a"] * 3


def test_a_dataset_cannot_smuggle_a_path_into_the_account() -> None:
    with pytest.raises(ConfigurationError, match="dataset"):
        Prompt(id="1", dataset="a/b", turns=("x",))


@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda text: bool(text.strip())
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_text_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, turns: list[str]
) -> None:
    path = tmp_path_factory.mktemp("p") / "a.jsonl"
    path.write_bytes(json.dumps({"turns": turns}, ensure_ascii=False).encode() + b"\n")
    (prompt,) = read_prompts(path)
    assert list(prompt.turns) == turns


def test_the_embedded_prompts_are_eighty_conversations_of_two_turns() -> None:
    prompts = list(builtin_prompts())
    assert len(prompts) == 80
    assert {len(prompt.turns) for prompt in prompts} == {2}
    assert len({prompt.turns for prompt in prompts}) == 80


@pytest.mark.skipif(not MT_BENCH.exists(), reason="the shared data folder is not here")
def test_mt_bench_is_read_whole() -> None:
    prompts = list(read_prompts(MT_BENCH))
    assert len(prompts) == 80
    assert prompts[0].metadata["category"] == "writing"
    assert {len(prompt.turns) for prompt in prompts} == {2}
