"""Never run: type checkers read it, so that the public face keeps its types."""

from __future__ import annotations

from typing import assert_type

from quantroute import (
    NO_CAP,
    Account,
    Answer,
    Answered,
    BudgetLedger,
    ChatRequest,
    Client,
    Endpoint,
    ExclusionPolicy,
    GaveUp,
    ProviderRegistry,
    Quantization,
    RowRefused,
    Sampling,
    Service,
)
from quantroute.ledger import Balance, Statement
from quantroute.policy import BoundPolicy


async def use() -> None:
    policy = ExclusionPolicy(exclude=["Fireworks"], accept=[Quantization.FP8])
    async with (
        BudgetLedger.open("run.sqlite", cap="5.00") as ledger,
        Client(ledger=ledger, policy=policy, service=Service()) as client,
    ):
        assert_type(client, Client)
        answer = await client.chat("m/x", "Hi", sampling=Sampling(temperature=1.0))
        assert_type(answer, Answer)
        assert_type(answer.cost_pusd, int | None)
        assert_type(answer.provenance.endpoint, Endpoint)
        bound = await client.verdicts("m/x")
        assert_type(bound, BoundPolicy)
        request = ChatRequest(
            model="m/x", messages=({"role": "user", "content": "Hi"},), max_output_tokens=10
        )
        completion = await client.complete(request)
        assert_type(completion, Answered | RowRefused | GaveUp)
        assert_type(ledger.balance(Account("run")), Balance)
        assert_type(await ledger.statement(), Statement)
    async with Client(cap_usd=NO_CAP) as unlimited, ProviderRegistry() as registry:
        assert_type(unlimited.registry, ProviderRegistry)
        assert_type((await registry.endpoints("m/x")).endpoints, tuple[Endpoint, ...])
