"""What the service says a key has spent, against what the ledger says; in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from quantroute.money import format_usd

__all__ = ["KeyComparison", "KeyUsage"]

#: Sums come as floating-point numbers: below a millionth of a dollar nothing is missing.
_ROUNDING_PUSD: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """What `/key` says, in USD; `limit_usd` is None when the key has no limit of its own.

    `usage_usd` is all that was spent through the key: credits, and the providers' own bills where
    the user brought a provider key (`byok_usage`), as ledger charges count them too.
    """

    usage_usd: Decimal
    limit_usd: Decimal | None
    remaining_usd: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyComparison:
    """The key's usage against the ledger, both since the ledger's first request by that key.

    `usage_pusd` is the service's count since then, `posted_pusd` the ledger's without servers of
    the user's own, of which the key knows nothing. What is not posted yet: `held_entries` charges
    of unknown outcome, up to `held_pusd`, and requests in flight, up to `in_flight_pusd`.
    `estimated_pusd` is the part of `posted_pusd` that rests on listed prices or bounds, not on the
    service's word. `open_before_pusd` was open when the count since began: what of it the service
    had billed by then nobody knows, so `usage_pusd` contains all of it. Units: pico-dollars.
    """

    usage_pusd: int
    posted_pusd: int
    held_pusd: int = 0
    held_entries: int = 0
    in_flight_pusd: int = 0
    estimated_pusd: int = 0
    open_before_pusd: int = 0

    @property
    def difference_pusd(self) -> int:
        """The service's count minus the ledger's."""
        return self.usage_pusd - self.posted_pusd

    @property
    def agrees(self) -> bool:
        """Whether both say the same, but for rounding in the service's sum."""
        return abs(self.difference_pusd) < _ROUNDING_PUSD

    @property
    def is_explained(self) -> bool:
        """Whether what is known accounts for the difference: held charges, requests in flight."""
        return (
            -self.estimated_pusd - _ROUNDING_PUSD
            < self.difference_pusd
            < self._open_pusd + self.open_before_pusd + _ROUNDING_PUSD
        )

    @property
    def _open_pusd(self) -> int:
        return self.held_pusd + self.in_flight_pusd

    @property
    def explanation(self) -> str:
        """One sentence for people: what differs, and what it comes from."""
        if self.agrees:
            return f"the key's usage and the ledger agree: {format_usd(self.posted_pusd, places=6)}"
        sizes = (
            f"the key's usage is {format_usd(self.usage_pusd, places=6)}, the ledger has "
            f"{format_usd(self.posted_pusd, places=6)}: "
        )
        return sizes + (self._service_has_more() if self.difference_pusd > 0 else self._less())

    def _service_has_more(self) -> str:
        parts = []
        if self.held_entries:
            parts.append(
                f"{self.held_entries:,} held charges of up to "
                f"{format_usd(self.held_pusd, places=6)} together are not posted yet"
            )
        if self.in_flight_pusd:
            parts.append(
                f"requests in flight may have been billed up to "
                f"{format_usd(self.in_flight_pusd, places=6)}"
            )
        unknown_pusd = self.difference_pusd - self._open_pusd
        if self.open_before_pusd and unknown_pusd > 0:
            parts.append(
                f"up to {format_usd(self.open_before_pusd, places=6)} was open already when the "
                "key's usage was first noted"
            )
            unknown_pusd -= self.open_before_pusd
        if unknown_pusd >= _ROUNDING_PUSD:
            rest = "the rest" if parts else "that"
            parts.append(
                f"{rest}, at least {format_usd(unknown_pusd, places=6)}, is other use of the same "
                "key: another program, or a run with a ledger of its own"
            )
        return "; ".join(parts)

    def _less(self) -> str:
        lag = "the service counts late, or the key's count was started anew"
        if not self.estimated_pusd:
            return lag
        return (
            f"{format_usd(self.estimated_pusd, places=6)} of the ledger is charged by listed price "
            f"or at the bound and may exceed the bill; else {lag}"
        )
