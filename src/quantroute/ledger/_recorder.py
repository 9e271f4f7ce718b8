"""What both ledgers do alike: make the records of what is asked of them."""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Awaitable, Iterable
from types import TracebackType

from quantroute.clock import Clock
from quantroute.ledger._records import (
    ROOT,
    Account,
    CapSet,
    Charge,
    EntryId,
    Held,
    Identified,
    Posted,
    Record,
    Reserved,
    Voided,
    check_account,
)
from quantroute.ledger._state import OpenEntry, reserved_by
from quantroute.ledger._waiting import Refusal, WaitingLines
from quantroute.money import cap_pusd
from quantroute.storage import Work

__all__ = ["Recorder"]


class Recorder(abc.ABC):
    """Makes the records; where they are kept, and who decides, is up to the ledger."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._owner = ""
        self.notes: dict[str, str] = {}
        self._begin("")

    def _begin(self, owner: str) -> None:
        """A new opening, by this owner."""
        self._owner = owner
        self._entries_made = 0
        self._lines = WaitingLines()
        self._lost_pusd: dict[Account, int] | None = None

    @abc.abstractmethod
    async def _try_reserve(self, record: Reserved) -> EntryId | Refusal:
        """The entry, durable; or why not now."""

    @abc.abstractmethod
    def _write(self, record: Record, also: Work[None] | None) -> Awaitable[None]:
        """Done once the record is durable; `also` writes in the same local transaction."""

    @abc.abstractmethod
    def _write_soon(self, record: Record) -> None:
        """Not waited for."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Hold what is still under way and close; idempotent."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_owner", ""):
            warnings.warn(
                f"unclosed {self!r}; use `async with`", ResourceWarning, stacklevel=2, source=self
            )

    # -- reserving --------------------------------------------------------------------------------

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
        """Set money aside for one attempt; returns once that is durable.

        With `wait`, a reservation that would fit if others were resolved waits in line: first come,
        first served among those who wait for the same account, the large before the small behind
        it. Whoever has not waited yet tries once before standing in line. Held entries are waited
        for only while somebody finds out about them (`expect_settling`). Cancelling leaves nothing
        behind.
        Units: pico-dollars.
        Raises:
            BudgetExceeded: it does not fit now (`wait=False`), or nothing under way can make room.
            JournalError: the record could not be written; nothing must be sent. Of a ledger on a
                server, LedgerUnreachable: it did not answer in time; nothing must be sent.
        """
        check_account(account)
        make = functools.partial(
            self._reservation, account, amount_pusd, endpoint, request_id, attempt
        )
        result = await self._try_reserve(make())
        if isinstance(result, Refusal):
            return await self._lines.stand(result, lambda: self._try_reserve(make()), wait=wait)
        return result

    def _reservation(
        self, account: Account, amount_pusd: int, endpoint: str, request_id: str, attempt: int
    ) -> Reserved:
        self._entries_made += 1
        return Reserved(
            entry_id=EntryId(f"{self._owner}-{self._entries_made:x}"),
            account=account,
            amount_pusd=amount_pusd,
            endpoint=endpoint,
            request_id=request_id,
            attempt=attempt,
            owner=self._owner,
            at_s=self._clock.time_s(),
        )

    def expect_settling(self, *, lost: Iterable[OpenEntry] | None) -> None:
        """Say that somebody is finding out about the held entries, all but `lost`; None: nobody is.

        While it is so, reservations that would fit once those are resolved wait for them instead of
        being refused. Of this object only: it is not written down.
        """
        before, self._lost_pusd = self._lost_pusd, None if lost is None else reserved_by(lost)
        if self._lost_pusd != before:
            self._make_room()  # whoever waits for what is lost looks again, and is refused

    def _make_room(self) -> None:
        self._lines.make_room()

    # -- resolving --------------------------------------------------------------------------------

    def identify(self, entry_id: EntryId, generation_id: str) -> None:
        """Note the generation id as soon as it is seen; not waited for."""
        self._write_soon(
            Identified(entry_id=entry_id, generation_id=generation_id, at_s=self._clock.time_s())
        )

    async def post(
        self, entry_id: EntryId, charge: Charge, *, also: Work[None] | None = None
    ) -> None:
        """The charge is known: it counts in full, even above its reservation (then flagged).

        `also` writes in the same transaction of the local file: both become durable, or neither.
        Raises:
            EntryStateError: the entry is resolved already, was never reserved, or the charge is a
                generation's record and another entry has been charged for it.
        """
        await self._write(Posted(entry_id=entry_id, charge=charge, at_s=self._clock.time_s()), also)

    async def void(self, entry_id: EntryId, *, reason: str, also: Work[None] | None = None) -> None:
        """The attempt provably cost nothing; its reservation is free again."""
        await self._write(Voided(entry_id=entry_id, reason=reason, at_s=self._clock.time_s()), also)

    async def hold(
        self,
        entry_id: EntryId,
        *,
        reason: str,
        generation_id: str | None = None,
        also: Work[None] | None = None,
    ) -> None:
        """The outcome is unknown: the reservation stays counted until it is posted or voided."""
        record = Held(
            entry_id=entry_id,
            reason=reason,
            generation_id=generation_id,
            at_s=self._clock.time_s(),
        )
        await self._write(record, also)

    async def set_cap(self, account: Account, cap: object) -> None:
        """Set, raise or lower the cap of an account, in US dollars or `NO_CAP`."""
        record = CapSet(
            account=check_account(account), cap=cap_pusd(cap), at_s=self._clock.time_s()
        )
        await self._write(record, None)
