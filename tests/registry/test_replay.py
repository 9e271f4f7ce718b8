"""The arithmetic of `benchmarks/replay.py`, on a few made-up readings."""

from __future__ import annotations

import importlib.util
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from quantroute.policy import ExclusionPolicy
from quantroute.registry import ChangeKind, EndpointList
from quantroute.registry._endpoints import parse_endpoints
from registry_support import MODEL, entry, listing

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/_replay.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not here")
BEGIN = datetime(2026, 7, 1, tzinfo=UTC)


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("quantroute_benchmarks_replay", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


replay: Any = _loaded() if SCRIPT.is_file() else None


def priced(tag: str, usd_per_million: str, **changes: Any) -> dict[str, Any]:
    """An endpoint that asks the same for input and output."""
    per_token = format(Decimal(usd_per_million) / 10**6, "f")
    name = tag.split("/")[0]
    return entry(
        tag,
        provider_name=name,
        name=f"{name} | {MODEL}",
        pricing={"prompt": per_token, "completion": per_token},
        **changes,
    )


DEAR = priced("moonshotai/int4", "4")
CHEAP = priced("hosta/int4", "2")
COARSE = priced("hostb/fp4", "1", quantization="fp4")


def lists(*readings: list[dict[str, Any]]) -> list[EndpointList]:
    return [
        parse_endpoints(MODEL, listing(*entries), fetched_at_s=0.0, source="made up")
        for entries in readings
    ]


def moments(found: list[EndpointList], *, limit: int = 3) -> list[Any]:
    """A reading a day; a basket of a million tokens each way; four requests in flight."""
    return [
        replay.look(
            item,
            BEGIN + timedelta(days=day),
            policy=ExclusionPolicy(),
            basket=replay.Basket(input_tokens=10**6, output_tokens=10**6),
            author="moonshotai",
            in_flight=4,
            limit=limit,
        )
        for day, item in enumerate(found)
    ]


def test_the_cheapest_native_endpoint_is_first_and_the_next_takes_what_it_does_not_grant() -> None:
    (moment,) = moments(lists([DEAR, CHEAP, COARSE]))
    assert moment.choice == "hosta/int4"
    assert moment.mix == {"hosta/int4": 0.75, "moonshotai/int4": 0.25}
    assert moment.cost_usd["quantroute"] == 4
    assert moment.cost_usd["mix"] == 5  # three at $4, one at $8
    assert moment.cost_usd["cheapest of all"] == 2
    assert moment.cost_usd["model's author"] == 8


def test_the_default_balancing_weighs_by_the_inverse_square_of_the_price() -> None:
    (moment,) = moments(lists([DEAR, CHEAP, COARSE]))
    # Weights 1, 4 and 16 of 21.
    assert float(moment.cost_usd["default balancing"]) == pytest.approx((8 + 4 * 4 + 16 * 2) / 21)
    assert moment.below_native == pytest.approx(16 / 21)
    assert moment.unlabelled == 0


def test_what_is_down_counts_for_nobody_and_nobody_may_be_left() -> None:
    (moment,) = moments(lists([{**CHEAP, "status": -5}, COARSE]))
    assert (moment.choice, moment.mix, moment.cost_usd["quantroute"]) == (None, {}, None)
    assert moment.cost_usd["default balancing"] == 2
    assert moment.cost_usd["model's author"] is None


def test_periods_last_until_the_choice_or_its_price_changes() -> None:
    risen = priced("hosta/int4", "3")
    found = replay.periods(
        moments(lists([DEAR, CHEAP], [DEAR, CHEAP], [DEAR, risen], [DEAR], [DEAR]))
    )
    assert [(period.choice, period.cost_usd, period.days) for period in found] == [
        ("hosta/int4", 4, 2.0),
        ("hosta/int4", 6, 1.0),
        ("moonshotai/int4", 8, 1.0),
    ]


def test_the_tally_tells_what_moved_the_choice() -> None:
    relabelled = priced("hosta/fp8", "2", quantization="fp8")
    found = lists([DEAR, CHEAP], [DEAR, relabelled], [DEAR, relabelled])
    result = replay.tally(found, moments(found))
    assert (result.changed_readings, result.moved, result.pin_lost, result.repriced) == (1, 1, 1, 0)
    assert result.kinds[ChangeKind.RELABELLED] == len(result.labels) == 1


def test_the_spread_is_weighted_with_time() -> None:
    found = moments(lists([DEAR, CHEAP], [DEAR, CHEAP], [DEAR, CHEAP], [DEAR], [DEAR]))
    result = replay.spread(found, "quantroute")
    assert (result.least, result.median, result.most, result.days) == (4, 4, 8, 4.0)
    assert float(result.mean) == pytest.approx(5)  # three days at $4, one at $8


def test_the_timeline_has_a_line_per_endpoint_that_ever_might_serve() -> None:
    found = moments(lists([DEAR, CHEAP, COARSE], [DEAR, COARSE], [DEAR, COARSE]))
    assert list(replay.timeline(found, width=4)) == [
        f"{'hosta/int4':22} ██  ",
        f"{'moonshotai/int4':22} ▒▒██",
    ]
