"""The pure machine: a Hypothesis state test against a model that is too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from property_support import examples
from quantroute.errors import BudgetExceeded, ConfigurationError, EntryStateError
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
from quantroute.ledger._state import LedgerState
from quantroute.money import NO_CAP, PicoUSD
from quantroute.pricing import TokenUsage

ACCOUNTS = [Account(path) for path in ("", "run", "run/a", "run/b", "other")]
AMOUNTS = st.integers(0, 60)


def reserved(entry: str, amount: int, account: Account = ROOT) -> Reserved:
    return Reserved(
        entry_id=EntryId(entry),
        account=account,
        amount_pusd=amount,
        endpoint="a/int4",
        request_id="r",
        attempt=1,
        owner="o",
        at_s=0.0,
    )


def posted(entry: str, amount: int) -> Posted:
    charge = Charge(amount_pusd=amount, basis=Basis.REPORTED)
    return Posted(entry_id=EntryId(entry), charge=charge, at_s=0.0)


def voided(entry: str) -> Voided:
    return Voided(entry_id=EntryId(entry), reason="x", at_s=0.0)


def held(entry: str) -> Held:
    return Held(entry_id=EntryId(entry), reason="x", generation_id=None, at_s=0.0)


class LedgerMachine(RuleBasedStateMachine):
    """Random traffic; every balance is recomputed from the plain list of what happened."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.state = LedgerState(resolved={})
        self.caps: dict[Account, int] = {}
        self.lowered: set[Account] = set()
        self.reservations: dict[str, tuple[Account, int]] = {}
        self.charges: dict[str, int] = {}
        self.gone: set[str] = set()
        self.journal: list[Record] = []
        self.made = 0
        self.take(CapSet(account=ROOT, cap=PicoUSD(200), at_s=0.0))
        self.caps[ROOT] = 200

    def take(self, record: Record) -> None:
        self.state.replay(record)
        self.journal.append(record)

    def under(self, account: Account, names: set[str]) -> list[str]:
        return [name for name in names if account in lineage(self.reservations[name][0])]

    def spent(self, account: Account) -> int:
        return sum(self.charges[name] for name in self.under(account, set(self.charges)))

    def pending(self, account: Account) -> int:
        still = set(self.reservations) - set(self.charges) - self.gone
        return sum(self.reservations[name][1] for name in self.under(account, still))

    @rule(target=entries, account=st.sampled_from(ACCOUNTS), amount=AMOUNTS)
    def reserve(self, account: Account, amount: int) -> str:
        self.made += 1
        name = f"e{self.made}"
        fits = all(
            self.spent(path) + self.pending(path) + amount <= self.caps[path]
            for path in lineage(account)
            if path in self.caps
        )
        if fits:
            self.take(reserved(name, amount, account))
            self.reservations[name] = (account, amount)
        else:
            with pytest.raises(BudgetExceeded):
                self.take(reserved(name, amount, account))
        return name

    @rule(name=entries, amount=st.integers(0, 90))
    def post(self, name: str, amount: int) -> None:
        if name in self.reservations and name not in self.charges and name not in self.gone:
            self.take(posted(name, amount))
            self.charges[name] = amount
        else:
            with pytest.raises(EntryStateError):
                self.take(posted(name, amount))

    @rule(name=consumes(entries))
    def void(self, name: str) -> None:
        if name in self.reservations and name not in self.charges and name not in self.gone:
            self.take(voided(name))
            self.gone.add(name)
        else:
            with pytest.raises(EntryStateError):
                self.take(voided(name))

    @rule(name=entries)
    def hold(self, name: str) -> None:
        entry = self.state.entries.get(EntryId(name))
        if entry is not None and entry.status is EntryStatus.RESERVED:
            self.take(held(name))
        else:
            with pytest.raises(EntryStateError):
                self.take(held(name))

    @rule(account=st.sampled_from(ACCOUNTS[1:]), cap=st.integers(0, 150))
    def set_cap(self, account: Account, cap: int) -> None:
        self.take(CapSet(account=account, cap=PicoUSD(cap), at_s=0.0))
        if self.spent(account) + self.pending(account) > cap:
            self.lowered.add(account)
        self.caps[account] = cap

    @invariant()
    def sums_are_what_the_list_says(self) -> None:
        for path, state in self.state.accounts.items():
            assert state.posted_pusd == self.spent(path)
            assert state.pending_pusd == self.pending(path)
            assert 0 <= state.held_pusd <= state.pending_pusd

    @invariant()
    def no_cap_is_passed_but_by_flagged_overruns(self) -> None:
        for path, cap in self.caps.items():
            if path not in self.lowered:
                state = self.state.account(path)
                assert state.posted_pusd + state.pending_pusd <= cap + state.overrun_pusd

    @invariant()
    def replaying_the_journal_gives_the_same_state(self) -> None:
        twin = LedgerState(resolved={})
        for record in self.journal:
            twin.replay(record)
        assert twin == self.state


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


def funded(cap: int) -> LedgerState:
    state = LedgerState(resolved={})
    state.replay(CapSet(account=ROOT, cap=PicoUSD(cap), at_s=0.0))
    return state


def test_a_cap_of_zero_admits_no_paid_request_and_a_free_one() -> None:
    state = funded(0)
    with pytest.raises(BudgetExceeded):
        state.replay(reserved("a", 1))
    state.replay(reserved("b", 0))


def test_the_tightest_account_on_the_way_up_is_named() -> None:
    state = funded(1000)
    state.replay(CapSet(account=Account("run/a"), cap=PicoUSD(10), at_s=0.0))
    with pytest.raises(BudgetExceeded) as caught:
        state.replay(reserved("a", 11, Account("run/a")))
    assert caught.value.account == "run/a"
    assert not caught.value.can_ever_fit


def test_room_that_is_only_reserved_may_come_back() -> None:
    state = funded(10)
    state.replay(reserved("a", 10))
    with pytest.raises(BudgetExceeded) as caught:
        state.replay(reserved("b", 1))
    assert caught.value.can_ever_fit


def test_a_charge_above_its_reservation_is_posted_in_full() -> None:
    state = funded(10)
    state.replay(reserved("a", 10))
    state.replay(posted("a", 25))
    root = state.account(ROOT)
    assert (root.posted_pusd, root.overrun_pusd, root.pending_pusd) == (25, 15, 0)


def test_an_unlimited_ledger_admits_everything() -> None:
    state = LedgerState()
    state.replay(CapSet(account=ROOT, cap=NO_CAP, at_s=0.0))
    state.replay(reserved("a", 2**62))


@pytest.mark.parametrize("amount", [-1, 2**63])
def test_impossible_amounts_are_refused(amount: int) -> None:
    with pytest.raises(ValueError):
        funded(10).replay(reserved("a", amount))


def test_a_float_amount_is_refused() -> None:
    with pytest.raises(TypeError):
        funded(10).replay(reserved("a", 0.5))  # type: ignore[arg-type]


def test_a_failed_check_changes_nothing() -> None:
    state = funded(10)
    state.replay(reserved("a", 10))
    before = repr(state)
    for record in (reserved("a", 0), reserved("b", 1), posted("zzz", 1), posted("a", -1)):
        with pytest.raises((EntryStateError, BudgetExceeded, ValueError)):
            state.replay(record)
    assert repr(state) == before


def test_tokens_are_summed_on_every_level() -> None:
    state = funded(100)
    state.replay(reserved("a", 10, Account("run/a")))
    usage = TokenUsage(input_tokens=5, output_tokens=7, reasoning_tokens=3, cached_tokens=2)
    charge = Charge(amount_pusd=9, basis=Basis.REPORTED, usage=usage)
    state.replay(Identified(entry_id=EntryId("a"), generation_id="gen-1", at_s=0.0))
    state.replay(Posted(entry_id=EntryId("a"), charge=charge, at_s=0.0))
    for path in ("", "run", "run/a"):
        sums = state.account(Account(path))
        assert (sums.input_tokens, sums.output_tokens, sums.reasoning_tokens) == (5, 7, 3)


def test_notes_keep_the_last_value() -> None:
    state = funded(1)
    for value in ("1", "2"):
        state.replay(Noted(key="k", value=value, at_s=0.0))
    assert state.notes == {"k": "2"}


@pytest.mark.parametrize("path", ["/", "a//b", "/a", "a/", "a\nb"])
def test_malformed_accounts_are_refused(path: str) -> None:
    with pytest.raises(ConfigurationError):
        check_account(path)


def test_lineage() -> None:
    assert lineage(Account("run/a")) == ("", "run", "run/a")
    assert lineage(ROOT) == ("",)
