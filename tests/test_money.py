"""Prices, amounts and caps: exact in, exact out, or refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import ConfigurationError
from quantroute.money import (
    MAX_AMOUNT_PUSD,
    NO_CAP,
    cap_pusd,
    cost_pusd,
    format_usd,
    parse_price,
    parse_reported_usd,
    to_pusd,
    to_usd,
    usd_per_million,
)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ("0.00000045", Decimal("0.00000045")),
        ("4.5e-7", Decimal("0.00000045")),
        ("4.5E-07", Decimal("0.00000045")),
        (" 0 ", Decimal(0)),
        ("-0", Decimal(0)),
        (0, Decimal(0)),
        ("-1", None),
        ("-1000000", None),
        ("NaN", None),
        ("Infinity", None),
        ("", None),
        ("free", None),
        (None, None),
        (True, None),
        ({}, None),
        ("1e300", None),
        ("0." + "1" * 60, None),
        (
            "0.000000123456789012345678901234567890123",
            Decimal("123456789012345678901234567890123e-39"),
        ),
        ("1e-3000000", None),  # not zero, and no fraction of three million digits
    ],
)
def test_published_prices_are_exact_or_unknown(published: object, expected: Decimal | None) -> None:
    assert parse_price(published) == expected


def test_a_float_price_raises() -> None:
    for call in (parse_price, lambda price: cost_pusd(1, price), to_pusd):
        with pytest.raises(TypeError):
            call(0.5)  # type: ignore[operator]


def test_a_real_bill_to_the_last_digit() -> None:
    # 202 output tokens at $2.20 per million were billed at 0.0004444.
    assert to_usd(cost_pusd(202, Decimal("0.0000022"))) == Decimal("0.0004444")


def test_thirds_are_rounded_up() -> None:
    assert cost_pusd(1, Decimal("0.0000000833333333333333")) == 83_334


@given(st.integers(0, 10**7), st.decimals(0, "0.01", places=16))
def test_cost_is_never_below_the_exact_product(tokens: int, price: Decimal) -> None:
    exact = Decimal(tokens) * price
    assert exact <= to_usd(cost_pusd(tokens, price)) < exact + Decimal("1e-12")


@given(st.integers(0, MAX_AMOUNT_PUSD))
def test_amounts_survive_the_way_to_dollars_and_back(amount_pusd: int) -> None:
    assert to_pusd(to_usd(amount_pusd)) == amount_pusd


@given(st.integers(0, 999 * 10**12))
def test_a_cost_sent_as_a_double_is_recovered_exactly(amount_pusd: int) -> None:
    """Dollars below a thousand have at most 15 digits in pico-dollars, which a double carries."""
    as_double = float(to_usd(amount_pusd))
    for reported in (as_double, Decimal(repr(as_double)), Decimal(as_double), f"{as_double:.17g}"):
        found = parse_reported_usd(reported)
        assert found is not None
        assert to_pusd(found) == amount_pusd


@pytest.mark.parametrize("reported", [None, True, "x", -1, Decimal("-0.1"), float("nan"), {}])
def test_odd_reported_costs_are_not_said(reported: object) -> None:
    assert parse_reported_usd(reported) is None


@pytest.mark.parametrize("cap", [0, 0.0, "0", "0.00", Decimal(0), "$0"])
def test_a_cap_of_zero_is_zero(cap: Any) -> None:
    assert cap_pusd(cap) == 0


def test_caps_round_down_and_floats_count_as_they_print() -> None:
    assert cap_pusd("0.0000000000019") == 1
    assert cap_pusd(0.1) == 10**11
    assert cap_pusd("100") == 100 * 10**12


def test_no_cap_must_be_spelled_out() -> None:
    assert cap_pusd(NO_CAP) is NO_CAP
    with pytest.raises(ConfigurationError, match="NO_CAP"):
        cap_pusd(None)


@pytest.mark.parametrize("cap", [-1, "-0.01", "nan", "inf", 1e309, True, "ten", [], "1e9"])
def test_impossible_caps_are_refused(cap: Any) -> None:
    with pytest.raises(ConfigurationError):
        cap_pusd(cap)


def test_negative_counts_and_amounts_are_refused() -> None:
    with pytest.raises(ValueError):
        cost_pusd(-1, Decimal(1))
    with pytest.raises(ValueError):
        to_pusd(Decimal("-0.1"))
    with pytest.raises(ValueError):
        to_pusd(Decimal("1e7"))


def test_display() -> None:
    assert usd_per_million(Decimal("0.00000045")) == Decimal("0.45")
    assert str(usd_per_million(Decimal("0.000003"))) == "3"
    assert format_usd(86_021_349_999_999) == "$86.0213"
    assert format_usd(-5 * 10**11) == "-$0.5000"
    assert format_usd(0, places=12) == "$0.000000000000"
