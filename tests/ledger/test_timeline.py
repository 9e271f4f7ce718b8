"""The journal as a story: what a reader beside the writer sees, however often it looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from property_support import examples
from quantroute.errors import JournalError
from quantroute.ledger import (
    Account,
    Basis,
    BudgetLedger,
    Charge,
    EntryId,
    Timeline,
    journal_reader,
)
from quantroute.ledger import _timeline as module
from quantroute.testing import FakeClock

steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "post", "void", "hold", "look", "set clock"]),
        st.integers(1, 10**9),
    ),
    max_size=40,
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=steps)
async def test_many_looks_tell_what_one_tells(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("timeline") / "run.sqlite"
    clock, often = FakeClock(), Timeline()
    open_entries: list[EntryId] = []
    async with BudgetLedger.open(path, cap="1.00", clock=clock) as ledger:
        for what, amount in steps:
            clock.advance(0.5)
            if what == "look":
                with journal_reader(path) as reader:
                    often.read(reader)
            elif what == "set clock":
                clock.set_time(clock.time_s() + (3600 if amount % 2 else -3600))
            elif what == "reserve":
                open_entries.append(await ledger.reserve(amount, account=Account("a")))
            elif open_entries:
                entry = open_entries.pop(0)
                if what == "post":
                    await ledger.post(entry, Charge(amount_pusd=amount, basis=Basis.REPORTED))
                elif what == "void":
                    await ledger.void(entry, reason="nothing came")
                else:
                    await ledger.hold(entry, reason="who knows")
        balance = ledger.balance()
        with journal_reader(path) as reader:
            once = Timeline().read(reader)
            assert often.read(reader) == once
    # Whatever the clock was set to: what was spent never comes back.
    assert [item.posted_pusd for item in once] == sorted(item.posted_pusd for item in once)
    last = once[-1]
    assert (last.posted_pusd, last.pending_pusd) == (balance.posted_pusd, balance.pending_pusd)
    assert last.cap_pusd == 10**12
    assert last.in_flight == balance.open_entries
    assert often.peak_pusd >= max(item.posted_pusd + item.pending_pusd for item in once)


async def test_moments_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_MOMENTS", 16)
    clock = FakeClock()
    async with BudgetLedger.open(tmp_path / "run.sqlite", cap="1.00", clock=clock) as ledger:
        for _ in range(100):
            clock.advance(1.0)
            entry = await ledger.reserve(10, account=Account("a"))
            await ledger.post(entry, Charge(amount_pusd=7, basis=Basis.REPORTED))
        with journal_reader(tmp_path / "run.sqlite") as reader:
            moments = Timeline().read(reader)
    assert 8 <= len(moments) <= 16
    assert moments[-1].posted_pusd == 700
    assert [item.at_s for item in moments] == sorted(item.at_s for item in moments)


async def test_a_reader_cannot_write(tmp_path: Path) -> None:
    async with BudgetLedger.open(tmp_path / "run.sqlite", cap="1.00"):
        with (
            pytest.raises(JournalError, match="readonly"),
            journal_reader(tmp_path / "run.sqlite") as reader,
        ):
            reader.execute("DELETE FROM journal")


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be read"), journal_reader(tmp_path / "x.sqlite"):
        pass
    assert not (tmp_path / "x.sqlite").exists()
