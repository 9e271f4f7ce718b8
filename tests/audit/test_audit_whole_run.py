"""A run through the service: generate, export, audit; one endpoint secretly serves another copy."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from audit_target import LIMIT_TOKENS, make_target, prompt_ids, sample
from cli_support import quantroute
from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.audit import Target
from quantroute.domain import Sampling
from quantroute.generation import Prompt, RowClass, RowStore, Run, RunConfig, export_rows
from quantroute.policy import EvidenceTable, ExclusionPolicy
from quantroute.simulator import (
    DEFAULT_API_KEY,
    AnswerRequest,
    EndpointSpec,
    ModelSpec,
    Scenario,
    SimulatedAnswer,
    Simulator,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "example/letters"
PRICES = {"prompt": "0.000001", "completion": "0.000002"}
CHEAT = "cheap/unknown"
TAGS = ("author/int4", "honest/int4", CHEAT)
ROLLOUTS = 80


class Letters:
    """The small target behind every endpoint; one rounds its weights once more.

    Answers are drawn in batches, since all prompts are the same.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.drawn: dict[str, list[list[int]]] = {}

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        ids = self._next(request.endpoint, request.messages[-1]["content"])
        ended = ids[-1] == self.target.model.config.eos_token_id
        return SimulatedAnswer(
            content=self.target.tokenizer.decode(ids[:-1] if ended else ids),
            output_tokens=len(ids),
            finish_reason="stop" if ended else "length",
        )

    def _next(self, endpoint: str, question: str) -> list[int]:
        if not self.drawn.get(endpoint):
            prompt = prompt_ids(self.target, question)
            with self.target.in_format("nvfp4" if endpoint == CHEAT else None):
                self.drawn[endpoint] = sample(
                    self.target.model, [prompt] * ROLLOUTS, seed=TAGS.index(endpoint) + 1
                )
        return self.drawn[endpoint].pop()


def scenario() -> Scenario:
    specs = tuple(
        EndpointSpec(tag=tag, quantization=tag.split("/")[1], pricing=PRICES) for tag in TAGS
    )
    return Scenario(name="letters", models=(ModelSpec(id=MODEL, endpoints=specs),))


async def exported(target: Target, folder: Path) -> list[Path]:
    """Rows of every endpoint, each asked by a run of its own."""
    paths = []
    async with Simulator(scenario(), seed=5, backend=Letters(target)) as simulator:
        for tag in TAGS:
            path = folder / f"{tag.split('/')[0]}.jsonl"
            policy = ExclusionPolicy(native="int4", accept_unknown=True, only=(tag,))
            async with (
                BudgetLedger.open(folder / "run.sqlite", cap="5.00") as ledger,
                Client(
                    ledger=ledger,
                    policy=policy,
                    service=Service(base_url=simulator.base_url),
                    key=EnvKey("AUDIT_TEST_KEY"),
                ) as client,
            ):
                name = tag.split("/")[0]
                config = RunConfig(
                    name=name,
                    model=MODEL,
                    max_output_tokens=LIMIT_TOKENS,
                    sampling=Sampling(temperature=1.0),
                    rollouts=ROLLOUTS,
                    datasets=("d",),
                )
                prompts = [Prompt(id="p", dataset="d", turns=("Tell me about rivers",))]
                await Run(client, config, iter(prompts), elastic_limits=False).execute()
                await export_rows(
                    RowStore(ledger.store),
                    run=name,
                    path=path,
                    classes=frozenset({RowClass.GOOD, RowClass.TRUNCATED, RowClass.LOOP}),
                )
                paths.append(path)
    return paths


def found(report: dict[str, Any]) -> dict[str, str]:
    return {item["endpoint"]: item["outcome"] for item in report["endpoints"]}


async def test_the_secret_copy_is_named_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setenv("AUDIT_TEST_KEY", DEFAULT_API_KEY)
    folder = make_target(tmp_path / "target")
    paths = await exported(Target.load(folder), tmp_path)
    spec = tmp_path / "run.toml"
    spec.write_text(
        f"[audit]\nrows = {json.dumps([path.name for path in paths])}\ntarget = 'target'\n"
        "reference = 'author/int4'\nfewest_tokens = 200\nformats = ['nvfp4', 'int8']\n"
    )
    page, evidence = tmp_path / "audit.html", tmp_path / "audit.toml"
    ended = await asyncio.to_thread(
        quantroute,
        *("audit", spec, "--html", page, "--write-evidence", evidence),
        *("--native", "int4", "--json"),
    )
    assert ended.code == 4, ended.err
    assert found(ended.data) == {
        "author/int4": "passes",
        "honest/int4": "passes",
        CHEAT: "fails",
    }
    assert ended.data["endpoints"][0]["cause"]["text"] == "precision: nvfp4"
    assert page.read_text().count("<figure>") == 3
    assert "http" not in page.read_text()
    rows = {row["tag"]: row for row in tomllib.loads(evidence.read_text())["serving"]}
    assert (rows[CHEAT]["failed"], rows[CHEAT]["quantization"]) == (True, "nvfp4")
    assert (rows["honest/int4"]["failed"], rows["honest/int4"]["quantization"]) == (False, "int4")
    policy = ExclusionPolicy(accept_unknown=True, evidence=EvidenceTable.load(evidence))
    assert policy.evidence.serving

    printed = await asyncio.to_thread(quantroute, "audit", spec)
    assert "fails" in printed.out
    again = await asyncio.to_thread(quantroute, "audit", spec, "--write-evidence", evidence)
    assert (again.code, "exists" in again.err) == (2, True)

    for name, left in (("cheap", 0), ("honest", 1)):
        run = tmp_path / name
        run.mkdir()
        (run / "run.sqlite").write_bytes((tmp_path / "run.sqlite").read_bytes())
        ended = await asyncio.to_thread(
            quantroute,
            *("export", run, run / "rows.jsonl", "--class", "good", "--class", "truncated"),
            *("--class", "loop", "--drop-failed-audit", evidence, "--json"),
        )
        assert ended.code == 0, ended.err
        assert (ended.data["rows"] > 0) == bool(left)
        assert ("endpoint_failed" in ended.data["left_out"]) == (not left)
