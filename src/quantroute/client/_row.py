"""The life of one request: reserve, send, classify, settle, and again until something final comes.

One settle path for every outcome. The order within an attempt is the whole point:

    lease (a slot at an endpoint) -> reserve (on disk) -> send -> release the slot -> settle

so that no byte leaves unreserved, no waiting for money or for a pause holds a slot, and no answer
is settled without having been handed to the caller's sink in the same transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from quantroute._log import get_logger
from quantroute.client._answer import answer_of, who_served
from quantroute.client._body import encode_body
from quantroute.client._booking import book
from quantroute.client._catalogue import Offers, TooLong
from quantroute.client._classify import Classified, Kind, classify
from quantroute.client._delegated import Served
from quantroute.client._engine import Engine
from quantroute.client._local import LocalRoute
from quantroute.client._observe import attempt_of
from quantroute.client._outcome import (
    Answer,
    Answered,
    AnswerSink,
    ChatRequest,
    Completion,
    GaveUp,
    RowRefused,
)
from quantroute.client._replay import form_for
from quantroute.client._retry import Retry, next_step
from quantroute.client._settlement import Hold, Post, Settlement, Void, settle
from quantroute.client._stopper import stopper_of
from quantroute.client._transport import Exchange
from quantroute.domain import EndpointKey
from quantroute.errors import (
    AccountError,
    BudgetError,
    BudgetExceeded,
    ConfigurationError,
    JournalError,
    KeyRejected,
    TransportError,
)
from quantroute.ledger import EntryId
from quantroute.routing import Candidate, Feedback, Lease
from quantroute.storage import Work

__all__ = ["RowRun"]

log = get_logger("quantroute.client")


@dataclass(slots=True)
class RowRun:
    """One request on its way to a `Completion`."""

    engine: Engine
    request: ChatRequest
    sink: AnswerSink | None = None
    _attempts: int = field(default=0, init=False)
    _errors: int = field(default=0, init=False)
    _paid_errors: int = field(default=0, init=False)
    _limited_since_s: float | None = field(default=None, init=False)
    _faults_at: dict[EndpointKey, int] = field(default_factory=dict, init=False)

    async def run(self) -> Completion:
        """The completion; whatever must stop a whole run is raised."""
        engine = self.engine
        while True:
            engine.check_admission()
            try:
                offers = await engine.catalogue.offers(self.request.model, self.request.sampling)
                candidates = self._in_turn(engine.catalogue.candidates(offers, self.request))
            except TooLong as error:
                return self._refused(413, str(error))
            result = await self._attempt(candidates, offers)
            if isinstance(result, Answered):
                engine.count_answer()
                return result
            final = await self._after(result)
            if final is not None:
                return final

    def _in_turn(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The same order, but endpoints that failed this row come after those that did not."""
        if not self._faults_at:
            return candidates
        return sorted(candidates, key=lambda item: self._faults_at.get(item.endpoint.key, 0))

    # -- one attempt ------------------------------------------------------------------------------

    async def _attempt(
        self, candidates: Sequence[Candidate], offers: Offers
    ) -> Answered | Classified:
        headers: Mapping[str, str] = {}
        if not all(item.endpoint.is_local for item in candidates):
            headers = self.engine.key.headers()  # now; if it is missing, nothing is reserved
            if not self.engine.has_baseline:
                await self.engine.before_first_request()
        lease, entry_id = await self._admit(candidates)
        if self.engine.stopped_by is not None:  # while the reservation was being written
            await self._never_sent(lease, entry_id)
            self.engine.check_admission()
        self._attempts += 1
        try:
            exchange = await self._send(lease.candidate, entry_id, offers, headers)
        except TransportError as error:
            return await self._lost(lease, entry_id, error)
        except (ConfigurationError, KeyRejected):  # no session to send it by, or no key
            await self._never_sent(lease, entry_id)
            raise
        except BaseException as error:
            # Cancelled, or a bug: the request may be under way, so the reservation stays.
            self.engine.dispatcher.release(lease, Feedback.NEUTRAL)
            is_cancelled = isinstance(error, asyncio.CancelledError)
            why = "cancelled" if is_cancelled else type(error).__name__
            # With a broken store the next opening holds it; what happened is what must be told.
            with contextlib.suppress(JournalError):
                await self.engine.ledger.hold(entry_id, reason=f"{why} while in flight")
            raise
        local = self._local(lease.candidate)
        outcome = classify(exchange.reply)
        if local is not None:
            outcome = local.spec.judged(outcome)
        stopper = stopper_of(outcome, self.engine.key)
        if stopper is not None:  # before the slot is free: else the next row would go the same way
            self.engine.stop_admitting(stopper)
        served = who_served(self.engine, lease.candidate, exchange, offers)
        self._release(
            lease,
            outcome,
            is_mismatch="served_mismatch" in served.flags,
            is_elsewhere=self._rests(lease, outcome, exchange, offers),
        )
        settlement = self._settlement(lease.candidate, local, exchange, served)
        if outcome.kind is Kind.ANSWER:
            answer = answer_of(
                exchange,
                settlement,
                served,
                worst_pusd=lease.candidate.worst_pusd,
                listed_at_s=offers.listing.fetched_at_s,
                attempt=self._attempts,
            )
            self.engine.catalogue.learn(
                offers, lease.candidate, answer, account=self.request.account
            )
            answered = await self._settle_answer(answer, entry_id, settlement)
            self._tell(lease, outcome, settlement, answer=answer)
            return answered
        await book(
            self.engine.ledger, entry_id, settlement, generation_id=exchange.reply.generation_id
        )
        self._tell(lease, outcome, settlement)
        self._count_error(
            settlement, lease.candidate, is_limit=outcome.feedback is not Feedback.FAULT
        )
        return outcome

    async def _admit(self, candidates: Sequence[Candidate]) -> tuple[Lease, EntryId]:
        """A slot and the money for it; waits for either, never holding the one for the other.

        Money that was waited for buys a slot that is free at that moment, or it is given back and
        the row stands in line for a slot. Waiting with it for one endpoint would keep it from
        others, and rows with other endpoints behind it in the line.
        """
        engine = self.engine
        while True:
            engine.check_admission()
            lease = await engine.dispatcher.acquire(candidates)
            try:
                return lease, await self._reserve(lease.candidate, wait=False)
            except BudgetExceeded as shortage:
                engine.dispatcher.release(lease, Feedback.NEUTRAL)
                candidate = engine.dispatcher.cheapest_with_room(candidates)
                if not shortage.can_ever_fit and candidate is lease.candidate:
                    raise
            except BaseException:
                engine.dispatcher.release(lease, Feedback.NEUTRAL)
                raise
            entry_id = await engine.unless_stopped(
                self._reserve(candidate, wait=True), undo=self._give_back
            )
            taken = engine.dispatcher.acquire_now([candidate])
            if taken is not None:
                return taken, entry_id
            await self._give_back(entry_id)

    async def _never_sent(self, lease: Lease, entry_id: EntryId) -> None:
        self.engine.dispatcher.release(lease, Feedback.NEUTRAL)
        await self._give_back(entry_id)

    async def _give_back(self, entry_id: EntryId) -> None:
        await self.engine.ledger.void(entry_id, reason="never sent")

    # This and `_send` only pass on what is to be awaited: each coroutine between a row and what it
    # waits for is gone through whenever the row goes on.
    def _reserve(self, candidate: Candidate, *, wait: bool) -> Coroutine[Any, Any, EntryId]:
        return self.engine.ledger.reserve(
            candidate.worst_pusd,
            account=self.request.account,
            endpoint=str(candidate.endpoint.key),
            request_id=self.request.request_id,
            attempt=self._attempts + 1,
            wait=wait,
        )

    def _send(
        self,
        candidate: Candidate,
        entry_id: EntryId,
        offers: Offers,
        headers: Mapping[str, str],
    ) -> Coroutine[Any, Any, Exchange]:
        engine, local = self.engine, self._local(candidate)
        body = encode_body(
            self.request,
            max_tokens=candidate.max_tokens,
            preferences=offers.preferences(candidate),
            local=local.spec if local else None,
            replay=form_for(candidate.endpoint),
        )
        if local is not None:
            return local.transport.post(
                "/chat/completions",
                body,
                headers=local.headers(),
                is_streamed=self.request.is_streamed,
                on_id=lambda _: None,  # there are no records to look it up in
            )
        return engine.transport.post(
            "/chat/completions",
            body,
            headers=headers,
            is_streamed=self.request.is_streamed,
            on_id=lambda generation_id: engine.ledger.identify(entry_id, generation_id),
        )

    def _local(self, candidate: Candidate) -> LocalRoute | None:
        if not candidate.endpoint.is_local:
            return None
        return self.engine.locals[candidate.endpoint.key]

    async def _lost(self, lease: Lease, entry_id: EntryId, error: TransportError) -> Classified:
        """The wire failed. Before sending: nothing happened. After: nobody knows."""
        outcome = Classified(
            kind=Kind.UNKNOWN if error.maybe_billed else Kind.TRANSIENT,
            status=0,
            problem=error.problem,
        )
        self._release(lease, outcome)
        settlement: Settlement = Hold(error.problem) if error.maybe_billed else Void(error.problem)
        local = self._local(lease.candidate)
        if local is not None and error.maybe_billed:  # nobody will ever know better
            settlement = local.spec.bound(lease.candidate.worst_pusd)
        await book(self.engine.ledger, entry_id, settlement)
        self._tell(lease, outcome, settlement)
        self._count_error(settlement, lease.candidate)
        return outcome

    def _release(
        self,
        lease: Lease,
        outcome: Classified,
        *,
        is_mismatch: bool = False,
        is_elsewhere: bool = False,
    ) -> None:
        # An endpoint that is served by somebody else is as useless as one that is down.
        feedback = Feedback.FAULT if is_mismatch else outcome.feedback
        if is_elsewhere:
            feedback = Feedback.NEUTRAL
        if feedback is Feedback.FAULT:
            key = lease.candidate.endpoint.key
            self._faults_at[key] = self._faults_at.get(key, 0) + 1
        problem = "answers came from another provider" if is_mismatch else outcome.problem
        opened = self.engine.dispatcher.release(
            lease, feedback, retry_after_s=outcome.retry_after_s, problem=problem
        )
        if opened:
            self.engine.paused.add(lease.candidate.endpoint.key)
            log.warning(
                "endpoint paused", endpoint=str(lease.candidate.endpoint.key), problem=problem
            )
        elif self.engine.paused and feedback is Feedback.SUCCESS:
            self.engine.note_success(lease.candidate.endpoint.key)

    # -- settling ---------------------------------------------------------------------------------

    def _settlement(
        self, candidate: Candidate, local: LocalRoute | None, exchange: Exchange, served: Served
    ) -> Settlement:
        """By the service's word, or by the owner's rules for a server of one's own."""
        when = datetime.fromtimestamp(self.engine.clock.time_s(), UTC)
        if local is None:
            return settle(exchange.reply, pricing=served.pricing, when=when)
        return local.spec.settle(exchange.reply, bound_pusd=candidate.worst_pusd, when=when)

    async def _settle_answer(
        self, answer: Answer, entry_id: EntryId, settlement: Settlement
    ) -> Answered:
        also, failure = self._ask_sink(answer, entry_id)
        generation_id = answer.provenance.generation_id
        try:
            await book(
                self.engine.ledger, entry_id, settlement, generation_id=generation_id, also=also
            )
        except (BudgetError, asyncio.CancelledError):
            raise  # of a cancelled wait the work is done all the same
        except BaseException:
            # The sink's work failed and took the charge back with it. The money is gone whatever
            # becomes of the text.
            await book(self.engine.ledger, entry_id, settlement, generation_id=generation_id)
            raise
        if failure is not None:
            raise failure
        return Answered(answer=answer, entry_id=entry_id, attempts=self._attempts)

    def _ask_sink(
        self, answer: Answer, entry_id: EntryId
    ) -> tuple[Work[None] | None, BaseException | None]:
        """The sink's work; its failure is kept for later, since the money must be settled first."""
        if self.sink is None:
            return None, None
        try:
            return self.sink(answer, entry_id), None
        except BaseException as error:  # noqa: BLE001 - re-raised by the caller, after settling
            return None, error

    def _rests(self, lease: Lease, outcome: Classified, exchange: Exchange, offers: Offers) -> bool:
        """Whether a 429 of one company of a pool leaves others who may be asked at once."""
        error, members = exchange.reply.error, lease.candidate.members
        if outcome.kind is not Kind.RATE_LIMITED or not members or error is None:
            return False
        pauses, now_s = self.engine.catalogue.pauses, self.engine.clock.now_s()
        pauses.note(
            error.provider_name or "",
            sent_at_s=lease.sent_at_s,
            now_s=now_s,
            retry_after_s=outcome.retry_after_s,
        )
        return bool(pauses.rested([endpoint for endpoint, _ in offers.quotes], now_s))

    def _tell(
        self,
        lease: Lease,
        outcome: Classified,
        settlement: Settlement,
        *,
        answer: Answer | None = None,
    ) -> None:
        engine = self.engine
        if engine.observer is not None:
            engine.observe(
                attempt_of(
                    self.request,
                    lease.candidate,
                    outcome,
                    settlement,
                    answer=answer,
                    attempt=self._attempts,
                    ended_at_s=engine.clock.time_s(),
                    elapsed_s=engine.clock.now_s() - lease.sent_at_s,
                )
            )

    # -- between attempts -------------------------------------------------------------------------

    def _count_error(
        self, settlement: Settlement, candidate: Candidate, *, is_limit: bool = False
    ) -> None:
        if not is_limit:
            self._errors += 1
        match settlement:
            case Hold():  # nobody knows: what the attempt was expected to cost is likely gone
                lost_pusd = candidate.attempt_pusd
                self._paid_errors += 1
            case Post(charge) if charge.amount_pusd > 0:
                lost_pusd = charge.amount_pusd
                self._paid_errors += 1
            case _:
                return
        self.engine.catalogue.economy.wasted(candidate.endpoint.key, billed_pusd=lost_pusd)

    async def _after(self, outcome: Classified) -> Completion | None:
        """None to try again (after waiting), or what the row ends with."""
        engine = self.engine
        engine.errors[outcome.kind.value] += 1
        log.info(
            "attempt failed",
            request_id=self.request.request_id,
            attempt=self._attempts,
            kind=outcome.kind.value,
            status=outcome.status,
            problem=outcome.problem,
        )
        stopper = stopper_of(outcome, self.engine.key)
        if stopper is not None:
            raise stopper
        match outcome.kind:
            case Kind.REFUSED:
                return self._refused(outcome.status, outcome.problem)
            case Kind.NO_ENDPOINT:
                await engine.catalogue.refresh(self.request.model)
            case Kind.RATE_LIMITED | Kind.ACCOUNT_LIMITED if self._limited_since_s is None:
                self._limited_since_s = engine.clock.now_s()
            case _:
                pass
        return await self._wait(outcome)

    async def _wait(self, outcome: Classified) -> GaveUp | None:
        engine = self.engine
        since_s = self._limited_since_s
        step = next_step(
            outcome,
            engine.retry,
            errors=max(1, self._errors),
            paid_errors=self._paid_errors,
            limited_for_s=0.0 if since_s is None else engine.clock.now_s() - since_s,
            rng=engine.rng,
        )
        if isinstance(step, Retry):
            if step.after_s > 0:
                await engine.unless_stopped(engine.clock.sleep(step.after_s))
            return None
        problem = f"{step.reason}; last: {outcome.kind.value}, {outcome.problem}"
        log.info(
            "row given up",
            request_id=self.request.request_id,
            attempts=self._attempts,
            problem=problem,
        )
        return GaveUp(
            problem=problem,
            attempts=self._attempts,
            detail={"kind": outcome.kind.value, "status": outcome.status},
        )

    def _refused(self, status: int, problem: str) -> RowRefused:
        refused = RowRefused(status=status, problem=problem, attempts=self._attempts)
        try:
            self.engine.count_refusal(refused)
        except AccountError as error:
            self.engine.stop_admitting(error)
            raise
        log.info(
            "row refused",
            request_id=self.request.request_id,
            attempts=self._attempts,
            status=status,
            problem=problem,
        )
        return refused
