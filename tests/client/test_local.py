"""A server of one's own beside the service: rows from both, money for what has a price."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from client_support import MODEL, fast, opened
from local_server import LocalServer, running
from quantroute import (
    ChatRequest,
    Client,
    ConfigurationError,
    LocalEndpoint,
    NoEligibleEndpoint,
    Sampling,
    Service,
)
from quantroute.client import Answered
from quantroute.errors import KeyRejected
from quantroute.generation import Prompt, RowClass, RowStore, Run, RunConfig
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario

PRICED = {"input_usd_per_million": "0.10", "output_usd_per_million": "1.00"}
#: 11 input and 7 output tokens at these prices.
BILL_PUSD = 11 * 100_000 + 7 * 1_000_000


def beside(server: LocalServer, **changes: Any) -> LocalEndpoint:
    settings: dict[str, Any] = {
        "name": "box",
        "base_url": server.base_url,
        "serves": MODEL,
        "model": server.model,
        "quantization": "int4",
        "max_in_flight": 4,
    }
    return LocalEndpoint(**(settings | changes))


def request(text: str = "Hi", **changes: Any) -> ChatRequest:
    settings = {"model": MODEL, "max_output_tokens": 400, "request_id": text} | changes
    return ChatRequest(messages=({"role": "user", "content": text},), **settings)


async def asked(
    server: LocalServer, *, rows: int = 1, local: dict[str, Any] | None = None, **changes: Any
) -> tuple[list[Any], int]:
    """What comes of some requests that only the local server may take, and what was posted."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(server))
        simulator = await stack.enter_async_context(Simulator(kimi_mission_scenario()))
        client = Client(
            service=Service(base_url=simulator.base_url),
            only=["local"],
            local=[beside(server, **(local or {}))],
            **fast(),
        )
        await stack.enter_async_context(client)
        found = await asyncio.gather(
            *(client.complete(request(str(n), **changes)) for n in range(rows))
        )
        await client.reconcile(quiet_s=0.0, patience_s=0.1)
        await client.ledger.verify()
        assert simulator.bill.total_pusd == 0
        return found, client.ledger.balance().posted_pusd


@pytest.mark.usefixtures("key")
async def test_rows_come_from_both_and_money_goes_to_one(tmp_path: Path) -> None:
    """The free server is filled first, to its limit; the rest goes on to the service."""
    async with (
        running(LocalServer()) as server,
        Simulator(kimi_mission_scenario(time_scale=0.01), seed=1) as simulator,
        Client(
            cap_usd="5",
            ledger=tmp_path / "run.sqlite",
            service=Service(base_url=simulator.base_url),
            local=[beside(server)],
            max_in_flight=32,
        ) as client,
    ):
        config = RunConfig(name="r", model=MODEL, max_output_tokens=512, datasets=("d",))
        prompts = [Prompt(id=str(n), dataset="d", turns=(f"q{n}",)) for n in range(200)]
        report = await Run(client, config, prompts, elastic_limits=False).execute()
        rows = RowStore(client.ledger.store)
        run_id = (await rows.run("r")).run_id
        turns = [row.turns[0] async for row in rows.rows(run_id)]
        done = await client.reconcile(quiet_s=0.0)
        balance = client.ledger.balance()
        assert balance.posted_pusd == simulator.bill.total_pusd > 0
        assert balance.pending_pusd == 0
        assert done.key_difference_pusd == 0
    own = [turn for turn in turns if turn.endpoint == "local/box"]
    assert 0 < len(own) == len(server.bodies) < 200
    assert {turn.cost_pusd for turn in own} == {0}
    assert {turn.row_class for turn in own} == {RowClass.GOOD}
    assert {turn.reasoning for turn in own} == {"Thought."}
    assert own[0].precision["quantization"] == "int4"
    assert own[0].quantization_label == "int4"
    quality = {item.endpoint: item for item in report.endpoints}
    assert quality["local/box"].cost_pusd == 0
    assert quality["local/box"].answers == len(own)


@pytest.mark.usefixtures("key")
async def test_a_priced_server_is_billed_by_its_own_token_counts_and_not_to_the_key() -> None:
    async with (
        running(LocalServer()) as server,
        opened(local=[beside(server, **PRICED)]) as (
            client,
            simulator,
        ),
    ):
        found = await asyncio.gather(*(client.complete(request(str(n))) for n in range(12)))
        done = await client.reconcile(quiet_s=0.0, patience_s=1.0)
        posted_pusd = client.ledger.balance().posted_pusd
    own = [
        item.answer
        for item in found
        if isinstance(item, Answered) and item.answer.provenance.endpoint.is_local
    ]
    assert 0 < len(own) < 12
    assert {answer.cost_pusd for answer in own} == {BILL_PUSD}
    assert posted_pusd == simulator.bill.total_pusd + len(own) * BILL_PUSD
    assert done.key is not None
    assert done.key.agrees
    assert done.key_difference_pusd == 0


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_both_names_of_reasoning_are_read(name: str, is_streamed: bool) -> None:
    found, posted_pusd = await asked(
        LocalServer(reasoning_name=name), local=PRICED, is_streamed=is_streamed
    )
    answer = found[0].answer
    assert (answer.content, answer.reasoning) == ("An answer.", "Thought.")
    assert answer.flags == ()
    assert posted_pusd == BILL_PUSD


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_without_a_count_the_bound_is_charged_never_zero(is_streamed: bool) -> None:
    found, posted_pusd = await asked(
        LocalServer(has_usage=False), local=PRICED, is_streamed=is_streamed
    )
    answer = found[0].answer
    assert answer.cost_pusd == posted_pusd > 400 * 1_000_000
    assert "usage_missing" in answer.flags


@pytest.mark.usefixtures("key")
async def test_a_free_server_without_a_count_costs_nothing() -> None:
    found, posted_pusd = await asked(LocalServer(has_usage=False))
    assert found[0].answer.cost_pusd == posted_pusd == 0


@pytest.mark.usefixtures("key")
async def test_it_is_sent_plain_fields_and_not_the_services_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LocalServer()
    sampling = Sampling(temperature=1.0, reasoning=False)
    await asked(server, sampling=sampling, is_streamed=True)
    (body,) = server.bodies
    assert body == {
        "model": "kimi-local",
        "messages": [{"role": "user", "content": "0"}],
        "max_tokens": 400,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
    }
    assert "Authorization" not in server.headers[0]
    monkeypatch.setenv("BOX_KEY", "box-secret-1")
    await asked(server, local={"key_variable": "BOX_KEY"})
    assert server.headers[1]["Authorization"] == "Bearer box-secret-1"


@pytest.mark.usefixtures("key")
async def test_a_key_that_is_not_set_is_told_and_nothing_stays_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BOX_KEY", raising=False)
    with pytest.raises(KeyRejected, match="BOX_KEY"):
        await asked(LocalServer(), local={"key_variable": "BOX_KEY"})


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("status", [400, 401, 402, 404, 429, 500])
async def test_its_refusals_send_rows_elsewhere_and_stop_nothing(status: int) -> None:
    async with (
        running(LocalServer(status=status)) as server,
        opened(local=[beside(server)]) as (
            client,
            simulator,
        ),
    ):
        found = await asyncio.gather(*(client.complete(request(str(n))) for n in range(12)))
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
    assert all(isinstance(item, Answered) for item in found)
    assert not any(item.answer.provenance.endpoint.is_local for item in found)  # type: ignore[union-attr]
    assert server.bodies


@pytest.mark.usefixtures("key")
async def test_a_server_that_is_not_there_costs_nothing_and_rows_go_elsewhere() -> None:
    gone = LocalServer(base_url="http://127.0.0.1:9/v1")
    async with opened(local=[beside(gone, **PRICED)]) as (client, simulator):
        found = await asyncio.gather(*(client.complete(request(str(n))) for n in range(12)))
        assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
    assert all(isinstance(item, Answered) for item in found)


@pytest.mark.usefixtures("key")
async def test_a_connection_that_breaks_is_charged_at_the_bound() -> None:
    found, posted_pusd = await asked(LocalServer(cuts=True), local=PRICED)
    assert not isinstance(found[0], Answered)
    assert posted_pusd > 0


@pytest.mark.usefixtures("key")
async def test_its_declared_precision_is_judged_like_any_other() -> None:
    with pytest.raises(NoEligibleEndpoint, match="fp8"):
        await asked(LocalServer(), local={"quantization": "fp8"})
    with pytest.raises(NoEligibleEndpoint, match="unknown"):
        await asked(LocalServer(), local={"quantization": "unknown"})


@pytest.mark.usefixtures("key")
async def test_an_answer_of_another_model_is_quarantined() -> None:
    found, _ = await asked(LocalServer(model="llama-3"), local={"model": "kimi-local"})
    assert found[0].answer.flags == ("model_mismatch",)
    path, _ = await asked(LocalServer(model="/models/kimi-local"), local={"model": "kimi-local"})
    assert path[0].answer.flags == ()


async def test_alone_it_needs_neither_key_nor_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    async with (
        running(LocalServer()) as server,
        Client(
            service=Service(base_url="http://127.0.0.1:9/api/v1"),
            local=[beside(server)],
            **fast(cap_usd="0"),
        ) as client,
    ):
        answer = await client.chat(MODEL, "Hi")
    assert answer.content == "An answer."
    assert answer.cost_pusd == 0


@pytest.mark.usefixtures("key")
async def test_it_takes_no_more_at_once_than_its_owner_says() -> None:
    server = LocalServer()
    found, _ = await asked(server, rows=20, local={"max_in_flight": 3})
    assert all(isinstance(item, Answered) for item in found)
    assert server.peak_in_flight == 3


def test_gpu_hours_become_a_price_per_output_token() -> None:
    local = beside(
        LocalServer(base_url="http://127.0.0.1:1/v1"),
        usd_per_gpu_hour="3.60",
        gpus=8,
        output_tokens_per_s=4_000,
    )
    # 28.80 USD an hour are 0.008 USD a second for 4,000 tokens.
    assert local.endpoint.pricing.output_usd_per_token == Decimal("0.000002")
    assert local.endpoint.pricing.input_usd_per_token == 0
    assert not local.is_free


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My Box"}, "lower-case"),
        ({"quantization": "int3"}, "int3"),
        ({"base_url": "box:8000"}, "base_url"),
        ({"output_usd_per_million": "-1"}, "output_usd_per_million"),
        ({"usd_per_gpu_hour": "2"}, "needs output_tokens_per_s"),
        (
            {"usd_per_gpu_hour": "2", "output_tokens_per_s": 9, "output_usd_per_million": "1"},
            "not both",
        ),
        ({"max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        beside(LocalServer(base_url="http://127.0.0.1:1/v1"), **changes)


def test_two_of_one_name_are_refused() -> None:
    one = beside(LocalServer(base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(ConfigurationError, match="box"):
        Client(cap_usd="1", local=[one, one])


@pytest.mark.usefixtures("key")
async def test_in_delegated_routing_it_stands_beside_the_pool() -> None:
    scenario = kimi_mission_scenario(faults=Faults())
    async with (
        running(LocalServer()) as server,
        opened(scenario, routing="delegated", local=[beside(server, max_in_flight=2)]) as (
            client,
            _,
        ),
    ):
        found = await asyncio.gather(*(client.complete(request(str(n))) for n in range(30)))
    tags = {item.answer.provenance.endpoint.tag for item in found if isinstance(item, Answered)}
    assert "local/box" in tags
    assert len(tags) > 2
