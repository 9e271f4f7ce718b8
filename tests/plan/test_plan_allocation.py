"""Sharing a cap: nobody above his need, nothing above the cap, more money never means less."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.generation import Allocation, Claim, allocate
from quantroute.generation._allocation import share_out

AMOUNTS = st.integers(0, 10**15)
CLAIMS = st.lists(
    st.builds(
        Claim,
        name=st.just(""),
        need_pusd=AMOUNTS,
        limit_pusd=st.none() | AMOUNTS,
        weight=st.builds(Fraction, st.integers(1, 50), st.integers(1, 9)),
        priority=st.integers(1, 3),
    ),
    min_size=1,
    max_size=7,
).map(
    lambda claims: [
        Claim(
            name=str(number),
            need_pusd=claim.need_pusd,
            limit_pusd=claim.limit_pusd,
            weight=claim.weight,
            priority=claim.priority,
        )
        for number, claim in enumerate(claims)
    ]
)
RULES = st.sampled_from(Allocation)


def claims_of(*needs: int, **changes: int | None) -> list[Claim]:
    return [Claim(name=str(i), need_pusd=need, **changes) for i, need in enumerate(needs)]


@given(AMOUNTS, CLAIMS, RULES)
def test_shares_stay_within_the_sum_and_the_needs_and_waste_nothing(
    amount: int, claims: list[Claim], rule: Allocation
) -> None:
    """All of the sum is given unless all needs are met, but for a pico-dollar per claim."""
    shares = allocate(amount, claims, rule)
    needs = {claim.name: claim.bounded_need_pusd for claim in claims}
    assert all(0 <= shares[name] <= need for name, need in needs.items())
    useful = min(amount, sum(needs.values()))
    assert useful - len(claims) <= sum(shares.values()) <= useful


@given(AMOUNTS, AMOUNTS, CLAIMS, RULES)
def test_more_money_never_means_less_for_anybody(
    amount: int, more: int, claims: list[Claim], rule: Allocation
) -> None:
    before, after = allocate(amount, claims, rule), allocate(amount + more, claims, rule)
    # A later group's money can shrink by the pico-dollar that rounding left the earlier one.
    slack = len(claims) if rule is Allocation.PRIORITY else 0
    assert all(after[name] >= share - slack for name, share in before.items())


@given(AMOUNTS, CLAIMS, RULES)
def test_sharing_out_ignores_needs_but_no_limit(
    amount: int, claims: list[Claim], rule: Allocation
) -> None:
    shares = share_out(amount, claims, rule)
    needs = allocate(amount, claims, rule)
    assert sum(shares.values()) <= amount
    for claim in claims:
        assert shares[claim.name] >= needs[claim.name]
        assert claim.limit_pusd is None or shares[claim.name] <= claim.limit_pusd
    if any(claim.limit_pusd is None for claim in claims):
        assert sum(shares.values()) >= amount - 2 * len(claims)


def test_what_a_small_need_leaves_over_goes_to_the_others() -> None:
    shares = allocate(90, claims_of(10, 100, 100), Allocation.EQUAL)
    assert shares == {"0": 10, "1": 40, "2": 40}


def test_a_limit_counts_like_a_need() -> None:
    claims = [*claims_of(100), Claim(name="own cap", need_pusd=100, limit_pusd=5)]
    assert allocate(100, claims, Allocation.EQUAL) == {"0": 95, "own cap": 5}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Allocation.EQUAL, {"a": 30, "b": 30, "c": 30}),
        (Allocation.WEIGHTED, {"a": 15, "b": 15, "c": 60}),
        (Allocation.PRIORITY, {"a": 80, "b": 2, "c": 8}),
    ],
)
def test_each_rule_by_hand(rule: Allocation, expected: dict[str, int]) -> None:
    """c weighs four times as much as the others; a comes first by priority."""
    claims = [
        Claim(name="a", need_pusd=80, priority=1),
        Claim(name="b", need_pusd=80, priority=2),
        Claim(name="c", need_pusd=80, priority=2, weight=Fraction(4)),
    ]
    assert allocate(90, claims, rule) == expected
