"""The audit of exported rows against a target's weights."""

from __future__ import annotations

import datetime as dt
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audit_target import QUESTIONS, make_target, mean_answer_tokens, sample, served_rows
from quantroute.audit import (
    AuditReport,
    AuditSettings,
    CauseKind,
    EndpointReport,
    Outcome,
    Target,
    audit_html,
    audit_rows_of,
    audit_weights,
    evidence_of,
    score_rows,
    with_system,
)
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction import TargetTokenizer
from quantroute.policy import EvidenceTable
from quantroute.report.audit import audit_table

pytestmark = pytest.mark.timeout(180)  # torch alone takes long to import on a busy machine

SYSTEM = "You sell boats and nothing else"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(make_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def rows(target: Target) -> dict[str, Rows]:
    return {
        "author/int4": served_rows(target, "author/int4", rollouts=32, seed=1),
        "honest/int4": served_rows(target, "honest/int4", seed=2),
        "cheap/int4": served_rows(target, "cheap/int4", form="nvfp4", rollouts=32, seed=3),
        "hot/int4": served_rows(target, "hot/int4", temperature=1.4, rollouts=32, seed=4),
        "shop/int4": served_rows(target, "shop/int4", system=SYSTEM, rollouts=32, seed=5),
    }


@pytest.fixture(scope="module")
def report(target: Target, rows: dict[str, Rows]) -> AuditReport:
    settings = AuditSettings(
        formats=("nvfp4", "int8"),
        system_prompts=(SYSTEM,),
        reference="author/int4",
        fewest_tokens=100,
    )
    every = [row for part in rows.values() for row in part]
    return audit_weights(lambda: every, target, settings, date="2026-11-30", run="r")


def of(report: AuditReport, endpoint: str) -> EndpointReport:
    return next(item for item in report.endpoints if item.endpoint == endpoint)


def test_honest_endpoints_pass(report: AuditReport) -> None:
    for name in ("author/int4", "honest/int4"):
        found = of(report, name)
        assert found.outcome is Outcome.PASSES
        assert found.cause.hypothesis.kind is CauseKind.AS_CLAIMED
        assert found.effect.low < found.effect.high
        assert set(found.left_out) <= {"no_answer"}  # nothing but an end token
        assert not found.hints


@pytest.mark.parametrize(
    ("endpoint", "cause"),
    [
        ("cheap/int4", CauseKind.PRECISION),
        ("hot/int4", CauseKind.TEMPERATURE),
        ("shop/int4", CauseKind.SYSTEM_PROMPT),
    ],
)
def test_each_departure_is_seen_and_named(
    report: AuditReport, endpoint: str, cause: CauseKind
) -> None:
    found = of(report, endpoint)
    assert found.outcome is Outcome.FAILS
    assert found.p_adjusted < 0.01
    assert found.cause.hypothesis.kind is cause
    assert found in report.failed


def test_a_hidden_system_prompt_shows_in_the_bill(report: AuditReport) -> None:
    assert any("system prompt" in hint for hint in of(report, "shop/int4").hints)


def test_a_hidden_system_prompt_that_nobody_guessed_is_no_precision(
    target: Target, rows: dict[str, Rows]
) -> None:
    settings = AuditSettings(formats=("nvfp4", "int8"), fewest_tokens=100)
    report = audit_weights(lambda: rows["shop/int4"], target, settings)
    found = of(report, "shop/int4")
    assert found.cause.hypothesis.kind in (CauseKind.UNKNOWN, CauseKind.AS_CLAIMED)
    assert any("system prompt" in hint for hint in found.hints)


def test_another_template_is_named(target: Target, rows: dict[str, Rows], tmp_path: Path) -> None:
    template = tmp_path / "verbose.jinja"
    template.write_text(target.tokenizer.template.replace("<|im_start|>", "<|im_start|>Now zzqq "))
    odd = replace(
        target, tokenizer=TargetTokenizer.load(target.tokenizer.folder, template=template)
    )
    told = served_rows(odd, "odd/int4", rollouts=48, seed=7)
    settings = AuditSettings(formats=("nvfp4",), templates=(template,), fewest_tokens=100)
    report = audit_weights(lambda: [*told, *rows["honest/int4"]], target, settings)
    found = of(report, "odd/int4")
    assert str(found.cause.hypothesis) == "template: verbose"
    assert of(report, "honest/int4").outcome is Outcome.PASSES
    assert "template: verbose" in report.hypotheses


def test_a_prompt_that_cannot_be_rendered_is_not_said_to_be_compared(
    target: Target, rows: dict[str, Rows], tmp_path: Path
) -> None:
    template = tmp_path / "strict.jinja"
    refusal = "{%- if messages[0].role == 'system' -%}{{ raise_exception('none') }}{%- endif -%}"
    template.write_text(refusal + target.tokenizer.template)
    strict = TargetTokenizer.load(target.tokenizer.folder, template=template)
    settings = AuditSettings(formats=(), system_prompts=(SYSTEM,), fewest_tokens=100)
    few = rows["honest/int4"][:20]
    report = audit_weights(lambda: few, replace(target, tokenizer=strict), settings)
    assert report.hypotheses == ()
    assert any(line.startswith(f"system prompt: {SYSTEM}: not compared") for line in report.notes)


def test_the_wanted_power_sets_the_tokens_needed(target: Target, rows: dict[str, Rows]) -> None:
    cheap = [
        of(audit_weights(lambda: rows["cheap/int4"], target, settings), "cheap/int4")
        for settings in (AuditSettings(formats=(), power=power) for power in (0.5, 0.99))
    ]
    needed = [item.tokens_needed or 0 for item in cheap]
    assert 4.5 < needed[1] / needed[0] < 5.0  # (1.96 + 2.33)^2 / 1.96^2 = 4.78
    assert cheap[0].detectable_nats < cheap[1].detectable_nats
    with pytest.raises(ConfigurationError, match="power"):
        AuditSettings(power=1.0)


def test_the_report_is_plain_json(report: AuditReport) -> None:
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert [item["endpoint"] for item in found["endpoints"]] == [
        item.endpoint for item in report.endpoints
    ]
    assert found["endpoints"][0]["outcome"] == "fails"
    assert found["reference"] == "author/int4"


def test_the_page_stands_alone(report: AuditReport) -> None:
    page = audit_html(report)
    assert page.count("<figure>") == len(report.endpoints)
    assert "http" not in page
    assert "&lt;" not in page  # nothing is escaped twice
    table = report._repr_html_()
    assert all(item.endpoint in table for item in report.endpoints)
    assert "<style" not in table, "a notebook's other cells keep their look"


def test_the_table_names_every_endpoint_and_cause(report: AuditReport) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(audit_table(report))
    text = console.export_text()
    for item in report.endpoints:
        assert item.endpoint in text
        assert item.outcome.value in text
    assert "precision: nvfp4" in text


def test_findings_become_evidence(report: AuditReport) -> None:
    day = dt.date(2026, 11, 30)
    table = EvidenceTable.parse(evidence_of(report, date=day, native=Quantization.INT4))
    rows = {row.tag: row for row in table.serving}
    assert rows["cheap/int4"].failed
    assert rows["cheap/int4"].quantization is Quantization.NVFP4
    assert rows["hot/int4"].quantization is Quantization.UNKNOWN
    assert not rows["honest/int4"].failed
    assert rows["honest/int4"].quantization is Quantization.INT4
    assert rows["honest/int4"].expires == dt.date(2027, 1, 29)
    only_failures = EvidenceTable.parse(evidence_of(report, date=day))
    assert {row.tag for row in only_failures.serving} == {"cheap/int4", "hot/int4", "shop/int4"}
    at = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
    assert table.failed_tags("example/letters", at=at) == {"cheap/int4", "hot/int4", "shop/int4"}


def test_scores_are_those_of_the_model_itself(target: Target, rows: dict[str, Rows]) -> None:
    import torch

    (intake,) = audit_rows_of(rows["honest/int4"][:7], target.tokenizer).values()
    together = score_rows(target.model, intake.rows, tokens_at_once=200)
    for row, scores in zip(intake.rows, together, strict=True):
        with torch.inference_mode():
            logits = target.model(torch.tensor(row.input_ids)[None]).logits[0].double()
        odds = logits.log_softmax(-1)
        for place, token in enumerate(row.input_ids[row.start :]):
            expected = -float(odds[row.start + place - 1, token])
            assert scores.surprise[place] == pytest.approx(expected, abs=1e-3)


def test_answers_with_other_tokens_than_were_billed_are_left_out(
    target: Target, rows: dict[str, Rows]
) -> None:
    told = [row for row in rows["honest/int4"] if row["messages"][-1]["content"]]
    odd = json.loads(json.dumps(told))
    for row in odd[:3]:
        row["turns"][0]["output_tokens"] += 2
    odd[3]["turns"][0]["sampling"] = {"temperature": 0.0}
    odd[4]["turns"][0]["row_class"] = "error"
    (intake,) = audit_rows_of(odd, target.tokenizer).values()
    assert intake.left_out == {
        "token_count_differs": 3,
        "sampling_not_testable": 1,
        "row_class": 1,
    }
    assert len(intake.rows) == len(odd) - 5


def test_a_service_that_does_not_count_the_end_token_is_no_mismatch(
    target: Target, rows: dict[str, Rows]
) -> None:
    others = json.loads(json.dumps(rows["honest/int4"]))
    stopped = [row for row in others if row["turns"][0]["finish_reason"] == "stop"]
    for row in stopped:
        row["turns"][0]["output_tokens"] -= 1
    assert 5 < len(stopped) < len(others)  # some were cut: they have no end token to count
    (intake,) = audit_rows_of(others, target.tokenizer).values()
    assert set(intake.left_out) <= {"no_answer"}
    assert any(not row.has_end for row in intake.rows)


def test_enough_rows_are_enough(target: Target, rows: dict[str, Rows]) -> None:
    per_row = mean_answer_tokens(rows["author/int4"])
    (intake,) = audit_rows_of(
        rows["author/int4"], target.tokenizer, most_tokens=int(5 * per_row)
    ).values()
    assert 2 <= len(intake.rows) <= 14


def test_a_system_prompt_goes_before_what_there_is() -> None:
    row = {"key": "k", "messages": [{"role": "user", "content": "Hi"}], "turns": [{"turn": 0}]}
    (bare,) = with_system([row], "Be brief.")
    assert bare["messages"][0] == {"role": "system", "content": "Be brief."}
    (both,) = with_system([bare], "First.")
    assert both["messages"][0]["content"] == "First.\n\nBe brief."
    assert len(row["messages"]) == 1


def test_what_cannot_be_audited_is_refused(target: Target, rows: dict[str, Rows]) -> None:
    with pytest.raises(DatasetError, match="no answer can be scored"):
        audit_weights(list, target)
    with pytest.raises(ConfigurationError, match="author/int4"):
        audit_weights(lambda: rows["honest/int4"], target, AuditSettings(reference="author/int4"))
    with pytest.raises(ConfigurationError, match="int3"):
        AuditSettings(formats=("int3",))
    with pytest.raises(ConfigurationError, match="no such folder"):
        Target.load(target.tokenizer.folder / "nothing")


def test_few_tokens_are_called_few(target: Target) -> None:
    few = served_rows(target, "new/int4", rollouts=1, seed=9)
    report = audit_weights(lambda: few, target, AuditSettings(formats=("nvfp4",)))
    assert of(report, "new/int4").outcome in (Outcome.TOO_FEW, Outcome.PASSES)
    assert of(report, "new/int4").detectable_nats > 0.1


def test_the_sampler_of_these_tests_stops_at_the_end_token(target: Target) -> None:
    answers = sample(target.model, [[65, 66]] * 4, seed=1)
    assert all(answer.count(target.model.config.eos_token_id) <= 1 for answer in answers)
    assert QUESTIONS[0].startswith("Tell")


def test_no_folder_of_a_model_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Target.load(tmp_path)
