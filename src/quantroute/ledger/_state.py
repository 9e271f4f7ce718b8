"""The ledger as a pure state machine: records in, balances out.

Two rules govern this file.

1. Nothing here does I/O, knows a clock or draws a random number. A record says everything; applying
   the same records in the same order gives the same state, which is what replay relies on.
2. `check` decides, `apply` changes. `check` raises and leaves the state alone; after it has passed,
   `apply` cannot fail. Storage writes between the two, so that memory never runs ahead of disk.

The machine of one entry:

                 reserve            post
        (new) ----------> RESERVED -------> POSTED
                             |  \\------->  VOIDED       void: provably no charge
                             | hold          ^  ^
                             v               |  |
                            HELD ------------+--'       the bill became known later

Accounts form a tree by path; an entry counts for its account and for every account above it. In
each of them, at every instant,

        posted + pending <= cap + (what charges exceeded their reservations by)

because only `reserve` can refuse, and it refuses unless posted + pending + new <= cap everywhere on
the way up. A charge above its reservation is posted in full and flagged: it has already happened
outside, and a ledger that clips it lies.

What remains ugly. A cap may be lowered below what is already spent: then nothing is admitted until
it is raised again, and the inequality above does not hold meanwhile. And an entry's final status is
only remembered where the caller keeps `resolved` (replay and tests do); the SQLite ledger forgets
it, so that memory does not grow with the number of rows, and calls such an entry "not open".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

from msgspec import Struct, structs

from quantroute.errors import BudgetExceeded, EntryStateError
from quantroute.ledger._records import (
    ROOT,
    Account,
    Basis,
    CapSet,
    Charge,
    EntryId,
    EntryStatus,
    Held,
    Identified,
    Noted,
    Posted,
    Record,
    Reserved,
    Voided,
    check_account,
    lineage,
)
from quantroute.money import MAX_AMOUNT_PUSD, NO_CAP, Cap
from quantroute.pricing import TokenUsage

__all__ = ["OVERRUN", "AccountState", "LedgerState", "OpenEntry", "reserved_by"]

OVERRUN: Final = "overrun"
"""Flag of a charge above its reservation."""

# Names for what each entry asks: Python 3.11 takes a hundred steps to look up a member of an Enum.
_RESERVED: Final = EntryStatus.RESERVED
_HELD: Final = EntryStatus.HELD
_POSTED: Final = EntryStatus.POSTED
_RECORD: Final = Basis.RECORD


@dataclass(slots=True)
class AccountState:
    """Running sums of one account and everything below it. Units: pico-dollars, tokens."""

    cap: Cap = NO_CAP
    posted_pusd: int = 0
    pending_pusd: int = 0
    held_pusd: int = 0  # the part of pending whose outcome is unknown
    overrun_pusd: int = 0
    open_entries: int = 0
    held_entries: int = 0
    posted_entries: int = 0
    voided_entries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0

    @property
    def limit_pusd(self) -> int:
        """The cap as a number; without one, what a journal column can hold."""
        return MAX_AMOUNT_PUSD if self.cap is NO_CAP else self.cap

    def admits(self, amount_pusd: int) -> bool:
        """Whether a reservation of `amount_pusd` fits under the cap."""
        return self.posted_pusd + self.pending_pusd + amount_pusd <= self.limit_pusd

    def may_admit_later(self, amount_pusd: int, *, lost_pusd: int | None = None) -> bool:
        """Whether it would fit once everything under way were resolved free of charge.

        What is held is not under way unless somebody is finding out about it: to wait for it would
        be to wait for ever. `lost_pusd` is the part of it that nobody is finding out about; None
        for all of it.
        """
        lost_pusd = self.held_pusd if lost_pusd is None else min(lost_pusd, self.held_pusd)
        return self.posted_pusd + lost_pusd + amount_pusd <= self.limit_pusd


class OpenEntry(Struct, kw_only=True):
    """A reservation that is not resolved: under way, or held with an unknown outcome."""

    entry_id: EntryId
    account: Account
    endpoint: str
    reserved_pusd: int
    status: EntryStatus
    owner: str
    reserved_at_s: float
    request_id: str = ""
    attempt: int = 1
    generation_id: str | None = None
    reason: str = ""


@dataclass(slots=True)
class LedgerState:
    """All accounts, all open entries, all notes."""

    accounts: dict[Account, AccountState] = field(default_factory=lambda: {ROOT: AccountState()})
    entries: dict[EntryId, OpenEntry] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    resolved: dict[EntryId, EntryStatus] | None = None
    recorded: set[str] = field(default_factory=set)
    """Generations whose record has been posted: each is a bill that is paid once."""

    def account(self, path: Account) -> AccountState:
        """The sums of one account; a new account starts empty and without a cap of its own."""
        state = self.accounts.get(path)
        if state is None:
            state = self.accounts[path] = AccountState()
        return state

    def may_admit_later(
        self, account: Account, amount_pusd: int, *, lost_pusd: Mapping[Account, int] | None = None
    ) -> bool:
        """Whether waiting for what is under way can make room in `account` and all above it.

        `lost_pusd` is what of each account's held money nobody is finding out about; None: all.
        """
        return all(
            self.accounts[path].may_admit_later(
                amount_pusd, lost_pusd=None if lost_pusd is None else lost_pusd.get(path, 0)
            )
            for path in lineage(account)
            if path in self.accounts
        )

    def flagged(self, record: Record) -> Record:
        """`record` with the flags that only the ledger can know: a charge above its reservation.

        For a record that passed `check`.
        """
        if type(record) is not Posted or OVERRUN in record.charge.flags:
            return record
        if record.charge.amount_pusd <= self.entries[record.entry_id].reserved_pusd:
            return record
        charge = structs.replace(record.charge, flags=(*record.charge.flags, OVERRUN))
        return structs.replace(record, charge=charge)

    # -- deciding ---------------------------------------------------------------------------------

    def check(self, record: Record) -> None:
        """Raise if `record` may not be applied; change nothing.

        Raises:
            BudgetExceeded: a reservation does not fit; names the account with the least room.
            EntryStateError: no such open entry, resolved already, an id used twice, or a
                generation record that another entry has been charged for.
            ValueError: a negative or impossibly large amount.
        """
        if type(record) is Reserved:
            self._check_reservation(record)
        elif type(record) is Posted:
            self._check_charge(record)
        elif type(record) is Voided:
            self._open(record.entry_id, "void")
        elif type(record) is Identified:
            self._open(record.entry_id, "identify")
        elif type(record) is Held:
            if self._open(record.entry_id, "hold").status is EntryStatus.HELD:
                raise EntryStateError(
                    entry_id=record.entry_id, state="held already", transition="hold"
                )
        elif type(record) is CapSet:
            check_account(record.account)
        elif type(record) is Noted:
            pass
        else:
            assert_never(record)

    def _check_reservation(self, record: Reserved) -> None:
        _check_amount(record.amount_pusd)
        check_account(record.account)
        if record.entry_id in self.entries or record.entry_id in (self.resolved or ()):
            raise EntryStateError(
                entry_id=record.entry_id, state="known already", transition="reserve"
            )
        refusals: list[BudgetExceeded] = []
        for path in lineage(record.account):
            state = self.accounts.get(path)
            if state is not None and not state.admits(record.amount_pusd):
                refusals.append(_exceeded(path, state, record.amount_pusd))
        if refusals:
            raise min(refusals, key=lambda error: (error.can_ever_fit, error.available_pusd))

    def _check_charge(self, record: Posted) -> None:
        amount_pusd, usage = record.charge.amount_pusd, record.charge.usage
        _check_amount(amount_pusd)
        self._open(record.entry_id, "post")
        if record.charge.basis is _RECORD and record.charge.generation_id in self.recorded:
            raise EntryStateError(
                entry_id=record.entry_id,
                state=f"of {record.charge.generation_id}, whose record is posted already",
                transition="post",
            )
        if usage is not None and not usage.is_possible:
            raise ValueError(f"a usage that cannot be true: {usage}")
        _check_amount(self.accounts[ROOT].posted_pusd + amount_pusd)  # no account has more

    def _open(self, entry_id: EntryId, transition: str) -> OpenEntry:
        entry = self.entries.get(entry_id)
        if entry is None:
            status = (self.resolved or {}).get(entry_id)
            state = f"{status.value} already" if status else "not open"
            raise EntryStateError(entry_id=entry_id, state=state, transition=transition)
        return entry

    # -- changing ---------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Take `record` into account. `check` must have passed."""
        if type(record) is Reserved:
            self._reserve(record)
        elif type(record) is Posted:
            self._post(record.entry_id, record.charge)
        elif type(record) is Voided:
            self._void(record.entry_id)
        elif type(record) is Identified:
            self.entries[record.entry_id].generation_id = record.generation_id
        elif type(record) is Held:
            self._hold(record)
        elif type(record) is CapSet:
            for path in lineage(record.account):
                self.account(path)
            self.account(record.account).cap = record.cap
        elif type(record) is Noted:
            self.notes[record.key] = record.value
        else:
            assert_never(record)

    def replay(self, record: Record) -> None:
        """`check` and `apply`."""
        self.check(record)
        self.apply(record)

    def _reserve(self, record: Reserved) -> None:
        self.entries[record.entry_id] = OpenEntry(
            entry_id=record.entry_id,
            account=record.account,
            endpoint=record.endpoint,
            reserved_pusd=record.amount_pusd,
            status=_RESERVED,
            owner=record.owner,
            reserved_at_s=record.at_s,
            request_id=record.request_id,
            attempt=record.attempt,
        )
        for path in lineage(record.account):
            state = self.account(path)
            state.pending_pusd += record.amount_pusd
            state.open_entries += 1

    def _hold(self, record: Held) -> None:
        entry = self.entries[record.entry_id]
        entry.status = EntryStatus.HELD
        entry.reason = record.reason
        entry.generation_id = record.generation_id or entry.generation_id
        for path in lineage(entry.account):
            state = self.account(path)
            state.held_pusd += entry.reserved_pusd
            state.held_entries += 1

    def _post(self, entry_id: EntryId, charge: Charge) -> None:
        entry = self._resolve(entry_id, _POSTED)
        if charge.basis is _RECORD and charge.generation_id is not None:
            self.recorded.add(charge.generation_id)
        overrun_pusd = max(0, charge.amount_pusd - entry.reserved_pusd)
        usage = charge.usage or _NO_TOKENS
        reasoning_tokens, cached_tokens = usage.reasoning_tokens or 0, usage.cached_tokens or 0
        cache_write_tokens = usage.cache_write_tokens or 0
        for path in lineage(entry.account):
            state = self.accounts[path]
            state.posted_entries += 1
            state.posted_pusd += charge.amount_pusd
            state.overrun_pusd += overrun_pusd
            state.input_tokens += usage.input_tokens
            state.output_tokens += usage.output_tokens
            state.reasoning_tokens += reasoning_tokens
            state.cached_tokens += cached_tokens
            state.cache_write_tokens += cache_write_tokens

    def _void(self, entry_id: EntryId) -> None:
        entry = self._resolve(entry_id, EntryStatus.VOIDED)
        for path in lineage(entry.account):
            self.accounts[path].voided_entries += 1

    def _resolve(self, entry_id: EntryId, status: EntryStatus) -> OpenEntry:
        """Take an entry out of what is open."""
        entry = self.entries.pop(entry_id)
        was_held = entry.status is _HELD
        for path in lineage(entry.account):
            state = self.accounts[path]
            state.pending_pusd -= entry.reserved_pusd
            state.open_entries -= 1
            if was_held:
                state.held_pusd -= entry.reserved_pusd
                state.held_entries -= 1
        if self.resolved is not None:
            self.resolved[entry_id] = status
        return entry


_NO_TOKENS: Final = TokenUsage(input_tokens=0, output_tokens=0)


def reserved_by(entries: Iterable[OpenEntry]) -> dict[Account, int]:
    """What these entries have reserved, pico-dollars, by account and all above it."""
    sums: defaultdict[Account, int] = defaultdict(int)
    for entry in entries:
        for path in lineage(entry.account):
            sums[path] += entry.reserved_pusd
    return dict(sums)


def _check_amount(amount_pusd: int) -> None:
    if type(amount_pusd) is int and 0 <= amount_pusd <= MAX_AMOUNT_PUSD:
        return
    if isinstance(amount_pusd, bool) or not isinstance(amount_pusd, int):
        raise TypeError(f"an amount is an int of pico-dollars, not {type(amount_pusd).__name__}")
    if not 0 <= amount_pusd <= MAX_AMOUNT_PUSD:
        raise ValueError(f"an amount must lie in [0, {MAX_AMOUNT_PUSD}], not {amount_pusd}")


def _exceeded(path: Account, state: AccountState, amount_pusd: int) -> BudgetExceeded:
    return BudgetExceeded(
        account=path or "the whole ledger",
        requested_pusd=amount_pusd,
        cap_pusd=state.limit_pusd,
        posted_pusd=state.posted_pusd,
        pending_pusd=state.pending_pusd,
    )
