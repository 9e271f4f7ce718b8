"""Elastic output limits: full while money is plenty, ordinary when it is short, never above."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.generation._limits import LengthModel, OutputLimits, remaining_pusd
from quantroute.ledger import Account, BudgetLedger
from quantroute.money import PicoUSD
from quantroute.pricing import Quote

QUOTE = Quote(input_pusd=Fraction(450_000), output_pusd=Fraction(2_200_000), fee_pusd=PicoUSD(0))
DOLLAR = 10**12


def limits(*, full: int = 16_384, slots: int = 2_000, seen: int = 500) -> OutputLimits:
    model = LengthModel()
    for number in range(seen):
        model.add(100 + number % 1000)
    return OutputLimits(full_tokens=full, slots=slots, lengths=model)


def test_full_while_every_slot_can_afford_it() -> None:
    chosen = limits().choose(quote=QUOTE, input_tokens=100, remaining_pusd=100 * DOLLAR)
    assert chosen == 16_384


def test_the_share_of_a_slot_when_money_gets_short() -> None:
    chosen = limits().choose(quote=QUOTE, input_tokens=0, remaining_pusd=44 * DOLLAR)
    # $44 / 2,000 slots / $2.20 per million, less the mean answer
    assert chosen == 9_650  # 10,000 - 349.5


def test_answers_that_were_cut_do_not_bring_the_limit_down() -> None:
    """The limit cuts a twentieth, again and again: it stays where it was."""
    rng, chosen = random.Random(1), limits(seen=0)
    for _ in range(200):
        chosen.lengths.add(min(round(rng.lognormvariate(6, 0.6)), 16_384))
    first = chosen.choose(quote=QUOTE, input_tokens=0, remaining_pusd=0)
    for _ in range(20_000):
        limit = chosen.choose(quote=QUOTE, input_tokens=0, remaining_pusd=0)
        chosen.lengths.add(min(round(rng.lognormvariate(6, 0.6)), limit))
    assert limit == pytest.approx(first, rel=0.25)


async def test_a_dataset_counts_its_share_of_the_slots() -> None:
    async with BudgetLedger.in_memory(cap="100") as ledger:
        await ledger.set_cap(Account("r/a"), "10")
        whole, own = ledger.balance(), ledger.balance(Account("r/a"))
    assert remaining_pusd(own, [whole], datasets=6) == 60 * DOLLAR
    assert remaining_pusd(own, [whole], datasets=60) == 100 * DOLLAR


def test_never_below_what_nearly_all_answers_need() -> None:
    ordinary = limits().lengths.ordinary()
    assert ordinary is not None
    chosen = limits().choose(quote=QUOTE, input_tokens=0, remaining_pusd=DOLLAR)
    assert chosen == ordinary.most_tokens == 603  # 1.05 times 574, the 95th of a hundred


def test_nothing_is_guessed_before_enough_answers_were_seen() -> None:
    few = limits(seen=63)
    assert few.choose(quote=QUOTE, input_tokens=0, remaining_pusd=DOLLAR) == 16_384


def test_switched_off_or_without_a_cap_the_limit_is_the_users() -> None:
    fixed = OutputLimits(full_tokens=9, slots=1, is_elastic=False)
    assert fixed.choose(quote=QUOTE, input_tokens=0, remaining_pusd=1) == 9
    assert limits().choose(quote=QUOTE, input_tokens=0, remaining_pusd=None) == 16_384
    assert limits().choose(quote=None, input_tokens=0, remaining_pusd=1) == 16_384


def test_a_cut_answer_is_asked_for_again_with_twice_the_limit_up_to_the_full_one() -> None:
    chosen = limits(full=5_000)
    assert chosen.after_cut(1_200) == 2_400
    assert chosen.after_cut(2_400) == 4_800
    assert chosen.after_cut(4_800) == 5_000
    assert chosen.after_cut(5_000) is None


@given(st.integers(1, 50_000), st.integers(1, 5_000), st.integers(0, 10**6), st.integers(0, 10**16))
def test_the_limit_is_always_between_one_and_the_users(
    full: int, slots: int, input_tokens: int, remaining: int
) -> None:
    chosen = limits(full=full, slots=slots).choose(
        quote=QUOTE, input_tokens=input_tokens, remaining_pusd=remaining
    )
    assert 1 <= chosen <= full


@given(
    st.integers(1, 50_000), st.integers(1, 5_000), st.integers(0, 10**4), st.integers(0, 3 * 10**15)
)
def test_what_goes_unasked_would_have_been_given_the_full_limit(
    full: int, slots: int, input_tokens: int, remaining_pusd: int
) -> None:
    """Whatever each of them costs, the money would still have been plenty for the next."""
    chosen = limits(full=full, slots=slots)
    chosen.choose(quote=QUOTE, input_tokens=input_tokens, remaining_pusd=remaining_pusd)
    worst_pusd = QUOTE.cost_pusd(input_tokens=input_tokens, output_tokens=full)
    afresh = limits(full=full, slots=slots)
    unasked = 0
    while chosen.is_plenty_for(input_tokens):
        unasked += 1
        remaining_pusd -= worst_pusd
        limit = afresh.choose(quote=QUOTE, input_tokens=input_tokens, remaining_pusd=remaining_pusd)
        assert limit == full
    assert unasked <= 64


def test_a_longer_prompt_or_a_refusal_asks_again() -> None:
    chosen = limits()
    assert not chosen.is_plenty_for(100)
    chosen.choose(quote=QUOTE, input_tokens=100, remaining_pusd=100 * DOLLAR)
    assert chosen.is_plenty_for(100)
    assert not chosen.is_plenty_for(101)
    chosen.look_again()
    assert not chosen.is_plenty_for(100)
    chosen.choose(quote=QUOTE, input_tokens=100, remaining_pusd=100 * DOLLAR)
    assert chosen.choose(quote=QUOTE, input_tokens=0, remaining_pusd=44 * DOLLAR) == 9_650
    assert not chosen.is_plenty_for(0)
