"""What the rows of a transaction have in common: new ones are written together, many a statement.

Nearly every answer is the first of a row that is not stored yet. Those are gathered and written
before the transaction commits; whatever else happens to a row is written at once, after what was
gathered about it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantroute.domain import RowKey
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowId, RowState, TurnRecord
from quantroute.generation._row_sql import append_turn, insert_rows_with_turns
from quantroute.generation._schema import new_row_values, turn_values

__all__ = ["RowBook"]


class _First(NamedTuple):
    """A first answer, and its columns: what cannot be encoded is refused before it is gathered."""

    run_id: int
    row: RowId
    record: TurnRecord
    state: RowState
    row_class: RowClass | None
    row_values: tuple[Any, ...]
    turn_values: tuple[Any, ...]


@dataclass(slots=True)
class RowBook:
    """The rows of a file that are new in this transaction; a `storage.Participant`."""

    _new: dict[tuple[int, RowKey], _First] = field(default_factory=dict)

    def append(
        self,
        connection: sqlite3.Connection,
        run_id: int,
        row: RowId,
        record: TurnRecord,
        *,
        state: RowState,
        row_class: RowClass | None,
    ) -> None:
        """Append an answer to its row, which it makes if need be, and set the row's state."""
        key = run_id, row.key
        if record.turn == 0 and key not in self._new:
            values = new_row_values(
                run_id, row, record.created_at_s, state=state, row_class=row_class, turns_done=1
            )
            self._new[key] = _First(
                run_id, row, record, state, row_class, values, turn_values(record)
            )
            return
        if key in self._new:
            self.write(connection)
        append_turn(connection, run_id, row, record, state=state, row_class=row_class)

    def write(self, connection: sqlite3.Connection) -> None:
        """Write what was gathered, for whoever reads the tables within the transaction."""
        if not self._new:
            return
        firsts = list(self._new.values())
        self._new.clear()
        known = insert_rows_with_turns(
            connection, [it.row_values for it in firsts], [it.turn_values for it in firsts]
        )
        for at in known:  # asked for anew: the answer is the next revision
            it = firsts[at]
            append_turn(
                connection, it.run_id, it.row, it.record, state=it.state, row_class=it.row_class
            )

    # -- Participant ------------------------------------------------------------------------------

    def on_begin(self, connection: sqlite3.Connection) -> None:
        self._new.clear()  # of a transaction that was rolled back

    def before_commit(self, connection: sqlite3.Connection) -> None:
        self.write(connection)

    def on_commit(self) -> None:
        pass
