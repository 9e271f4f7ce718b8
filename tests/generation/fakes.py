"""A client without a network: reserves, answers from a function, settles on a real ledger."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from quantroute.client import (
    Answer,
    Answered,
    AnswerSink,
    Attendance,
    ChatRequest,
    Completion,
    GaveUp,
    Provenance,
    RowRefused,
)
from quantroute.domain import Endpoint, EndpointKey, Quantization, Sampling
from quantroute.errors import QuantrouteError
from quantroute.generation import Prompt, RunConfig
from quantroute.ledger import Account, Basis, BudgetLedger, Charge, EntryId
from quantroute.policy import Precision
from quantroute.pricing import Pricing, Quote, TokenUsage

MODEL = "moonshotai/kimi-k2.5"
WORST_PUSD = 1_000
COST_PUSD = 100

ENDPOINT = Endpoint(
    model=MODEL,
    tag="moonshotai/int4",
    provider_name="Moonshot AI",
    quantization=Quantization.INT4,
    quantization_label="int4",
    pricing=Pricing.flat(input_usd_per_token="0.0000006", output_usd_per_token="0.0000025"),
)


def make_answer(content: str = "An answer.", **changes: Any) -> Answer:
    """A good answer, with changes."""
    values: dict[str, Any] = {
        "content": content,
        "reasoning": None,
        "finish_reason": "stop",
        "native_finish_reason": "stop",
        "usage": TokenUsage(input_tokens=10, output_tokens=20, reasoning_tokens=0),
        "cost_pusd": COST_PUSD,
        "provenance": Provenance(
            endpoint=ENDPOINT,
            precision=Precision(
                quantization=Quantization.INT4, source="label", native=Quantization.INT4
            ),
            generation_id="gen-1",
            served_provider="Moonshot AI",
            served_model="moonshotai/kimi-k2.5-0127",
            listed_at_s=1_790_000_000.0,
        ),
    }
    return Answer(**(values | changes))


def echo(request: ChatRequest) -> Answer:
    """An answer that tells which question it is for."""
    return make_answer(f" re: {request.messages[-1]['content']}")


Outcome = Answer | RowRefused | GaveUp | QuantrouteError
Script = Callable[[ChatRequest], Outcome]


@dataclass
class FakeClient:
    """Answers by `script`; a `QuantrouteError` from it is raised, as whatever stops a run is."""

    ledger: BudgetLedger
    script: Script = echo
    max_in_flight: int = 8
    rounds: int = 1
    gate: asyncio.Event | None = None
    requests: list[ChatRequest] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    peak_live: int = 0
    live: int = 0
    reason: QuantrouteError | None = None
    told: list[bool] = field(default_factory=list)

    def judged(self, endpoint: EndpointKey, *, accepted: bool, account: Account) -> None:
        self.told.append(accepted)

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Attendance]:
        yield Attendance()

    async def quote(self, model: str, sampling: Sampling) -> Quote | None:
        return ENDPOINT.pricing.quote()

    async def complete(self, request: ChatRequest, *, sink: AnswerSink | None = None) -> Completion:
        self.live += 1
        self.peak_live = max(self.peak_live, self.live)
        try:
            await self.slot()
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            try:
                entry_id = await self.ledger.reserve(WORST_PUSD, account=request.account)
                await self._answering(request, entry_id)
            finally:
                self.in_flight -= 1
            return await self._settle(request, entry_id, sink)
        finally:
            self.live -= 1

    async def _answering(self, request: ChatRequest, entry_id: EntryId) -> None:
        self.requests.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            for _ in range(self.rounds):
                await asyncio.sleep(0)
        except BaseException:
            await self.ledger.hold(entry_id, reason="cancelled while in flight")
            raise

    async def _settle(
        self, request: ChatRequest, entry_id: EntryId, sink: AnswerSink | None
    ) -> Completion:
        outcome = self.script(request)
        if not isinstance(outcome, Answer):
            await self.ledger.void(entry_id, reason="no answer")
            if isinstance(outcome, QuantrouteError):
                raise outcome
            return outcome
        work = sink(outcome, entry_id) if sink else None
        charge = Charge(amount_pusd=COST_PUSD, basis=Basis.REPORTED, usage=outcome.usage)
        await self.ledger.post(entry_id, charge, also=work)
        return Answered(answer=outcome, entry_id=entry_id, attempts=1)

    async def are_in_flight(self, count: int) -> None:
        """Wait until so many requests are on their way."""
        async with asyncio.timeout(5):
            while len(self.requests) < count:  # noqa: ASYNC110 - any await may bring it about
                await asyncio.sleep(0.001)

    async def slot(self) -> None:
        while True:
            if self.reason is not None:
                raise copy.copy(self.reason)
            if self.in_flight < self.max_in_flight:
                return
            await asyncio.sleep(0)

    def stop_admitting(self, reason: QuantrouteError) -> None:
        self.reason = self.reason or reason

    def admit_again(self) -> None:
        self.reason = None


def make_prompts(count: int, *, turns: int = 1, dataset: str = "set") -> list[Prompt]:
    return [
        Prompt(
            id=f"p{number}",
            dataset=dataset,
            turns=tuple(f"question {number}.{turn}" for turn in range(turns)),
        )
        for number in range(count)
    ]


def make_config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"name": "run", "model": MODEL, "max_output_tokens": 256}
    return RunConfig(**(values | changes))
