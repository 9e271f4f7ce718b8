"""New rows are written together; what is in the tables is what one at a time would have written."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_of_records import make_record
from quantroute.domain import RowKey
from quantroute.generation import Prompt, RowClass
from quantroute.generation._records import RowId, RowState, TurnRecord
from quantroute.generation._row_sql import append_turn, fail_row
from quantroute.generation._rows import RowStore
from quantroute.generation._schema import NEW_ROW_COLUMNS, TURN_COLUMNS, create_tables
from quantroute.ledger import Basis, BudgetLedger, Charge, EntryId
from quantroute.storage import MEMORY, Work
from sqlite_support import database

CHARGE = Charge(amount_pusd=3, basis=Basis.REPORTED)


def row_of(name: str, **changes: Any) -> RowId:
    prompt = Prompt(**({"id": name, "dataset": "set", "turns": (name, "and then?")} | changes))
    return RowId(key=RowKey(hashlib.sha256(name.encode()).hexdigest()), prompt=prompt, rollout=0)


def answer(rows: RowStore, row: RowId, record: TurnRecord) -> Work[None]:
    state = RowState.FINISHED if record.turn else RowState.OPEN
    row_class = record.row_class if record.turn else None
    return rows.turn_work(1, row, record, state=state, row_class=row_class)


def stored(connection: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
    """Both tables, rows by their keys instead of their numbers."""
    rows = connection.execute(
        f"SELECT {', '.join(NEW_ROW_COLUMNS)}, problem, status, attempts "
        "FROM generation_rows ORDER BY run_id, key"
    ).fetchall()
    turns = connection.execute(
        f"SELECT key, {', '.join(f't.{name}' for name in TURN_COLUMNS)} "
        "FROM generation_turns t JOIN generation_rows USING (row_id) "
        "ORDER BY run_id, key, turn, revision"
    ).fetchall()
    return rows, turns


def entries(connection: sqlite3.Connection) -> list[str]:
    return [entry for (entry,) in connection.execute("SELECT entry_id FROM generation_turns")]


# -- the same tables ------------------------------------------------------------------------------

#: An answer to a turn of one of few rows, or that row's failure: few, so that rows come again.
steps = st.tuples(
    st.sampled_from(["a", "b", "c", "d", "\ud800 e"]),
    st.sampled_from(["first", "first", "second", "failure"]),
    st.sampled_from(["text", "täxt", "\ud83d alone", None]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(steps, max_size=8), max_size=4))
def test_tables_are_those_of_one_at_a_time(
    batches: list[list[tuple[str, str, str | None]]],
) -> None:
    """Whatever happens to rows, and in whichever transactions."""
    records = iter(range(1_000))

    def record(kind: str, text: str | None) -> TurnRecord:
        number = next(records)
        return make_record(
            turn=int(kind == "second"),
            reasoning=text,
            row_class=RowClass.TRUNCATED if number % 3 == 0 else RowClass.GOOD,
            entry_id=str(number),
            created_at_s=float(number),
        )

    work = [
        [(row_of(ascii(name), id=name), kind, record(kind, text)) for name, kind, text in batch]
        for batch in batches
    ]

    async def together() -> tuple[list[Any], list[Any]]:
        async with BudgetLedger.in_memory(cap="1") as ledger:
            rows = RowStore(ledger.store)
            await rows.prepare()
            for batch in work:
                await asyncio.gather(*(one(rows, *step) for step in batch))
            return ledger.store.read(stored)

    async def one(rows: RowStore, row: RowId, kind: str, record: TurnRecord) -> None:
        if kind == "failure":
            await rows.note_failure(1, row, **failure(record))
        else:
            await rows._store.submit(answer(rows, row, record))

    with database(MEMORY) as connection:
        create_tables(connection, path="")
        for row, kind, record_ in (step for batch in work for step in batch):
            if kind == "failure":
                fail_row(connection, 1, row, **failure(record_))
            else:
                state = RowState.FINISHED if record_.turn else RowState.OPEN
                row_class = record_.row_class if record_.turn else None
                append_turn(connection, 1, row, record_, state=state, row_class=row_class)
        expected = stored(connection)
    assert asyncio.run(together()) == expected


def failure(record: TurnRecord) -> dict[str, Any]:
    return {
        "state": RowState.GAVE_UP,
        "problem": "\ud800 no",
        "status": 429,
        "attempts": 2,
        "at_s": record.created_at_s,
    }


# -- failures -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["good", "good", "surrogate", "huge", "raise"]), max_size=30))
def test_a_row_that_cannot_be_written_fails_alone_and_is_not_charged(kinds: list[str]) -> None:
    """Its neighbours in the transaction are written with their money, it keeps its reservation."""
    errors: dict[str, type[Exception]] = {
        "surrogate": UnicodeEncodeError,
        "huge": OverflowError,
        "raise": TypeError,
    }

    def work(rows: RowStore, number: int, kind: str, entry_id: EntryId) -> Work[None]:
        changes: dict[str, Any] = {
            "surrogate": {"mode": "\ud800"},
            "huge": {"attempts": 2**70},
            "raise": {"precision": {"bits": object()}},
        }
        record = make_record(entry_id=entry_id, **changes.get(kind, {}))
        return answer(rows, row_of(str(number)), record)

    async def run() -> None:
        async with BudgetLedger.in_memory(cap="1") as ledger:
            rows = RowStore(ledger.store)
            await rows.prepare()
            made = [await ledger.reserve(5) for _ in kinds]
            results = await asyncio.gather(
                *(
                    ledger.post(entry_id, CHARGE, also=work(rows, number, kind, entry_id))
                    for number, (kind, entry_id) in enumerate(zip(kinds, made, strict=True))
                ),
                return_exceptions=True,
            )
            for kind, result in zip(kinds, results, strict=True):
                assert result is None if kind == "good" else isinstance(result, errors[kind])
            good = [entry for kind, entry in zip(kinds, made, strict=True) if kind == "good"]
            assert ledger.store.read(entries) == good
            balance = ledger.balance()
            assert balance.posted_pusd == 3 * len(good)
            assert balance.pending_pusd == 5 * (len(kinds) - len(good))
            await ledger.verify()

    asyncio.run(run())


# -- neighbours -----------------------------------------------------------------------------------


async def test_row_stores_of_one_file_share_what_they_gather() -> None:
    """However many are made, the writer asks one."""
    async with BudgetLedger.in_memory(cap="1") as ledger:
        first = RowStore(ledger.store)
        participants = len(ledger.store.participants)
        second = RowStore(ledger.store)
        assert len(ledger.store.participants) == participants
        await first.prepare()
        row = row_of("a")
        await asyncio.gather(
            ledger.store.submit(answer(first, row, make_record(entry_id="e-1"))),
            ledger.store.submit(answer(second, row, make_record(entry_id="e-2"))),
        )
        assert ledger.store.read(entries) == ["e-1", "e-2"]


async def test_two_openings_of_a_file_number_their_rows_apart(tmp_path: Path) -> None:
    """Numbers are taken within the transaction, after what the other has written."""
    path = tmp_path / "l.sqlite"
    async with BudgetLedger.open(path, cap="1") as one, BudgetLedger.open(path) as other:
        stores = [RowStore(one.store), RowStore(other.store)]
        await stores[0].prepare()
        await asyncio.gather(
            *(
                (one, other)[number % 2].store.submit(
                    answer(stores[number % 2], row_of(str(number // 3)), make_record())
                )
                for number in range(120)
            )
        )
        assert one.store.read(lambda c: numbers(c, "generation_rows")) == (40, 40)
        assert one.store.read(lambda c: numbers(c, "generation_turns")) == (120, 40)


def numbers(connection: sqlite3.Connection, table: str) -> tuple[int, int]:
    found: tuple[int, int] = connection.execute(
        f"SELECT count(*), count(DISTINCT row_id) FROM {table}"
    ).fetchone()
    return found


# -- kills ----------------------------------------------------------------------------------------

_VICTIM = """
import asyncio, sys
sys.path[:0] = {path!r}
from quantroute.generation._rows import RowStore
from quantroute.ledger import BudgetLedger
from test_row_book import CHARGE, answer, make_record, row_of

async def main(path):
    async with BudgetLedger.open(path, cap="1") as ledger:
        rows = RowStore(ledger.store)
        await rows.prepare()

        async def ask(number):
            while True:
                entry = await ledger.reserve(5)
                record = make_record(entry_id=entry)
                await ledger.post(entry, CHARGE, also=answer(rows, row_of(entry), record))
                print(entry, flush=True)

        await asyncio.gather(*(ask(number) for number in range(16)))

asyncio.run(main(sys.argv[1]))
"""


def told_before_its_end(path: Path, after_lines: int) -> list[str]:
    script = _VICTIM.format(path=[str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        told = [victim.stdout.readline() for _ in range(after_lines)]
        victim.send_signal(signal.SIGKILL)
        told += victim.stdout.readlines()
    return [line.strip() for line in told if line.endswith("\n")]


@pytest.mark.parametrize("after_lines", [1, 160])
async def test_a_kill_parts_no_text_from_its_money(tmp_path: Path, after_lines: int) -> None:
    """What was told is there; what is there has been charged, and nothing else has been."""
    path = tmp_path / "l.sqlite"
    told = told_before_its_end(path, after_lines)
    async with BudgetLedger.open(path) as ledger:
        await ledger.verify()
        found = ledger.store.read(entries)
        posted = ledger.store.read(posted_entries)
    assert set(told) <= set(found)
    assert sorted(found) == sorted(posted)


def posted_entries(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT entry_id FROM journal WHERE kind = 'posted'")
    return [entry for (entry,) in found]
