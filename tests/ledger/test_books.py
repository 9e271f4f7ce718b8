"""Many records a transaction: the tables kept beside the journal are what replaying it gives."""

from __future__ import annotations

import asyncio
import sqlite3

from hypothesis import given, settings
from hypothesis import strategies as st

from quantroute.errors import BudgetExceeded, EntryStateError
from quantroute.ledger import ROOT, Account, Basis, BudgetLedger, Charge, EntryId
from quantroute.ledger._records import (
    CapSet,
    Held,
    Identified,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
)
from quantroute.ledger._state import LedgerState
from quantroute.money import PicoUSD
from quantroute.storage import SqliteStore

ENTRIES = [EntryId(name) for name in "abcd"]
CHARGES = [
    Charge(amount_pusd=2, basis=Basis.REPORTED, generation_id="gen-1"),
    Charge(amount_pusd=9, basis=Basis.RECORD, generation_id="gen-1"),
]
entry_ids = st.sampled_from(ENTRIES)
at_s = st.just(0.0)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        Reserved,
        entry_id=entry_ids,
        account=st.sampled_from([ROOT, Account("run"), Account("run/a")]),
        amount_pusd=st.integers(0, 8),
        endpoint=st.just("a/int4"),
        request_id=st.just(""),
        attempt=st.just(1),
        owner=st.just("o"),
        at_s=at_s,
    ),
    st.builds(Posted, entry_id=entry_ids, charge=st.sampled_from(CHARGES), at_s=at_s),
    st.builds(Voided, entry_id=entry_ids, reason=st.just("free"), at_s=at_s),
    st.builds(Identified, entry_id=entry_ids, generation_id=st.just("gen-2"), at_s=at_s),
    st.builds(
        Held,
        entry_id=entry_ids,
        reason=st.just("lost"),
        generation_id=st.sampled_from([None, "gen-1"]),
        at_s=at_s,
    ),
    st.builds(
        CapSet, account=st.just(Account("run")), cap=st.integers(0, 30).map(PicoUSD), at_s=at_s
    ),
    st.builds(Noted, key=st.just("k"), value=st.sampled_from(["1", "2"]), at_s=at_s),
)


def allowed(batches: list[list[Record]]) -> list[list[Record]]:
    """Those records that may follow one another."""
    twin = LedgerState(resolved={})
    kept: list[list[Record]] = []
    for batch in batches:
        kept.append([])
        for record in batch:
            try:
                twin.replay(record)
            except (BudgetExceeded, EntryStateError):
                continue
            kept[-1].append(record)
    return kept


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(records, max_size=12), max_size=4), st.booleans())
def test_the_tables_follow_whatever_a_transaction_holds(
    batches: list[list[Record]], forgets: bool
) -> None:
    """An entry may be opened, held and closed in one transaction, or over several.

    Also where the working set is read anew in between, as after another process has written.
    """

    async def run() -> None:
        async with BudgetLedger.in_memory(cap="1") as ledger:
            for batch in allowed(batches):
                await ledger.store.submit(lambda c, batch=batch: ledger.record(c, *batch))  # type: ignore[misc]
                if forgets:
                    await forget(ledger.store)
                await ledger.verify()

    asyncio.run(run())


async def forget(store: SqliteStore) -> None:
    """Have a transaction rolled back: the next one trusts no memory."""

    def fail(connection: sqlite3.Connection) -> None:
        raise LookupError

    await asyncio.gather(store.submit(fail), return_exceptions=True)
