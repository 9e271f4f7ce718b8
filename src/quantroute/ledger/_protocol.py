"""What a ledger is to those who spend: one file, or a server that many share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quantroute.ledger._records import ROOT, Account, Charge, EntryId
from quantroute.ledger._state import OpenEntry
from quantroute.ledger._statement import Balance, StatementLine
from quantroute.storage import SqliteStore, Work

__all__ = ["Ledger"]


class Ledger(Protocol):
    """An open ledger. `BudgetLedger` keeps it in a file, `SharedLedger` on a server.

    What each method promises and raises is said at `BudgetLedger`; `SharedLedger` says where it
    differs.
    """

    @property
    def store(self) -> SqliteStore:
        """The local file; rows written through `also` share a transaction with their charge."""

    @property
    def notes(self) -> dict[str, str]:
        """The last value of each note."""

    async def reserve(
        self,
        amount_pusd: int,
        *,
        account: Account = ROOT,
        endpoint: str = "",
        request_id: str = "",
        attempt: int = 1,
        wait: bool = True,
    ) -> EntryId:
        """Set money aside for one attempt; returns once that is durable."""

    def identify(self, entry_id: EntryId, generation_id: str) -> None:
        """Note the generation id as soon as it is seen."""

    async def post(
        self, entry_id: EntryId, charge: Charge, *, also: Work[None] | None = None
    ) -> None:
        """The charge is known."""

    async def void(self, entry_id: EntryId, *, reason: str, also: Work[None] | None = None) -> None:
        """The attempt provably cost nothing."""

    async def hold(
        self,
        entry_id: EntryId,
        *,
        reason: str,
        generation_id: str | None = None,
        also: Work[None] | None = None,
    ) -> None:
        """The outcome is unknown."""

    async def set_cap(self, account: Account, cap: object) -> None:
        """Set, raise or lower the cap of an account, in US dollars or `NO_CAP`."""

    async def note(self, key: str, value: str, *, keep: bool = False) -> None:
        """Keep a small fact; with `keep` only if there is none of that name yet."""

    def balance(self, account: Account = ROOT) -> Balance:
        """Cap, spending and tokens of an account and all below it, as last heard."""

    async def statement(self) -> tuple[StatementLine, ...]:
        """Tokens and money per account and endpoint."""

    async def unresolved(self) -> tuple[OpenEntry, ...]:
        """Held entries, oldest first."""

    async def recorded(self, generation_ids: Iterable[str]) -> frozenset[str]:
        """Those among `generation_ids` whose record has been posted, for whichever entry."""

    def expect_settling(self, *, lost: Iterable[OpenEntry] | None) -> None:
        """Say that somebody is finding out about the held entries, all but `lost`."""

    async def verify(self) -> None:
        """Replay the journal and compare with the sums kept beside it."""

    async def aclose(self) -> None:
        """Hold what is still under way and close; idempotent."""
