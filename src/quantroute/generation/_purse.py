"""The caps of datasets during a run: set from a plan, and passed on when a dataset needs no more.

The rule. At the start each dataset's account gets a cap; together they are what the run's cap has
left. When a dataset ends, its cap is lowered to what it used, and the difference goes to those
still under way by the same rule of allocation. A cap is never lowered while its dataset runs.
Whoever reaches his cap waits for others to end. When all who are left wait, they end one after the
other, so that what does not suffice for a request of each is one sum for those who remain.

None of this guards the money: the run's own cap is the ledger's root, and it refuses by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from quantroute.generation._allocation import Allocation, Claim, allocate
from quantroute.ledger import Account, Ledger
from quantroute.money import MAX_AMOUNT_PUSD, NO_CAP, to_usd

__all__ = ["DatasetCap", "FixedPurse", "SharedPurse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCap:
    """What a dataset starts with, in pico-dollars; `claim.limit_pusd` is its own cap, if any."""

    account: Account
    cap_pusd: int
    claim: Claim


class SharedPurse:
    """One purse for all datasets of a run; used from one event loop."""

    def __init__(self, ledger: Ledger, caps: Sequence[DatasetCap], *, rule: Allocation) -> None:
        self._ledger = ledger
        self._rule = rule
        self._accounts = {item.claim.name: item.account for item in caps}
        self._claims = {item.claim.name: item.claim for item in caps}
        self._caps = {item.claim.name: item.cap_pusd for item in caps}
        self._active = set(self._caps)
        self._waiting: set[str] = set()
        self._leaving: set[str] = set()
        self._left_pusd = 0
        self._changed = asyncio.Condition()

    @property
    def caps_pusd(self) -> dict[str, int]:
        """The caps in force, by dataset."""
        return dict(self._caps)

    async def open(self) -> None:
        """Set the caps in the ledger."""
        for name, cap_pusd in self._caps.items():
            await self._set_cap(name, cap_pusd)

    async def more(self, dataset: str, *, above_pusd: int) -> bool:
        """Wait until the dataset's cap is above `above_pusd`; False if nobody is left to raise it.

        Many requests are refused at one cap, and some hear of it only after it was raised: hence
        the cap that refused, and not just "more than now".
        """
        async with self._changed:
            self._waiting.add(dataset)
            self._changed.notify_all()
            try:
                await self._changed.wait_for(
                    lambda: self._caps[dataset] > above_pusd or self._next_to_leave() == dataset
                )
            finally:
                self._waiting.discard(dataset)
            if self._caps[dataset] > above_pusd:
                return True
            self._active.discard(dataset)
            self._leaving.add(dataset)
            return False

    def _next_to_leave(self) -> str | None:
        """Who of those that all wait goes first; None while anybody may still leave money."""
        if self._leaving or not self._active <= self._waiting:
            return None
        return max(self._active, key=self._place, default=None)

    def _place(self, name: str) -> tuple[bool, int, str]:
        claim = self._claims[name]
        is_full = claim.limit_pusd is not None and self._caps[name] >= claim.limit_pusd
        return is_full, claim.priority if self._rule is Allocation.PRIORITY else 0, name

    async def close(self, dataset: str) -> None:
        """Lower the dataset's cap to what it used and pass the rest on."""
        async with self._changed:
            self._active.discard(dataset)
            self._leaving.discard(dataset)
            balance = self._ledger.balance(self._accounts[dataset])
            used_pusd = balance.posted_pusd + balance.pending_pusd
            freed_pusd = max(0, self._caps[dataset] - used_pusd)
            if freed_pusd:
                # Lowered before others are raised: together they never exceed the whole.
                await self._set_cap(dataset, used_pusd)
                self._left_pusd += freed_pusd
                await self._hand_out()
            self._changed.notify_all()

    async def _hand_out(self) -> None:
        claims = [self._further(self._claims[name]) for name in sorted(self._active)]
        for name, share_pusd in allocate(self._left_pusd, claims, self._rule).items():
            if share_pusd:
                self._left_pusd -= share_pusd
                await self._set_cap(name, self._caps[name] + share_pusd)

    def _further(self, claim: Claim) -> Claim:
        """What a dataset can still take: anything, up to its own cap."""
        limit = claim.limit_pusd
        return Claim(
            name=claim.name,
            need_pusd=MAX_AMOUNT_PUSD,
            limit_pusd=None if limit is None else limit - self._caps[claim.name],
            weight=claim.weight,
            priority=claim.priority,
        )

    async def _set_cap(self, name: str, cap_pusd: int) -> None:
        self._caps[name] = cap_pusd
        account = self._accounts[name]
        if self._ledger.balance(account).cap != cap_pusd:
            await self._ledger.set_cap(account, to_usd(cap_pusd))


class FixedPurse:
    """The caps of datasets when several workers share a run: set once, and never passed on.

    Whoever comes first sets them, and all find them in the ledger; a plan made later, with other
    answers seen, changes nothing. Another cap of the whole run makes them anew.
    """

    def __init__(self, ledger: Ledger, caps: Sequence[DatasetCap], *, name: str) -> None:
        self._ledger = ledger
        self._caps = {item.claim.name: item for item in caps}
        self._note = f"dataset-caps/{name}/{ledger.balance().cap}"

    @property
    def caps_pusd(self) -> dict[str, int]:
        """The caps in force, by dataset."""
        found = {name: self._ledger.balance(item.account).cap for name, item in self._caps.items()}
        return {name: MAX_AMOUNT_PUSD if cap is NO_CAP else cap for name, cap in found.items()}

    async def open(self) -> None:
        """Set the caps in the ledger, unless another worker has.

        The ledger says who was first: what this worker read when it opened may be minutes old.
        """
        mine = secrets.token_hex(4)
        await self._ledger.note(self._note, mine, keep=True)
        if self._ledger.notes[self._note] != mine and self._are_set():
            return
        for item in self._caps.values():
            await self._ledger.set_cap(item.account, to_usd(item.cap_pusd))

    def _are_set(self) -> bool:
        """Not so only if whoever was first died just then."""
        balances = map(self._ledger.balance, (item.account for item in self._caps.values()))
        return any(balance.cap is not NO_CAP for balance in balances)
