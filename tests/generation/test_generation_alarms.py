"""Rates per endpoint and class: false alarms are rare, real differences are found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import comb, exp, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fakes_of_records import make_record
from quantroute.generation import (
    EndpointQuality,
    RowClass,
    merged_qualities,
    quality_alarms,
    stratum_of,
)
from quantroute.generation._alarms import QualityBook, log_evidence

ANSWER = make_record()


def played(rates: Mapping[str, float], rows: int, *, seed: int) -> QualityBook:
    """Endpoints in turn, each truncating at its rate."""
    rng, book = random.Random(seed), QualityBook()
    for _ in range(rows):
        for endpoint, rate in rates.items():
            count(book, endpoint, truncated=rng.random() < rate)
    return book


def count(
    book: QualityBook, endpoint: str, *, truncated: bool, dataset: str = "b3", **changes: int
) -> None:
    found = RowClass.TRUNCATED if truncated else RowClass.GOOD
    record = structs.replace(ANSWER, endpoint=endpoint, row_class=found, **changes)
    book.count(dataset, record)


def quality(endpoint: str, truncated: int, good: int) -> EndpointQuality:
    kind = stratum_of("b3", turn=0, revision=0, max_output_tokens=256)
    return EndpointQuality(
        endpoint=endpoint,
        by_stratum={kind: {RowClass.TRUNCATED: truncated, RowClass.GOOD: good}},
        output_tokens=0,
        accepted_tokens=0,
        answered_pusd=0,
    )


def test_equal_endpoints_raise_hardly_any_alarm_however_often_one_looks() -> None:
    alarmed = sum(
        bool(played(dict.fromkeys("abc", 0.05), 400, seed=seed).alarms) for seed in range(40)
    )
    assert alarmed == 0


def test_a_worse_endpoint_is_named_once_and_soon() -> None:
    book = played({"a": 0.01, "b": 0.12, "c": 0.01}, 600, seed=5)
    (alarm,) = book.alarms
    assert (alarm.endpoint, alarm.row_class) == ("b", RowClass.TRUNCATED)
    assert alarm.answers < 300
    assert "b: " in str(alarm)
    assert "truncated" in str(alarm)


def test_a_better_endpoint_is_none_of_the_alarms_business() -> None:
    assert not [
        alarm for alarm in played({"a": 0.2, "b": 0.0}, 400, seed=6).alarms if alarm.endpoint == "b"
    ]


def test_a_difference_too_small_to_act_upon_is_no_alarm() -> None:
    assert log_evidence(12_000, 1_000_000, 10_000, 1_000_000) > 20  # certain, and of no use
    one, other = quality("a", 12_000, 988_000), quality("b", 10_000, 990_000)
    assert quality_alarms([one, other]) == ()
    assert quality_alarms([one, quality("b", 1_000, 999_000)])


def test_one_endpoint_alone_has_nothing_to_be_compared_with() -> None:
    assert not played({"a": 0.9}, 300, seed=7).alarms


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ({"dataset": "short"}, {"dataset": "long"}),
        ({"max_output_tokens": 8_192}, {"max_output_tokens": 1_024}),
        ({"turn": 0}, {"turn": 1}),
        ({"revision": 0}, {"revision": 1}),
    ],
)
def test_an_endpoint_that_gets_the_hard_work_is_not_worse_for_it(
    easy: dict[str, int], hard: dict[str, int]
) -> None:
    """One has mostly work of which 30 % is cut everywhere, the other mostly such with 2 %."""
    rng, book = random.Random(8), QualityBook()
    for _ in range(4_000):
        is_hard = rng.random() < 0.5
        endpoint = "b" if (rng.random() < 0.9) is is_hard else "a"
        truncated = rng.random() < (0.3 if is_hard else 0.02)
        count(book, endpoint, truncated=truncated, **(hard if is_hard else easy))
    one, other = book.qualities()
    assert other.rate(RowClass.TRUNCATED) > 3 * one.rate(RowClass.TRUNCATED)
    assert book.alarms == []
    assert quality_alarms(book.qualities()) == ()


def test_an_endpoint_that_is_worse_at_easy_work_does_not_hide_among_the_hard() -> None:
    """As good as the other by the whole: it gets only what is hardly ever cut elsewhere."""
    rng, book = random.Random(9), QualityBook()
    for _ in range(1_500):
        count(book, "a", truncated=rng.random() < 0.2, dataset="long")
        for endpoint, rate in (("a", 0.02), ("b", 0.11)):
            count(book, endpoint, truncated=rng.random() < rate, dataset="short")
    one, other = book.qualities()
    assert other.rate(RowClass.TRUNCATED) == pytest.approx(one.rate(RowClass.TRUNCATED), abs=0.02)
    (alarm,) = book.alarms
    assert alarm.endpoint == "b"
    assert quality_alarms(merged_qualities([book.qualities()]))


def test_what_nobody_else_was_asked_says_nothing() -> None:
    """Neither for nor against: alone with a dataset, an endpoint is as before it."""
    rng, book = random.Random(10), QualityBook()
    for _ in range(2_000):
        count(book, "a", truncated=rng.random() < 0.5, dataset="its own")
        for endpoint in "ab":
            count(book, endpoint, truncated=rng.random() < 0.05)
    assert book.alarms == []
    (alarm,) = quality_alarms(
        [*book.qualities(), replace(quality("c", 60, 140), by_stratum=like(book, 60, 140))]
    )
    assert (alarm.endpoint, alarm.answers) == ("c", 200)


def like(book: QualityBook, truncated: int, good: int) -> Mapping[object, Mapping[RowClass, int]]:
    """So many answers of the kind that both endpoints of a book have."""
    kinds = [set(item.by_stratum) for item in book.qualities()]
    (common,) = set.intersection(*kinds)
    return {common: {RowClass.TRUNCATED: truncated, RowClass.GOOD: good}}


def test_files_of_shards_add_up() -> None:
    merged = merged_qualities([(quality("a", 1, 9),), (quality("a", 2, 8), quality("b", 0, 5))])
    assert {item.endpoint: item.classes for item in merged} == {
        "a": Counter({RowClass.TRUNCATED: 3, RowClass.GOOD: 17}),
        "b": Counter({RowClass.GOOD: 5}),
    }


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_evidence_is_symmetric_and_none_where_there_is_nothing_to_compare(
    hits: int, misses: int, other_hits: int, other_misses: int
) -> None:
    one, other = (hits, hits + misses), (other_hits, other_hits + other_misses)
    assert log_evidence(*one, *other) == pytest.approx(log_evidence(*other, *one), abs=1e-9)
    assert log_evidence(*one, 0, 0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("answers", "other_answers"), [(1, 1), (3, 11), (9, 8)])
def test_evidence_is_one_in_the_mean_over_rates_when_there_is_one_for_both(
    answers: int, other_answers: int
) -> None:
    """Over all outcomes, weighted by their probability for a rate drawn from Beta(1/2, 1/2)."""
    mean = sum(
        comb(answers, one)
        * comb(other_answers, two)
        * probability(one + two, answers + other_answers)
        * exp(log_evidence(one, answers, two, other_answers))
        for one in range(answers + 1)
        for two in range(other_answers + 1)
    )
    assert mean == pytest.approx(1.0)


def probability(hits: int, answers: int) -> float:
    """Of such a series, each answer predicted by those before it (Krichevsky and Trofimov)."""
    series = [1] * hits + [0] * (answers - hits)
    return prod(
        (series[:seen].count(item) + 0.5) / (seen + 1.0) for seen, item in enumerate(series)
    )
