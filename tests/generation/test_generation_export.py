"""Files out of the store: only what was chosen, whole, exactly as the model wrote it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generation.fakes import (
    COST_PUSD,
    FakeClient,
    Outcome,
    Script,
    echo,
    make_answer,
    make_config,
    make_prompts,
)
from property_support import examples
from quantroute.client import ChatRequest, GaveUp
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation import (
    DatasetSource,
    ExportReport,
    Prompt,
    RowClass,
    RowStore,
    Run,
    export_rows,
    read_rows,
)
from quantroute.ledger import BudgetLedger

ODD = "a\u2028b\u2029c\x85d\x1ce\r\nf\x00g\ufeffh\U0001f600"


def by_question(**answers: Outcome) -> Script:
    """Answers by a marker in the question; echoes otherwise."""

    def script(request: ChatRequest) -> Outcome:
        text = request.messages[-1]["content"]
        return next((a for marker, a in answers.items() if marker in text), echo(request))

    return script


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


async def exported(
    path: Path,
    prompts: list[Prompt],
    script: Script = echo,
    *,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> ExportReport:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await Run(FakeClient(ledger, script), make_config(**(config or {})), prompts).execute()
        return await export_rows(
            RowStore(ledger.store),
            run="run",
            path=path,
            statement=await ledger.statement(),
            **options,
        )


async def test_a_row_holds_the_conversation_and_where_each_answer_came_from(
    tmp_path: Path,
) -> None:
    prompt = Prompt(
        id="81", dataset="set", system="Be brief.", turns=("a", "b"), metadata={"category": "x"}
    )
    script = by_question(b=make_answer(" B", reasoning=" so"))
    await exported(tmp_path / "rows.jsonl", [prompt], script)
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " re: a", "reasoning": None},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": " B", "reasoning": " so"},
    ]
    assert (row["id"], row["dataset"], row["metadata"]) == ("81", "set", {"category": "x"})
    assert (row["cost_pusd"], row["cost_usd"]) == (2 * COST_PUSD, "0.000000000200")
    turn = row["turns"][1]
    assert turn["endpoint"] == "moonshotai/int4"
    assert turn["precision"]["quantization"] == "int4"
    assert turn["output_usd_per_token"] == "0.0000025"
    assert turn["max_output_tokens"] == 256


@pytest.mark.parametrize(
    "bad",
    [
        make_answer("cut", finish_reason="length"),
        make_answer("alien", flags=("served_mismatch",)),
        make_answer("nobody", flags=("served_unknown",)),
        make_answer("", reasoning="only thoughts"),
        make_answer("<think>oops</think>"),
    ],
)
async def test_only_good_answers_go_out(tmp_path: Path, bad: Outcome) -> None:
    report = await exported(
        tmp_path / "rows.jsonl", make_prompts(4, turns=2), by_question(**{"question 1.1": bad})
    )
    assert (report.rows, sum(report.left_out.values())) == (3, 1)
    assert {row["id"] for row in read_rows(report.path)} == {"p0", "p2", "p3"}


async def test_answers_of_another_provider_cannot_even_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="quarantined"):
        await exported(
            tmp_path / "rows.jsonl",
            make_prompts(1),
            classes=frozenset({RowClass.GOOD, RowClass.WRONG_PROVIDER}),
        )
    assert is_empty(tmp_path)


async def test_other_classes_go_out_when_chosen(tmp_path: Path) -> None:
    report = await exported(
        tmp_path / "rows.jsonl",
        make_prompts(2),
        by_question(**{"question 1": make_answer("cut", finish_reason="length")}),
        classes=frozenset({RowClass.GOOD, RowClass.TRUNCATED}),
    )
    assert (report.rows, report.left_out) == (2, {})


async def test_answers_of_endpoints_that_failed_an_audit_stay_out(tmp_path: Path) -> None:
    whole = await exported(tmp_path / "all.jsonl", make_prompts(3))
    (tag,) = {turn["endpoint"] for row in read_rows(whole.path) for turn in row["turns"]}
    report = await exported(tmp_path / "none.jsonl", make_prompts(3), without={tag})
    assert (report.rows, report.left_out) == (0, {"endpoint_failed": 3})
    other = await exported(tmp_path / "same.jsonl", make_prompts(3), without={"other/int4"})
    assert other.rows == 3
    assert json.loads(other.manifest_path.read_text())["without_endpoints"] == ["other/int4"]


async def test_unfinished_conversations_go_into_a_file_of_their_own(tmp_path: Path) -> None:
    script = by_question(
        **{
            "question 0.1": GaveUp(problem="down", attempts=8),
            "question 1.1": make_answer("cut", finish_reason="length"),
            "question 2.0": make_answer("cut", finish_reason="length"),
        }
    )
    report = await exported(tmp_path / "rows.jsonl", make_prompts(4, turns=2), script, partial=True)
    assert report.partial_path == tmp_path / "rows.partial.jsonl"
    assert [row["id"] for row in read_rows(report.path)] == ["p3"]
    partial = {row["id"]: row for row in read_rows(report.partial_path)}
    assert {name: len(row["turns"]) for name, row in partial.items()} == {"p0": 1, "p1": 1}
    assert report.left_out == {"gave_up": 1, "truncated": 2}
    assert (report.rows, report.partial_rows) == (1, 2)


async def test_a_conversation_that_ended_early_is_never_taken_for_a_whole_one(
    tmp_path: Path,
) -> None:
    report = await exported(
        tmp_path / "rows.jsonl",
        make_prompts(1, turns=2),
        by_question(**{"question 0.0": make_answer("cut", finish_reason="length")}),
        classes=frozenset({RowClass.GOOD, RowClass.TRUNCATED}),
    )
    assert (report.rows, report.left_out) == (0, {"ended_by_truncated": 1})


async def test_a_line_is_a_row_for_every_kind_of_reader(tmp_path: Path) -> None:
    answer = make_answer(ODD, reasoning=ODD)
    await exported(tmp_path / "rows.jsonl", make_prompts(3), by_question(question=answer))
    raw = (tmp_path / "rows.jsonl").read_bytes()
    assert len(raw.decode().splitlines()) == 3
    for line in raw.decode().splitlines():
        message = json.loads(line)["messages"][1]
        assert (message["content"], message["reasoning"]) == (ODD, ODD)
    assert "\U0001f600".encode() in raw  # other scripts stay readable


async def test_invalid_unicode_survives_as_escapes_and_is_no_parquet(tmp_path: Path) -> None:
    options: dict[str, Any] = {"classes": frozenset({RowClass.ERROR})}
    script = by_question(question=make_answer("a \ud800 b"))
    await exported(tmp_path / "rows.jsonl", make_prompts(1), script, **options)
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["messages"][1]["content"] == "a \ud800 b"
    with pytest.raises(ConfigurationError, match="lone surrogates"):
        await exported(tmp_path / "rows.parquet", make_prompts(1), script, **options)
    assert not (tmp_path / "rows.parquet").exists()


async def test_existing_files_are_refused_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    await exported(path, make_prompts(1))
    with pytest.raises(DatasetError, match="exists"):
        await exported(path, make_prompts(2))
    assert len(list(read_rows(path))) == 1
    report = await exported(path, make_prompts(2), overwrite=True)
    assert len(list(read_rows(path))) == 2
    assert json.loads(report.manifest_path.read_text())["rows"] == 2


async def test_an_unknown_run_or_format_is_an_error_that_helps(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\.jsonl or \.parquet"):
        await exported(tmp_path / "rows.csv", make_prompts(1))
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await Run(FakeClient(ledger), make_config(), make_prompts(1)).execute()
        with pytest.raises(DatasetError, match="known: run"):
            await export_rows(RowStore(ledger.store), run="nur", path=tmp_path / "rows.jsonl")
    assert is_empty(tmp_path)


async def test_the_manifest_ties_the_file_to_its_run(tmp_path: Path) -> None:
    source = tmp_path / "set.jsonl"
    source.write_text('{"prompt": "x"}\n')
    config = {
        "datasets": ("set",),
        "sources": (DatasetSource.of(source),),
        "policy_class": "int4-only",
    }
    report = await exported(
        tmp_path / "rows.jsonl",
        make_prompts(3, turns=2),
        by_question(**{"question 1.0": make_answer("cut", finish_reason="length")}),
        config=config,
    )
    manifest = json.loads(report.manifest_path.read_text())
    assert manifest["sha256"] == hashlib.sha256(report.path.read_bytes()).hexdigest()
    assert manifest["run_config_sha256"] == make_config(**config).config_hash()
    assert manifest["run_config"]["max_output_tokens"] == 256
    assert manifest["policy_class"] == "int4-only"
    assert manifest["sources"][0]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest["rows_per_dataset"] == {"set": 2}
    assert manifest["turns_per_class"] == {"good": 4}
    assert manifest["left_out"] == {"truncated": 1}
    assert manifest["truncation_rates"] == {"set": pytest.approx(1 / 3)}
    assert manifest["endpoints"]["moonshotai/int4"]["cost_pusd"] == 4 * COST_PUSD
    assert sum(line["posted_pusd"] for line in manifest["ledger"]) == 5 * COST_PUSD


async def test_more_rows_than_a_batch_come_out_in_order(tmp_path: Path) -> None:
    report = await exported(tmp_path / "rows.jsonl", make_prompts(150))
    ids = [row["id"] for row in read_rows(report.path)]
    assert sorted(ids) == sorted(f"p{number}" for number in range(150))


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1)
ANSWERS = st.builds(
    make_answer,
    TEXT | st.just(ODD),
    reasoning=st.none() | TEXT,
    native_finish_reason=st.none() | TEXT,
    usage=st.none(),
    cost_pusd=st.none() | st.integers(0, 2**62),
    first_byte_s=st.none() | st.floats(0, 1e6),
    flags=st.lists(st.sampled_from(["overrun", "zero_cost"]), max_size=2).map(tuple),
)
METADATA = st.dictionaries(
    TEXT,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=3), metadata=METADATA)
def test_jsonl_and_parquet_give_back_what_was_stored(
    tmp_path: Path, answers: list[Any], metadata: dict[str, Any]
) -> None:
    pytest.importorskip("pyarrow")
    everything = frozenset(RowClass) - {RowClass.WRONG_PROVIDER}
    prompts = [
        Prompt(id=ODD, dataset="set", turns=(f"{number}:",), metadata=metadata)
        for number in range(len(answers))
    ]

    def script(request: ChatRequest) -> Outcome:
        found: Outcome = answers[int(request.messages[-1]["content"].rstrip(":"))]
        return found

    async def both() -> None:
        async with BudgetLedger.in_memory(cap="1") as ledger:
            await Run(FakeClient(ledger, script), make_config(), prompts).execute()
            rows = RowStore(ledger.store)
            for name in ("rows.jsonl", "rows.parquet"):
                await export_rows(
                    rows, run="run", path=tmp_path / name, classes=everything, overwrite=True
                )

    asyncio.run(both())
    lines = list(read_rows(tmp_path / "rows.jsonl"))
    assert lines == list(read_rows(tmp_path / "rows.parquet"))
    texts = {row["messages"][0]["content"]: row["messages"][1] for row in lines}
    for number, answer in enumerate(answers):
        message = texts[f"{number}:"]
        assert (message["content"], message["reasoning"]) == (answer.content, answer.reasoning)
    assert all((row["id"], row["metadata"]) == (ODD, metadata) for row in lines)


def test_a_damaged_file_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n{"id": ')
    rows = read_rows(path)
    assert next(rows) == {"id": "a"}
    with pytest.raises(DatasetError, match=r"rows\.jsonl:2"):
        next(rows)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_an_export_that_fails_leaves_the_one_before_as_it_was(tmp_path: Path) -> None:
    """The last group of a Parquet file is written at its end."""
    pytest.importorskip("pyarrow")
    script = by_question(**{"question 1.0": make_answer("lone \ud800")})
    given: dict[str, Any] = {"run": "run", "path": tmp_path / "rows.parquet", "partial": True}
    wanted = frozenset({RowClass.GOOD, RowClass.ERROR})
    async with BudgetLedger.in_memory(cap="1") as ledger:
        rows = RowStore(ledger.store)
        await Run(FakeClient(ledger, script), make_config(), make_prompts(1)).execute()
        await export_rows(rows, classes=wanted, **given)
        before = contents(tmp_path)
        await Run(FakeClient(ledger, script), make_config(), make_prompts(2)).execute()
        with pytest.raises(ConfigurationError, match="lone surrogates"):
            await export_rows(rows, classes=wanted, overwrite=True, **given)
    assert contents(tmp_path) == before
