"""Rates per endpoint and class: false alarms are rare, real differences are found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count as counting

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fakes_of_records import make_record
from quantroute.generation import EndpointQuality, RowClass, quality_alarms
from quantroute.generation._alarms import QualityBook, log_evidence

NUMBERS = counting()


def played(rates: dict[str, float], rows: int, *, seed: int) -> QualityBook:
    """Endpoints in turn, each truncating at its rate."""
    rng, book = random.Random(seed), QualityBook()
    record = make_record()
    for _ in range(rows):
        for endpoint, rate in rates.items():
            found = RowClass.TRUNCATED if rng.random() < rate else RowClass.GOOD
            book.count(structs.replace(record, endpoint=endpoint, row_class=found))
    return book


def test_equal_endpoints_raise_hardly_any_alarm_however_often_one_looks() -> None:
    alarmed = sum(
        bool(played(dict.fromkeys("abc", 0.05), 400, seed=seed).alarms) for seed in range(40)
    )
    assert alarmed == 0


def test_a_worse_endpoint_is_named_once_and_soon() -> None:
    book = played({"a": 0.01, "b": 0.12, "c": 0.01}, 600, seed=5)
    (alarm,) = book.alarms
    assert (alarm.endpoint, alarm.row_class) == ("b", RowClass.TRUNCATED)
    assert alarm.answers < 400
    assert "b: " in str(alarm)
    assert "truncated" in str(alarm)


def test_a_better_endpoint_is_none_of_the_alarms_business() -> None:
    assert not [
        alarm for alarm in played({"a": 0.2, "b": 0.0}, 400, seed=6).alarms if alarm.endpoint == "b"
    ]


def test_a_difference_too_small_to_act_upon_is_no_alarm() -> None:
    quality = EndpointQuality(
        endpoint="a",
        classes={RowClass.TRUNCATED: 12_000, RowClass.GOOD: 988_000},
        output_tokens=0,
        accepted_tokens=0,
        answered_pusd=0,
    )
    other = replace(
        quality, endpoint="b", classes={RowClass.TRUNCATED: 10_000, RowClass.GOOD: 990_000}
    )
    assert log_evidence(12_000, 1_000_000, 10_000, 1_000_000) > 20  # certain, and of no use
    assert quality_alarms([quality, other]) == ()


def test_one_endpoint_alone_has_nothing_to_be_compared_with() -> None:
    assert not played({"a": 0.9}, 300, seed=7).alarms


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_evidence_is_symmetric_and_none_without_a_difference(
    hits: int, misses: int, other_hits: int, other_misses: int
) -> None:
    one, other = (hits, hits + misses), (other_hits, other_hits + other_misses)
    if one[1] + other[1] == 0:
        return
    assert abs(log_evidence(*one, *other) - log_evidence(*other, *one)) < 1e-9
    assert log_evidence(*one, *one) <= 1e-9 if one[1] else True


def test_e_is_at_most_one_in_the_mean_when_there_is_one_rate() -> None:
    """Over all outcomes of 8 and 8 answers, weighted by their probability: what Ville needs."""
    from math import comb, exp

    for rate in (0.03, 0.3, 0.5, 0.9):
        mean = sum(
            comb(8, one)
            * comb(8, two)
            * rate ** (one + two)
            * (1 - rate) ** (16 - one - two)
            * exp(log_evidence(one, 8, two, 8))
            for one in range(9)
            for two in range(9)
        )
        assert mean <= 1.0 + 1e-9
