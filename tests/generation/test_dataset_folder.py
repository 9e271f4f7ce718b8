"""A run as a dataset: read by Hugging Face's own library, described by a card, equal each time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from generation.fakes import (
    COST_PUSD,
    MODEL,
    FakeClient,
    Outcome,
    Script,
    echo,
    make_answer,
    make_config,
    make_prompts,
)
from quantroute.client import ChatRequest, Provenance
from quantroute.domain import Quantization, Sampling
from quantroute.errors import DatasetError
from quantroute.generation import (
    DatasetReport,
    DatasetSource,
    Prompt,
    RowClass,
    RowStore,
    Run,
    export_dataset,
    read_rows,
)
from quantroute.ledger import BudgetLedger
from quantroute.policy import Precision

pytest.importorskip("pyarrow")


async def exported(
    path: Path,
    prompts: list[Prompt],
    script: Script = echo,
    *,
    times: int = 1,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> DatasetReport:
    async with BudgetLedger.in_memory(cap="1") as ledger:
        await Run(FakeClient(ledger, script), make_config(**(config or {})), prompts).execute()
        for number in range(times):
            report = await export_dataset(
                RowStore(ledger.store),
                run="run",
                path=path if times == 1 else path / str(number),
                statement=await ledger.statement(),
                **options,
            )
    return report


def front_matter(report: DatasetReport) -> dict[str, Any]:
    _, front, _ = report.card_path.read_text().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def text_of(report: DatasetReport) -> str:
    return report.card_path.read_text().split("---\n", 2)[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names_in(folder: Path) -> set[str]:
    return {item.name for item in folder.iterdir()}


def several(*names: str) -> tuple[list[Prompt], dict[str, Any]]:
    prompts = [prompt for name in names for prompt in make_prompts(3, dataset=name)]
    # Prompts of equal text are asked once, so that each dataset needs words of its own.
    distinct = [
        Prompt(id=item.id, dataset=item.dataset, turns=(f"{item.dataset} {item.turns[0]}",))
        for item in prompts
    ]
    return distinct, {"datasets": names}


def load(path: Path, cache: Path, *config: str) -> Any:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's `datasets`")
    datasets.disable_progress_bars()
    return datasets.load_dataset(str(path), *config, split="train", cache_dir=str(cache))


async def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    report = await exported(tmp_path / "set", make_prompts(5, turns=2))
    rows = load(report.path, tmp_path / "cache")
    assert rows.num_rows == report.rows == 5
    first = rows[0]
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"] * 2
    assert first["messages"][1]["content"] == f" re: {first['messages'][0]['content']}"
    assert first["turns"][1]["endpoint"] == "moonshotai/int4"
    assert first["cost_pusd"] == 2 * COST_PUSD
    assert json.loads(first["turns"][0]["precision"])["quantization"] == "int4"


async def test_datasets_whose_names_would_become_one_stay_two(tmp_path: Path) -> None:
    """Of a hidden name one that is not, of `default` one that the readers have not taken."""
    prompts, config = several("_a", "x_a", "default", "default-set")
    report = await exported(tmp_path / "set", prompts, config=config)
    assert len({Path(file.path).parent for file in report.files}) == 4
    names = {item["config_name"] for item in front_matter(report)["configs"]}
    assert names == {"default", "_a", "x_a", "default-set", "default-set-"}


async def test_each_dataset_is_a_configuration_and_the_default_has_all(tmp_path: Path) -> None:
    prompts, config = several("b3", "default")
    report = await exported(tmp_path / "set", prompts, config=config)
    everything = load(report.path, tmp_path / "cache")
    assert everything.num_rows == 6
    for config_name, dataset in (("b3", "b3"), ("default-set", "default")):
        rows = load(report.path, tmp_path / "cache", config_name)
        assert set(rows["dataset"]) == {dataset}
        assert rows.num_rows == 3


async def test_the_library_notices_a_file_that_is_gone(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's `datasets`")
    prompts, config = several("b3", "b4")
    report = await exported(tmp_path / "set", prompts, config=config)
    card = report.card_path.read_text()
    lost = report.files[0].path
    (report.path / lost).unlink()
    report.card_path.write_text(card.replace(f'    - "{lost}"\n', "", 1))
    with pytest.raises(datasets.exceptions.NonMatchingSplitsSizesError):
        load(report.path, tmp_path / "cache")


async def test_the_files_are_those_the_other_stages_read(tmp_path: Path) -> None:
    report = await exported(tmp_path / "set", make_prompts(3))
    (file,) = report.files
    assert file.path == "data/train-00000-of-00001.parquet"
    assert {row["id"] for row in read_rows(report.path / file.path)} == {"p0", "p1", "p2"}


async def test_large_datasets_are_cut_into_files_that_know_how_many_they_are(
    tmp_path: Path,
) -> None:
    # A file is cut after a group of 1,000 rows at the earliest, once that is on disk.
    report = await exported(tmp_path / "set", make_prompts(1_001), shard_bytes=1)
    assert [(file.path, file.rows) for file in report.files] == [
        ("data/train-00000-of-00002.parquet", 1_000),
        ("data/train-00001-of-00002.parquet", 1),
    ]
    found = [row["key"] for file in report.files for row in read_rows(report.path / file.path)]
    assert len(set(found)) == len(found) == 1_001


async def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    prompts, config = several("b3", "b4")
    await exported(tmp_path, prompts, times=2, config=config, license="mit")
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


async def test_the_hashes_are_of_the_files(tmp_path: Path) -> None:
    prompts, config = several("b3", "b4")
    report = await exported(tmp_path / "set", prompts, config=config)
    manifest = json.loads(report.manifest_path.read_text())
    text = text_of(report)
    for file, told in zip(report.files, manifest["files"], strict=True):
        raw = (report.path / file.path).read_bytes()
        assert file.sha256 == told["sha256"] == hashlib.sha256(raw).hexdigest()
        assert f"| `{file.path}` | 3 | {len(raw):,} | `{file.sha256}` |" in text
    assert set(contents(report.path)) == {
        "README.md",
        "quantroute.json",
        "data/b3/train-00000-of-00001.parquet",
        "data/b4/train-00000-of-00001.parquet",
    }


async def test_the_front_matter_is_what_the_hub_reads(tmp_path: Path) -> None:
    report = await exported(
        tmp_path / "set", make_prompts(3), license="cc-by-4.0", title='A "set": #1\n- x'
    )
    front = front_matter(report)
    assert front["license"] == "cc-by-4.0"
    assert front["pretty_name"] == 'A "set": #1\n- x'
    assert front["size_categories"] == ["n<1K"]
    assert front["task_categories"] == ["text-generation"]
    assert "quantroute" in front["tags"]
    (config,) = front["configs"]
    assert config["default"]
    assert config["data_files"] == [
        {"split": "train", "path": ["data/train-00000-of-00001.parquet"]}
    ]
    (info,) = front["dataset_info"]
    assert info["splits"][0]["num_examples"] == 3
    assert '# A "set": #1 - x\n' in text_of(report)


async def test_no_licence_is_made_up(tmp_path: Path) -> None:
    report = await exported(tmp_path / "set", make_prompts(1))
    assert "license" not in front_matter(report)
    assert "No licence is stated" in text_of(report)


def judged(precision: Precision, endpoint_tag: str, label: str | None) -> Outcome:
    old = make_answer().provenance
    return make_answer(
        provenance=Provenance(
            endpoint=replace(old.endpoint, tag=endpoint_tag, quantization_label=label),
            precision=precision,
            generation_id=None,
            served_provider=old.served_provider,
            served_model=old.served_model,
            listed_at_s=old.listed_at_s,
        )
    )


def by_question(**answers: Outcome) -> Script:
    def script(request: ChatRequest) -> Outcome:
        text = request.messages[-1]["content"]
        return next((a for marker, a in answers.items() if marker in text), echo(request))

    return script


async def test_the_card_says_who_served_in_which_precision_and_on_what_ground(
    tmp_path: Path,
) -> None:
    int4 = Quantization.INT4
    script = by_question(
        **{
            "question 0": judged(
                Precision(quantization=Quantization.FP8, source="label", native=int4),
                "a/fp8",
                "fp8",
            ),
            "question 1": judged(
                Precision(quantization=Quantization.UNKNOWN, source="user", native=int4), "b", None
            ),
        }
    )
    report = await exported(tmp_path / "set", make_prompts(4), script)
    lines = {line for line in text_of(report).splitlines() if line.startswith("| `")}
    assert {
        "| `moonshotai/int4` | 2 (50.0%) | 40 | int4 | label of the endpoint list: int4; the "
        "model's own format |",
        "| `a/fp8` | 1 (25.0%) | 20 | fp8 | label of the endpoint list: fp8; the model's own "
        "format is int4 |",
        "| `b` | 1 (25.0%) | 20 | none | nobody states it; accepted by whoever ran this; the "
        "model's own format is int4 |",
        "| `a/fp8` | 0.6 / 2.5 | $0.000000 |",
    } <= lines


async def test_the_card_says_what_was_paid_asked_and_left_out(tmp_path: Path) -> None:
    source = tmp_path / "set.jsonl"
    source.write_text('{"prompt": "x"}\n')
    script = by_question(**{"question 1.0": make_answer("cut", finish_reason="length")})
    report = await exported(
        tmp_path / "set",
        make_prompts(3, turns=2),
        script,
        config={
            "sampling": Sampling(temperature=0.6),
            "datasets": ("set",),
            "sources": (DatasetSource.of(source),),
            "policy_class": "int4-only",
        },
        without={"other/int4"},
    )
    text = text_of(report)
    assert MODEL in text
    assert '| `set` | `{"temperature":0.6}` | 256 | default | 4 |' in text
    assert "| truncated | 1 |" in text
    assert "failed an audit are left out: `other/int4`." in text
    assert "`int4-only`" in text
    assert hashlib.sha256(source.read_bytes()).hexdigest() in text
    assert str(tmp_path) not in text + report.manifest_path.read_text()
    manifest = json.loads(report.manifest_path.read_text())
    assert sum(line["posted_pusd"] for line in manifest["ledger"]) == 5 * COST_PUSD
    assert manifest["endpoints"]["moonshotai/int4"]["cost_pusd"] == 4 * COST_PUSD
    assert manifest["left_out"] == {"truncated": 1}


async def test_a_rehearsal_says_so_where_nobody_can_miss_it(tmp_path: Path) -> None:
    real = await exported(tmp_path / "real", make_prompts(1), config={"policy_class": "native"})
    assert "simulator" not in text_of(real)
    report = await exported(
        tmp_path / "set", make_prompts(1), config={"policy_class": "simulated:native"}
    )
    assert "A rehearsal: a simulator wrote these answers" in text_of(report)
    assert "simulated" in front_matter(report)["tags"]


async def test_foreign_words_do_not_break_the_card(tmp_path: Path) -> None:
    answer = judged(
        Precision(quantization=Quantization.INT4, source="label"), "a|`b`\n<i>", "<b>|\nx"
    )
    report = await exported(tmp_path / "set", make_prompts(1), by_question(question=answer))
    assert front_matter(report)["configs"]
    (line,) = [line for line in text_of(report).splitlines() if "100.0%" in line]
    assert line.startswith("| `a\\|'b' <i>` | 1 (100.0%) | 20 | &lt;b>\\| x | ")


async def test_nothing_is_written_where_there_is_nothing(tmp_path: Path) -> None:
    script = by_question(question=make_answer("cut", finish_reason="length"))
    with pytest.raises(DatasetError, match="2 truncated"):
        await exported(tmp_path / "set", make_prompts(2), script)
    assert names_in(tmp_path) == set()
    report = await exported(
        tmp_path / "set", make_prompts(2), script, classes=frozenset({RowClass.TRUNCATED})
    )
    assert report.rows == 2


async def test_only_an_earlier_export_is_replaced_and_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "set"
    await exported(path, make_prompts(1))
    with pytest.raises(DatasetError, match="exists"):
        await exported(path, make_prompts(2))
    assert (await exported(path, make_prompts(2), overwrite=True)).rows == 2
    (path / ".git").mkdir()
    with pytest.raises(DatasetError, match=r"'\.git'"):
        await exported(path, make_prompts(2), overwrite=True)
    assert names_in(tmp_path) == {"set"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/README.md").write_text("mine")
    with pytest.raises(DatasetError, match="not written by an export"):
        await exported(tmp_path / "other", make_prompts(1), overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DatasetError, match="is a file"):
        await exported(tmp_path / "file", make_prompts(1), overwrite=True)
