"""Why rows ended without an answer, told in few words for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantroute.generation._records import RowState
from quantroute.generation._schema import text_of
from quantroute.ledger import Ledger

__all__ = ["RowFailures", "read_failures"]

_MOST: Final = 5
# The words differ from row to row, in a count of tokens or an id: one row speaks for those alike.
# By the index, or a million rows are read to find out that none has failed.
_FAILURES: Final = """
    SELECT state, status, count(*), min(problem)
    FROM generation_rows INDEXED BY generation_rows_by_class
    WHERE run_id = (SELECT run_id FROM generation_runs WHERE name = ?) AND state IN (?, ?)
        AND problem IS NOT NULL
    GROUP BY state, status ORDER BY count(*) DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailures:
    """Rows that ended alike. `status` is HTTP's, 0 without an answer; `example` is of one row."""

    state: RowState
    status: int
    rows: int
    example: str


async def read_failures(ledger: Ledger, *, run: str) -> tuple[RowFailures, ...]:
    """The most frequent failures among the rows of one run in this file, as they stand now."""
    states = (RowState.REFUSED.value, RowState.GAVE_UP.value)
    found = await ledger.store.aread(
        lambda c: c.execute(_FAILURES, (run, *states, _MOST)).fetchall()
    )
    return tuple(
        RowFailures(
            state=RowState(state), status=status or 0, rows=rows, example=text_of(example) or ""
        )
        for state, status, rows, example in found
    )
