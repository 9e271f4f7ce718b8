"""Prices that can hardly be meant are named; honest differences are not."""

from __future__ import annotations

from decimal import Decimal
from io import StringIO

import pytest
from rich.console import Console

from policy_support import AT, K25, make_endpoint, recorded_catalogue, recorded_endpoints
from quantroute.policy import ExclusionPolicy, implausible_prices
from quantroute.report import verdict_table

HONEST = [
    make_endpoint(f"{name}/int4", name.title(), usd_in=usd_in, usd_out=usd_out)
    for name, usd_in, usd_out in (
        ("alpha", "0.0000006", "0.0000025"),
        ("beta", "0.00000045", "0.0000022"),
        ("gamma", "0.0000009", "0.00000375"),
    )
]


@pytest.mark.parametrize(
    ("usd_in", "usd_out", "words"),
    [
        ("0.0000006", "0.0000000025", "output listed at $0.0025 per million tokens, 1,000 times"),
        ("0.0000006", "0.0025", "output listed at $2500 per million tokens, 1,000 times above"),
        ("0.0006", "0.0000025", "input listed at $600 per million tokens, 1,000 times above"),
        ("0", "0", "output listed at $0 per million tokens, far below"),
    ],
)
def test_a_slip_of_the_unit_is_named(usd_in: str, usd_out: str, words: str) -> None:
    odd = make_endpoint("odd/int4", "Odd", usd_in=usd_in, usd_out=usd_out)
    found = implausible_prices([*HONEST, odd])
    assert list(found) == [odd.key]
    assert words in found[odd.key]


@pytest.mark.parametrize("factor", ["0.06", "0.5", "1", "9", "19"])
def test_honest_differences_are_not(factor: str) -> None:
    usd_in, usd_out = (f"{Decimal(usd) * Decimal(factor):f}" for usd in ("6e-7", "2.5e-6"))
    other = make_endpoint("other/int4", "Other", usd_in=usd_in, usd_out=usd_out)
    assert not implausible_prices([*HONEST, other])


def test_one_other_cannot_tell_who_is_wrong_and_other_models_do_not_count() -> None:
    odd = make_endpoint("odd/int4", "Odd", usd_out="0.0025")
    assert not implausible_prices([HONEST[0], odd])
    foreign = make_endpoint("odd/int4", "Odd", usd_out="0.0025", model="some/other")
    assert not implausible_prices([*HONEST, foreign])
    assert not implausible_prices([])


def test_the_recorded_listing_is_plausible() -> None:
    assert not implausible_prices(recorded_endpoints(recorded_catalogue(), K25))


def test_the_table_says_it_below() -> None:
    odd = make_endpoint("odd/int4", "Odd", usd_out="0.0000000025")
    bound = ExclusionPolicy().bind([*HONEST, odd], at=AT)
    console = Console(width=80, file=StringIO())
    console.print(verdict_table(bound, title="t"))
    text = " ".join(console.file.getvalue().split())
    assert "look before spending: " in text
    assert "1,000 times below what the others ask ($2.5)" in text
    assert "look before" not in str(ExclusionPolicy().bind(HONEST, at=AT))
