"""The ledgers against the pure machine: the same random traffic, faults and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from property_support import examples
from quantroute.errors import BudgetExceeded, EntryStateError
from quantroute.ledger import (
    ROOT,
    Account,
    Basis,
    BudgetLedger,
    Charge,
    EntryId,
    EntryStatus,
    SharedLedger,
)
from quantroute.ledger._records import CapSet, Held, Identified, Posted, Record, Reserved, Voided
from quantroute.ledger._state import LedgerState
from quantroute.ledger._statement import balance_of
from quantroute.money import NO_CAP, Cap, PicoUSD, to_usd
from quantroute.pricing import TokenUsage
from redis_support import RedisServer

T = TypeVar("T")

ACCOUNTS = [Account(path) for path in ("", "run", "run/a", "run/b")]
CAPS = st.one_of(st.just(NO_CAP), st.integers(0, 150).map(PicoUSD))
USAGE = TokenUsage(input_tokens=3, output_tokens=5, reasoning_tokens=2, cached_tokens=1)


class Refused(Exception):
    """What the failing companion work raises."""


def failing_work(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO notes VALUES ('half', 'written')")
    raise Refused


class LedgerMachine(RuleBasedStateMachine):
    """Everything done to the ledger is done to a pure `LedgerState` too; they must agree."""

    entries: Bundle[EntryId] = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.twin = LedgerState(accounts={})
        self.is_file = False
        self.ledger: BudgetLedger | SharedLedger

    def made(self, cap: object) -> BudgetLedger | SharedLedger:
        """A ledger that is not open yet, on the same file or server each time."""
        if self.is_file:
            return BudgetLedger.open(self.path, cap=cap)
        return BudgetLedger.in_memory(cap=cap)

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / "ledger.sqlite"

    @initialize(is_file=st.booleans(), cap=CAPS)
    def open_first(self, is_file: bool, cap: Cap) -> None:
        self.is_file = is_file
        self.ledger = self.made(cap if cap is NO_CAP else to_usd(cap))
        self.run(self.ledger.__aenter__())
        self.twin.replay(CapSet(account=ROOT, cap=cap, at_s=0.0))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def both(self, coroutine: Coroutine[Any, Any, object], record: Record) -> None:
        """Do it to both; if the twin refuses, the ledger must refuse with the same error."""
        try:
            self.twin.replay(record)
        except (BudgetExceeded, EntryStateError) as refusal:
            with pytest.raises(type(refusal)):
                self.run(coroutine)
        else:
            self.run(coroutine)

    def refusal_of(self, record: Record) -> BudgetExceeded | None:
        try:
            self.twin.check(record)
        except BudgetExceeded as refusal:
            return refusal
        return None

    # -- traffic ----------------------------------------------------------------------------------

    @rule(target=entries, account=st.sampled_from(ACCOUNTS), amount=st.integers(0, 60))
    def reserve(self, account: Account, amount: int) -> EntryId:
        def record(entry_id: EntryId) -> Reserved:
            return Reserved(
                entry_id=entry_id,
                account=account,
                amount_pusd=amount,
                endpoint="a/int4",
                request_id="r",
                attempt=1,
                owner="o",
                at_s=0.0,
            )

        reserving = self.ledger.reserve(
            amount, account=account, endpoint="a/int4", request_id="r", wait=False
        )
        if refusal := self.refusal_of(record(EntryId("not made"))):
            with pytest.raises(BudgetExceeded) as caught:
                self.run(reserving)
            assert caught.value.facts == refusal.facts
            return EntryId("refused")
        entry_id = self.run(reserving)
        self.twin.replay(record(entry_id))
        return entry_id

    @rule(entry_id=entries, amount=st.integers(0, 90), has_usage=st.booleans())
    def post(self, entry_id: EntryId, amount: int, has_usage: bool) -> None:
        usage = USAGE if has_usage else None
        charge = Charge(amount_pusd=amount, basis=Basis.REPORTED, usage=usage)
        self.both(
            self.ledger.post(entry_id, charge),
            Posted(entry_id=entry_id, charge=charge, at_s=0.0),
        )

    @rule(entry_id=entries)
    def post_with_failing_work(self, entry_id: EntryId) -> None:
        charge = Charge(amount_pusd=1, basis=Basis.BOUND)
        with pytest.raises((Refused, EntryStateError)):
            self.run(self.ledger.post(entry_id, charge, also=failing_work))

    @rule(entry_id=entries)
    def void(self, entry_id: EntryId) -> None:
        self.both(
            self.ledger.void(entry_id, reason="x"),
            Voided(entry_id=entry_id, reason="x", at_s=0.0),
        )

    @rule(entry_id=entries, generation_id=st.sampled_from([None, "gen-1"]))
    def hold(self, entry_id: EntryId, generation_id: str | None) -> None:
        self.both(
            self.ledger.hold(entry_id, reason="x", generation_id=generation_id),
            Held(entry_id=entry_id, reason="x", generation_id=generation_id, at_s=0.0),
        )

    @rule(entry_id=entries)
    def identify(self, entry_id: EntryId) -> None:
        if entry_id not in self.twin.entries:
            return

        async def note_id() -> None:
            self.ledger.identify(entry_id, "gen-2")

        self.run(note_id())
        self.twin.replay(Identified(entry_id=entry_id, generation_id="gen-2", at_s=0.0))

    @rule(account=st.sampled_from(ACCOUNTS), cap=CAPS)
    def set_cap(self, account: Account, cap: Cap) -> None:
        usd = cap if cap is NO_CAP else to_usd(cap)
        self.both(self.ledger.set_cap(account, usd), CapSet(account=account, cap=cap, at_s=0.0))

    @rule(amount=st.integers(0, 60), turns=st.integers(0, 4))
    def cancel_while_reserving(self, amount: int, turns: int) -> None:
        """Whenever the cancellation comes: either an entry was handed out, or none exists."""

        async def scenario() -> None:
            task = asyncio.ensure_future(self.ledger.reserve(amount))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BudgetExceeded):
                await self.ledger.void(await task, reason="not wanted")
            await self.ledger.note("barrier", "x")  # behind the clean-up

        before = self.ledger.balance()
        self.run(scenario())
        after = self.ledger.balance()
        assert (after.pending_pusd, after.posted_pusd, after.open_entries) == (
            before.pending_pusd,
            before.posted_pusd,
            before.open_entries,
        )
        # A reservation that was voided behind counts as a voided attempt; the twin follows suit.
        self.twin.account(ROOT).voided_entries = after.voided_entries

    @precondition(lambda self: self.is_file)
    @rule()
    def reopen(self) -> None:
        """What is under way at the end is held, everything else comes back equal."""
        self.run(self.ledger.aclose())
        self.open_again()

    def open_again(self) -> None:
        self.ledger = self.made(None)
        self.run(self.ledger.__aenter__())
        for entry in list(self.twin.entries.values()):
            if entry.status is EntryStatus.RESERVED:
                self.twin.replay(
                    Held(entry_id=entry.entry_id, reason="x", generation_id=None, at_s=0.0)
                )

    # -- agreement --------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Wait until what was done so far shows in the balance."""

    @invariant()
    def balances_agree(self) -> None:
        self.catch_up()
        for path, state in self.twin.accounts.items():
            assert self.ledger.balance(path) == balance_of(path, state)

    @invariant()
    def held_entries_agree(self) -> None:
        async def unresolved() -> dict[EntryId, str | None]:
            await self.ledger.note("barrier", "x")  # behind the ids that nobody waits for
            return {entry.entry_id: entry.generation_id for entry in await self.ledger.unresolved()}

        held = {
            entry.entry_id: entry.generation_id
            for entry in self.twin.entries.values()
            if entry.status is EntryStatus.HELD
        }
        assert self.run(unresolved()) == held

    def teardown(self) -> None:
        try:
            if hasattr(self, "ledger"):
                self.run(self.ledger.verify())
                assert "half" not in self.ledger.notes
                self.run(self.ledger.aclose())
        finally:
            self.runner.close()
            self.folder.cleanup()


class SharedLedgerMachine(LedgerMachine):
    """The same on a server, with its replies lost and its workers killed."""

    url: str = ""

    def made(self, cap: object) -> SharedLedger:
        store = self.path if self.is_file else ":memory:"
        return SharedLedger.connect(self.url, name=self.folder.name, cap=cap, store=store)

    def catch_up(self) -> None:
        self.run(self.ledger.note("barrier", "x"))

    @rule(is_done=st.booleans(), after=st.sampled_from([0, 3, 3, 3, 4, 6]))
    def lose_an_answer(self, is_done: bool, after: int) -> None:
        """A batch to come fails once, before the server did it or after.

        What the invariants ask makes three batches: the fourth is the next rule's own.
        """
        link = self.ledger._link  # type: ignore[union-attr]
        script, left = link._script, after

        async def failing(**batch: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return await script(**batch)
            link._script = script
            if is_done:
                await script(**batch)
            raise ConnectionError("lost")

        link._script = failing

    @precondition(lambda self: self.is_file)
    @rule()
    def kill(self) -> None:
        """The process is gone between two steps: nobody says goodbye."""
        self.run(killed(self.ledger))  # type: ignore[arg-type]
        self.open_again()


async def killed(ledger: SharedLedger) -> None:
    """End a ledger as `kill -9` would: what its files and the server have is all that is left."""
    if ledger._heart is not None:
        ledger._heart.cancel()
    await ledger._link.aclose()
    await ledger._local.aclose()
    ledger._owner = ""


TestSqliteLedgerMachine = LedgerMachine.TestCase
TestSqliteLedgerMachine.settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None
)


@pytest.mark.redis
@pytest.mark.parametrize("machines", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_shared_ledger_machine(redis: RedisServer, machines: int) -> None:
    machine = type("Machine", (SharedLedgerMachine,), {"url": redis.url})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=machines, stateful_step_count=25, deadline=None)
    )
