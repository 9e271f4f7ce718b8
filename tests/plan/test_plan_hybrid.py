"""Own servers, the service, or both: hours and dollars."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_support import LISTED, demand, make_plan
from policy_support import K25
from quantroute import LocalEndpoint
from quantroute.errors import ConfigurationError
from quantroute.generation import Plan, Way, compare_ways


def server(name: str = "box", **changes: Any) -> LocalEndpoint:
    settings: dict[str, Any] = {
        "name": name,
        "base_url": "http://127.0.0.1:1/v1",
        "serves": K25,
        "quantization": "int4",
        "output_tokens_per_s": 1_000,
    }
    return LocalEndpoint(**(settings | changes))


def planned(*servers: LocalEndpoint, rows: int = 7_200, hosted: bool = True) -> Plan:
    """1,000 tokens and ten seconds an answer; a hundred requests in flight."""
    own = tuple(item.endpoint for item in servers)
    endpoints = LISTED if hosted else own
    return make_plan(demand(rows=rows, endpoints=endpoints, facts={"own": own}), max_in_flight=100)


def ways(*servers: LocalEndpoint, **changes: Any) -> dict[str, Way]:
    return {way.name: way for way in compare_ways(planned(*servers), servers, **changes)}


def test_hours_and_dollars_of_each_way() -> None:
    found = ways(server(usd_per_gpu_hour="3", gpus=8))
    own, hosted = found["all on own servers"], found["all hosted"]
    assert own.time_s == 7_200  # 7.2M tokens at 1,000 a second
    assert own.cost_pusd == pytest.approx(48 * 10**12, rel=1e-6)  # two hours of eight GPUs
    assert hosted.time_s == 720  # 7,200 answers of 10 s, a hundred at a time
    low = planned().datasets[0].cost_low_pusd
    assert hosted.cost_pusd == low
    both = found["both, as fast as can be"]
    assert both.time_s == pytest.approx(1 / (1 / 7_200 + 1 / 720))
    assert both.own_share == pytest.approx(Fraction(1, 11))
    assert {way.in_time for way in found.values()} == {None}


def test_a_deadline_takes_from_the_service_what_own_servers_cannot_do() -> None:
    found = ways(server(), deadline_s=3_600.0)
    mix = found["own servers, the rest hosted by the deadline"]
    assert mix.own_share == Fraction(1, 2)
    assert mix.cost_pusd == math.ceil(Fraction(found["all hosted"].cost_pusd, 2))
    assert mix.in_time
    assert not found["all on own servers"].in_time
    assert "own servers, the rest hosted by the deadline" not in ways(server(), deadline_s=8_000.0)


def test_two_servers_share_by_speed() -> None:
    found = ways(server("a"), server("b", output_tokens_per_s=3_000, output_usd_per_million="1"))
    own = found["all on own servers"]
    assert own.time_s == pytest.approx(1_800)
    assert own.cost_pusd == pytest.approx(7.2 * 10**12 * 3 / 4)


def test_a_speed_that_nobody_gave_is_guessed_from_answers_and_said_so() -> None:
    own = ways(server(output_tokens_per_s=None, max_in_flight=20))["all on own servers"]
    assert own.time_s == 3_600  # 7,200 answers of 10 s, twenty at a time
    assert not own.is_declared


def test_nothing_to_compare_without_both() -> None:
    box = server()
    assert compare_ways(planned(), ()) == ()
    assert compare_ways(planned(box, hosted=False), (box,)) == ()
    other = server("other", quantization="fp8")  # not planned with: it may serve nothing
    assert compare_ways(planned(), (other,)) == ()


@given(
    rate=st.integers(1, 10**6),
    rows=st.integers(1, 10**5),
    deadline_s=st.floats(1, 1e7),
    price=st.integers(0, 20),
)
def test_mixes_lie_between_the_whole_ways(
    rate: int, rows: int, deadline_s: float, price: int
) -> None:
    box = server(output_tokens_per_s=rate, output_usd_per_million=str(price))
    plan = planned(box, rows=rows)
    own, hosted, *mixes = compare_ways(plan, (box,), deadline_s=deadline_s)
    low, high = sorted((own.cost_pusd, hosted.cost_pusd))
    for mix in mixes:
        assert low <= mix.cost_pusd <= high
        assert 0 <= mix.own_share <= 1
    assert mixes[0].time_s <= min(own.time_s, hosted.time_s) * (1 + 1e-9)
    assert hosted.cost_pusd == plan.datasets[0].cost_low_pusd


def test_an_hourly_price_needs_a_speed_and_a_speed_needs_no_price() -> None:
    assert server().is_free
    with pytest.raises(ConfigurationError, match="usd_per_gpu_hour needs output_tokens_per_s"):
        server(usd_per_gpu_hour="2", output_tokens_per_s=None)
