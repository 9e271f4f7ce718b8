"""A settlement into the ledger, whatever it is."""

from __future__ import annotations

from quantroute._log import get_logger
from quantroute.client._settlement import Hold, Post, Settlement, Void
from quantroute.ledger import EntryId, Ledger
from quantroute.storage import Work

__all__ = ["book"]

log = get_logger("quantroute.client")


async def book(
    ledger: Ledger,
    entry_id: EntryId,
    settlement: Settlement,
    *,
    generation_id: str | None = None,
    also: Work[None] | None = None,
) -> None:
    """Post, void or hold an entry; `also` commits with it."""
    match settlement:
        case Post(charge):
            try:
                await ledger.post(entry_id, charge, also=also)
            except UnicodeError:
                raise  # of the text that comes along, not of the bill
            except ValueError as error:
                # A bill that no ledger can hold. It is not posted, and not forgotten either.
                reason = f"an impossible bill: {error}"
                log.warning("charge not credible", entry=entry_id, problem=reason)
                await ledger.hold(
                    entry_id, reason=reason, generation_id=charge.generation_id, also=also
                )
        case Void(reason):
            await ledger.void(entry_id, reason=reason, also=also)
        case Hold(reason):
            await ledger.hold(entry_id, reason=reason, generation_id=generation_id, also=also)
