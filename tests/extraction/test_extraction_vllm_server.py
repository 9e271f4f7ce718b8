"""Against a real vLLM for CPUs, with the hidden-states connector; skipped where there is none.

Its stock connector pins memory, which needs an accelerator: on CPUs alone the server dies at the
first request unless its connector is replaced by one that does not. Run with `-m vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quantroute import ChatRequest, Client, LocalEndpoint, Service
from quantroute.client import Answered
from quantroute.errors import SourceError
from quantroute.extraction import (
    Extraction,
    StateStore,
    StoreSettings,
    TransformersSource,
    VllmSource,
    probe,
    probe_examples,
)
from quantroute.generation import Prompt, RowClass, RowStore, Run, RunConfig
from quantroute.simulator import Simulator, kimi_mission_scenario
from states_support import examples, tiny_llama
from vllm_support import LAYERS, add_tokenizer, interpreter, vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "moonshotai/kimi-k2.5"


@dataclass(frozen=True)
class Served:
    url: str
    target: Path
    folder: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter()
    folder = tiny_llama(tmp_path_factory.mktemp("llama") / "target", hidden=128)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def served(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm") / "states"
    folder.mkdir()
    with vllm(target, folder) as url:
        yield Served(url, target, folder)


def beside(served: Served) -> LocalEndpoint:
    return LocalEndpoint(
        name="box",
        base_url=f"{served.url}/v1",
        serves=MODEL,
        model="tiny",
        quantization="int4",
        max_in_flight=4,
        context_tokens=256,
    )


async def test_a_real_server_agrees_with_transformers(served: Served, tmp_path: Path) -> None:
    source = VllmSource(served.target, LAYERS, server=served.url, dtype="bfloat16")
    reference = TransformersSource(served.target, LAYERS, dtype="bfloat16")
    rows = examples(40)
    report = await probe(source, probe_examples(rows), reference=reference)
    assert min(report.cosine) >= 0.999
    job = Extraction(
        target=source.target,
        layers=LAYERS,
        examples=lambda: rows,
        out=tmp_path / "states",
        settings=StoreSettings(dtype="bfloat16", shard_bytes=200_000, margin_bytes=0),
    )
    done = await job.run(source)
    await source.close()
    assert (done.is_complete, done.lost, done.examples) == (True, {}, 40)
    store = StateStore.open(tmp_path / "states")
    store.verify()
    assert [states.example.key for states in store] == [one.key for one in rows]
    assert not list(served.folder.iterdir())  # read and deleted, locks too


@pytest.mark.usefixtures("key")
async def test_a_chat_goes_through_the_client_and_is_counted(served: Served) -> None:
    async with (
        Simulator(kimi_mission_scenario()) as simulator,
        Client(
            cap_usd="1",
            service=Service(base_url=simulator.base_url),
            only=["local"],
            local=[beside(served)],
        ) as client,
    ):
        for is_streamed in (False, True):
            found = await client.complete(
                ChatRequest(
                    messages=({"role": "user", "content": "w1 w2 w3"},),
                    model=MODEL,
                    max_output_tokens=16,
                    request_id=f"one-{is_streamed}",
                    is_streamed=is_streamed,
                )
            )
            assert isinstance(found, Answered)
            assert found.answer.usage.output_tokens > 0
            assert found.answer.usage.input_tokens == 5  # user w1 w2 w3 assistant
            assert found.answer.cost_pusd == 0
        assert simulator.bill.total_pusd == 0


@pytest.mark.usefixtures("key")
async def test_rows_come_from_both_and_money_goes_to_one(served: Served, tmp_path: Path) -> None:
    async with (
        Simulator(kimi_mission_scenario(time_scale=0.01), seed=1) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
            local=[beside(served)],
            max_in_flight=16,
        ) as client,
    ):
        config = RunConfig(name="r", model=MODEL, max_output_tokens=64, datasets=("d",))
        prompts = [Prompt(id=str(n), dataset="d", turns=(f"w{n}",)) for n in range(60)]
        await Run(client, config, prompts, elastic_limits=False).execute()
        rows = RowStore(client.ledger.store)
        turns = [row.turns[0] async for row in rows.rows((await rows.run("r")).run_id)]
        done = await client.reconcile(quiet_s=0.0)
        posted_pusd = client.ledger.balance().posted_pusd
        assert posted_pusd == simulator.bill.total_pusd > 0
        assert done.key_difference_pusd == 0
    own = [turn for turn in turns if turn.endpoint == "local/box"]
    assert 0 < len(own) < len(turns) == 60
    assert {turn.cost_pusd for turn in own} == {0}
    assert sum(turn.cost_pusd for turn in turns) == posted_pusd
    assert {turn.precision["quantization"] for turn in own} == {"int4"}
    assert {turn.row_class for turn in own} <= {RowClass.GOOD, RowClass.TRUNCATED}


async def test_a_server_that_promises_and_dies_is_noticed(target: Path, tmp_path: Path) -> None:
    """The stock connector on CPUs: 200 with a path, and then no engine."""
    folder = tmp_path / "states"
    folder.mkdir()
    with vllm(target, folder, cpu_connector=False) as url:
        source = VllmSource(target, LAYERS, server=url, dtype="bfloat16", file_timeout_s=60)
        with pytest.raises(SourceError, match="status 200 and then died"):
            await probe(source, probe_examples(examples(4)))
        await source.close()
