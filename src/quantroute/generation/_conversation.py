"""One row on its way: turn after turn, each on the model's own earlier answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Protocol

from quantroute.client import (
    Answer,
    Answered,
    AnswerSink,
    Attendance,
    ChatRequest,
    Completion,
    GaveUp,
    RowRefused,
    input_bound_tokens,
)
from quantroute.clock import Clock
from quantroute.domain import EndpointKey, Message, Sampling, canonical_messages
from quantroute.errors import BudgetExceeded, QuantrouteError
from quantroute.generation._config import RunConfig
from quantroute.generation._limits import OutputLimits, remaining_pusd
from quantroute.generation._quality import RowClass, classify
from quantroute.generation._records import RowId, RowState, StoredRow, TurnRecord, turn_record
from quantroute.generation._rows import RowStore
from quantroute.generation._statistical import StatisticalReserve
from quantroute.ledger import Account, EntryId, Ledger, lineage
from quantroute.pricing import Quote
from quantroute.routing import Mix
from quantroute.storage import Work

__all__ = ["ChatClient", "Conversation", "account_of"]

# Looked up once: until Python 3.12 a member of an enum is found four times as slowly as a constant.
_GOOD: Final = RowClass.GOOD
_OPEN: Final = RowState.OPEN
_FINISHED: Final = RowState.FINISHED


class ChatClient(Protocol):
    """What a run needs of a client; `quantroute.Client` is one."""

    @property
    def max_in_flight(self) -> int:
        """Requests on the wire at once."""

    @property
    def ledger(self) -> Ledger:
        """The open ledger that pays; rows go into its store."""

    async def complete(self, request: ChatRequest, *, sink: AnswerSink | None = None) -> Completion:
        """The whole life of one request; whatever must stop a run is raised."""

    async def slot(self) -> None:
        """Wait until another request could be sent at once."""

    def stop_admitting(self, reason: QuantrouteError) -> None:
        """Send nothing new; requests that wait raise `reason`."""

    def admit_again(self) -> None:
        """Take back `stop_admitting`."""

    def attended(self) -> AbstractAsyncContextManager[Attendance]:
        """Watches over the money of a run while in the block."""

    async def quote(self, model: str, sampling: Sampling) -> Quote | None:
        """Price ceilings of the cheapest endpoint that may serve such requests."""

    async def pace(
        self, model: str, sampling: Sampling, *, needed_per_s: float | None, answer_s: float
    ) -> Mix | None:
        """Use the cheapest endpoints that together are so fast; asked for with a deadline only."""

    def judged(self, endpoint: EndpointKey, *, accepted: bool, account: Account) -> None:
        """Hear whether an answer from `endpoint` to `account` is one that was wanted."""


def account_of(config: RunConfig, dataset: str) -> Account:
    """The account that pays for a dataset of a run."""
    return Account(f"{config.name}/{dataset}")


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Gets the missing turns of one row; each is stored with its charge as it arrives.

    Args:
        done: the stored row, if some turns are in already; the first that is missing is next.
        redo: classes of answers that are to be had anew, and everything after them.
        on_answer: told of each answer that came in.
        on_verdict: told of each that is final, not cut by a limit of ours.
        limits: the dataset's output limits, which may be below the run's while money is short.
        reserve: the soft cap above which nothing is asked, if the run has one.
    """

    client: ChatClient
    rows: RowStore
    run_id: int
    config: RunConfig
    row: RowId
    clock: Clock
    on_answer: Callable[[TurnRecord], None]
    on_verdict: Callable[[TurnRecord], None]
    limits: OutputLimits
    reserve: StatisticalReserve | None = None
    done: StoredRow | None = None
    redo: Set[RowClass] = frozenset()
    _account: Account = field(init=False)
    _chain: list[TurnRecord] = field(default_factory=list, init=False)
    _cut_at_tokens: int | None = field(default=None, init=False)
    _least_tokens: int = field(default=0, init=False)
    """Of the next answer's limit, as an earlier start has seen a smaller one cut it."""

    def __post_init__(self) -> None:
        self._account = account_of(self.config, self.row.prompt.dataset)
        if self.done is not None:
            keep = self.config.continue_after - self.redo
            self._chain.extend(takewhile(lambda turn: turn.row_class in keep, self.done.turns))
            following = self.done.turns[len(self._chain) : len(self._chain) + 1]
            if following and following[0].row_class is RowClass.TRUNCATED:
                self._least_tokens = self.limits.after_cut(following[0].max_output_tokens) or 0

    @property
    def accepted_tokens(self) -> int | None:
        """Output tokens of the row, reasoning included; None unless it is whole and good."""
        if len(self._chain) < len(self.row.prompt.turns) or self._row_class() is not _GOOD:
            return None
        return sum([record.output_tokens or 0 for record in self._chain])

    async def run(self) -> RowState:
        """The state the row ends in. Whatever must stop the run is raised; turns so far are kept.

        Raises:
            BudgetExceeded, AccountError, NoEligibleEndpoint, ConfigurationError: see `Client`.
        """
        while True:
            completion = await self._ask(len(self._chain))
            match completion:
                case Answered():
                    if self._cut_at_tokens is None and self._state() is _FINISHED:
                        return _FINISHED
                case RowRefused(status=status, problem=problem, attempts=attempts):
                    return await self._failed(RowState.REFUSED, problem, attempts, status=status)
                case GaveUp(problem=problem, attempts=attempts):
                    return await self._failed(RowState.GAVE_UP, problem, attempts)

    async def _ask(self, turn: int) -> Completion:
        messages = self._messages(turn)
        limit_tokens = await self._limit(messages)
        while True:
            try:
                request, sink = self._request(turn, messages, limit_tokens)
                if self.reserve is None:
                    return await self.client.complete(request, sink=sink)
                async with self.reserve.place(self.client.ledger) as place:
                    completion = await self.client.complete(request, sink=sink)
                    if isinstance(completion, Answered):
                        place.cost_pusd = completion.answer.cost_pusd
                    return completion
            except BudgetExceeded:
                # It may have waited for money since the limit was chosen: would one of now fit?
                self.limits.look_again()
                limit_now = await self._limit(messages)
                if limit_now >= limit_tokens:
                    raise
                limit_tokens = limit_now

    def _request(
        self, turn: int, messages: tuple[Message, ...], limit_tokens: int
    ) -> tuple[ChatRequest, AnswerSink]:
        request = ChatRequest(
            model=self.config.model,
            messages=messages,
            max_output_tokens=limit_tokens,
            sampling=self.config.sampling,
            account=self._account,
            request_id=f"{self.row.key[:12]}/{turn}",
            is_streamed=self.config.is_streamed,
        )

        def sink(answer: Answer, entry_id: EntryId) -> Work[None]:
            return self._keep(answer, entry_id, turn, messages, limit_tokens)

        return request, sink

    async def _limit(self, messages: tuple[Message, ...]) -> int:
        """The output limit to ask with: after a cut, a larger one than that."""
        if self._cut_at_tokens is not None:
            return self.limits.after_cut(self._cut_at_tokens) or self.limits.full_tokens
        if not self.limits.is_elastic:
            return self.limits.full_tokens
        input_tokens = input_bound_tokens(messages)
        if self.limits.is_plenty_for(input_tokens):
            return self.limits.full_tokens
        *above, own = map(self.client.ledger.balance, lineage(self._account))
        chosen = self.limits.choose(
            quote=await self.client.quote(self.config.model, self.config.sampling),
            input_tokens=input_tokens,
            remaining_pusd=remaining_pusd(own, above, datasets=self.limits.datasets()),
        )
        return max(chosen, self._least_tokens)

    def _messages(self, turn: int) -> tuple[Message, ...]:
        """System prompt, then question and own answer in turns, then the question of this turn."""
        prompt = self.row.prompt
        messages: list[Message] = []
        if prompt.system is not None:
            messages.append({"role": "system", "content": prompt.system})
        for question, record in zip(prompt.turns, self._chain[:turn], strict=False):
            messages.append({"role": "user", "content": question})
            messages.append(self._own_answer(record))
        messages.append({"role": "user", "content": prompt.turns[turn]})
        return tuple(messages)

    def _own_answer(self, record: TurnRecord) -> Message:
        message = {"role": "assistant", "content": record.content}
        if self.config.replay_reasoning and record.reasoning:
            message["reasoning"] = record.reasoning
        return message

    def _keep(
        self,
        answer: Answer,
        entry_id: EntryId,
        turn: int,
        messages: tuple[Message, ...],
        limit_tokens: int,
    ) -> Work[None]:
        """Judge the answer, take it into the chain, and give the work that stores it."""
        prompt = self.row.prompt
        judgement = classify(
            answer, sampling=self.config.sampling, asked=(prompt.system or "", *prompt.turns)
        )
        record = turn_record(
            answer,
            judgement,
            entry_id=entry_id,
            turn=turn,
            messages_sha256=hashlib.sha256(canonical_messages(messages).encode()).hexdigest(),
            sampling=self.config.sampling,
            max_output_tokens=limit_tokens,
            created_at_s=self.clock.time_s(),
        )
        self.on_answer(record)
        if self._is_cut_short(record, limit_tokens):
            # Kept, as everything that was paid for, but asked for again: the row stays open.
            self._cut_at_tokens = limit_tokens
            return self.rows.turn_work(
                self.run_id, self.row, record, state=RowState.OPEN, row_class=None
            )
        self._cut_at_tokens, self._least_tokens = None, 0
        # Not told of answers that a limit of ours has cut: that is no fault of the endpoint.
        self.on_verdict(record)
        self.client.judged(
            answer.provenance.endpoint.key,
            accepted=record.row_class is _GOOD,
            account=self._account,
        )
        self._chain.append(record)
        state = self._state()
        row_class = self._row_class() if state is _FINISHED else None
        return self.rows.turn_work(self.run_id, self.row, record, state=state, row_class=row_class)

    def _is_cut_short(self, record: TurnRecord, limit_tokens: int) -> bool:
        """Whether a limit of ours, not the user's, cut the answer; learns its length."""
        self.limits.lengths.add(record.output_tokens or 0)
        is_cut = record.row_class is RowClass.TRUNCATED
        return is_cut and self.limits.after_cut(limit_tokens) is not None

    def _state(self) -> RowState:
        is_whole = len(self._chain) == len(self.row.prompt.turns)
        is_over = bool(self._chain) and self._chain[-1].row_class not in self.config.continue_after
        return _FINISHED if is_whole or is_over else _OPEN

    def _row_class(self) -> RowClass:
        """A row is as good as the first of its answers that is not good."""
        for record in self._chain:
            if record.row_class is not _GOOD:
                return record.row_class
        return _GOOD

    async def _failed(
        self, state: RowState, problem: str, attempts: int, *, status: int = 0
    ) -> RowState:
        if "reasoning_content" in problem and not self.config.replay_reasoning:
            problem += " (this provider wants earlier reasoning back: set replay_reasoning)"
        await self.rows.note_failure(
            self.run_id,
            self.row,
            state=state,
            problem=problem,
            status=status,
            attempts=attempts,
            at_s=self.clock.time_s(),
        )
        return state
