"""Reading the server's books, and checking them against its journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quantroute.errors import JournalError, LedgerUnreachable
from quantroute.ledger._records import EntryId
from quantroute.ledger._server_client import LOST_LEDGER_ADVICE
from quantroute.ledger._server_link import MARK, ServerLink
from quantroute.ledger._shared_records import difference, entries_of, verified_at
from quantroute.ledger._state import LedgerState, OpenEntry

__all__ = ["check_not_set_back", "read_books", "read_entries", "read_notes", "verify_books"]

_PAGE: Final = 5_000


async def read_books(link: ServerLink, what: str) -> dict[str, str]:
    """One of the server's hashes."""
    return dict(await link.reading(link.client.hgetall(link.keys[what])))


async def read_entries(link: ServerLink) -> dict[EntryId, OpenEntry]:
    """Entries of all workers that are not settled."""
    return entries_of(await read_books(link, "entries"))


async def read_notes(link: ServerLink) -> dict[str, str]:
    """What workers have noted for one another."""
    return _notes_in(await read_books(link, "notes"))


async def check_not_set_back(link: ServerLink, confirmed: Mapping[str, int]) -> None:
    """Refuse a server that knows fewer batches of these owners than it has confirmed.

    Raises:
        LedgerUnreachable: it has been set back to an older state; its sums are too low.
    """
    if not confirmed:
        return
    names = [f"{owner}\tbatch" for owner in confirmed]
    known = await link.reading(link.client.hmget(link.keys["owners"], names))
    for batch, kept in zip(confirmed.values(), known, strict=True):
        if int(kept or 0) < batch:
            raise LedgerUnreachable(
                path=link.place,
                problem="the server has forgotten what it had confirmed: of "
                f"{batch} batches of an earlier worker it knows {int(kept or 0)}",
                advice=LOST_LEDGER_ADVICE,
            )


async def verify_books(link: ServerLink) -> None:
    """Replay the server's journal and compare with all that is kept beside it.

    Raises:
        JournalError: they differ, or a record could not have been made.
    """
    await link.call(MARK)
    keys = link.keys
    pipe = link.client.pipeline(transaction=True)
    for name in ("accounts", "entries", "notes"):
        pipe.hgetall(keys[name])
    pipe.xrevrange(keys["journal"], count=1)
    accounts, entries, notes, newest = await link.reading(pipe.execute())
    state, number, problem = LedgerState(accounts={}, resolved={}), 0, None
    at, end = "-", newest[0][0] if newest else "-"
    while problem is None and newest:
        page = await link.reading(link.client.xrange(keys["journal"], at, end, count=_PAGE))
        problem = verified_at(state, (fields["r"] for _, fields in page), number)
        number += len(page)
        if len(page) < _PAGE:
            break
        at = f"({page[-1][0]}"
    problem = problem or difference(state, accounts, entries, _notes_in(notes))
    if problem:
        raise JournalError(path=link.place, problem=problem)


def _notes_in(found: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix("note\t"): value
        for name, value in found.items()
        if name.startswith("note\t")
    }
