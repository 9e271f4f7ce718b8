"""The plan's figures against arithmetic by hand."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from plan_support import INCEPTRON, LISTED, MOONSHOT, demand, expectation, make_plan
from policy_support import make_endpoint
from quantroute.errors import ConfigurationError, NoEligibleEndpoint
from quantroute.generation import Accepted, Allocation
from quantroute.generation._expect import Sample, assumed, measured, t_quantile
from quantroute.money import PUSD_PER_USD

MISSION = ("b3", "b4", "b5", "b6", "b7", "b8")
TEN_MILLION = 10_000_000


def usd(amount_pusd: int) -> float:
    return amount_pusd / PUSD_PER_USD


def test_a_cap_below_one_hold_affords_nothing() -> None:
    """Four answers would cost less, but the first is not sent without its worst case."""
    plan = make_plan(demand(rows=4), cap_pusd=10**10)
    (item,) = plan.datasets
    assert item.cost_low_pusd < 10**10 < item.hold_pusd
    assert (item.affordable_tokens, item.affordable_rows, item.reached) == (0, 0, 0.0)
    assert not plan.fits
    assert plan.least_cap_pusd == item.hold_pusd
    assert make_plan(demand(rows=4), cap_pusd=plan.least_cap_pusd).fits


def test_the_missions_sixty_million_tokens_for_a_hundred_dollars() -> None:
    """Output alone is $132 at $2.20; with a quarter as much input the cap affords 7.2M for each."""
    plan = make_plan(*(demand(name, target_output_tokens=TEN_MILLION) for name in MISSION))
    assert plan.floor_pusd == 132 * PUSD_PER_USD
    for item in plan.datasets:
        assert item.lowest_output_usd_per_token == Decimal("0.0000022")
        assert (item.needed_rows, item.planned_rows, item.is_supplied) == (10_000, 10_000, True)
        # 10M x $2.20 + 2.5M x $0.45 = $23.125 at Inceptron; $30 + $1.50 at Moonshot AI.
        assert (usd(item.cost_low_pusd), usd(item.cost_high_pusd)) == (23.125, 31.5)
        assert (str(item.cheapest), str(item.dearest)) == ("inceptron/int4", "moonshotai/int4")
        assert usd(item.share_pusd) == pytest.approx(100 / 6)
        assert item.affordable_tokens == pytest.approx(100 / 6 / 23.125 * TEN_MILLION, abs=1)
        assert 6_800_000 < item.affordable_tokens < 7_300_000
        assert item.reached == pytest.approx(0.7207, abs=1e-4)
    assert not plan.fits
    assert plan.affordable_tokens == pytest.approx(43_243_243, abs=10)
    assert usd(plan.cost_low_pusd) == 138.75
    assert usd(plan.cost_high_pusd) == 189.0


def test_with_the_assumed_losses_the_mission_gets_a_little_less() -> None:
    """A mean of 2,000 under a limit of 8,192: about 1.6 % are cut, which is 6 % of the tokens."""
    losses = assumed(max_output_tokens=8_192, output_tokens=2_000)
    assert losses.truncated_share == pytest.approx(0.0153, abs=0.001)
    assert losses.accepted_share == pytest.approx(0.937, abs=0.004)
    plan = make_plan(
        *(demand(name, target_output_tokens=TEN_MILLION, expected=losses) for name in MISSION)
    )
    assert all(6_500_000 < item.affordable_tokens < 7_100_000 for item in plan.datasets)


def test_the_hold_the_admission_and_the_time_of_the_mission() -> None:
    """1,140 x $0.45 + 8,192 x $2.20 per million is held; 100 s of work per slot and one answer."""
    plan = make_plan(*(demand(name, target_output_tokens=TEN_MILLION) for name in MISSION))
    item = plan.datasets[0]
    assert item.hold_pusd == 1_140 * 450_000 + 8_192 * 2_200_000
    assert item.admitted == item.cap_pusd // item.hold_pusd == 899
    assert plan.in_flight == 2_000
    work_s = 6 * 10_000 * item.share_pusd / item.cost_low_pusd * 10
    assert plan.time_s == pytest.approx(work_s / 2_000 + 10)
    tight = make_plan(demand(target_output_tokens=TEN_MILLION), cap_usd=1)
    assert tight.in_flight == tight.datasets[0].admitted == 53


def test_the_endpoints_say_whom_they_serve_or_why_not() -> None:
    small = make_endpoint("tiny/int4", "Tiny", max_output_tokens=4_096)
    plan = make_plan(demand(endpoints=(*LISTED, small)), demand("b4", endpoints=LISTED))
    found = {str(item.endpoint.key): item for item in plan.endpoints}
    assert found["inceptron/int4"].serves == ("b3", "b4")
    assert found["baseten/fp4"].serves == ()
    assert any("BaseTen" in reason for reason in found["baseten/fp4"].reasons)
    assert "too few for 8,192 of output" in found["tiny/int4"].reasons[0]


def test_nobody_left_is_an_error_with_every_reason() -> None:
    with pytest.raises(NoEligibleEndpoint, match=r"for b3: .*baseten"):
        make_plan(demand(endpoints=LISTED[2:]))


def test_prompts_that_do_not_suffice_say_how_many_rollouts_would() -> None:
    plan = make_plan(demand(rows=4_000, target_output_tokens=TEN_MILLION))
    item = plan.datasets[0]
    assert (item.needed_rows, item.planned_rows, item.is_supplied) == (10_000, 4_000, False)
    assert item.rollouts_needed == 3
    assert item.reached == pytest.approx(0.4)
    assert plan.fits  # the cap is not what is missing


def test_without_a_target_every_row_is_wanted() -> None:
    plan = make_plan(demand(rows=1_000), cap_usd=1)
    item = plan.datasets[0]
    # 1,000 x (1,000 x $2.20 + 250 x $0.45) per million = $2.3125.
    assert usd(item.cost_low_pusd) == 2.3125
    assert item.reached == pytest.approx(432 / 1_000)
    assert not plan.fits


def test_row_targets_count_the_answers_that_will_be_bad() -> None:
    plan = make_plan(demand(target_rows=900, expected=expectation(good_share=0.9)))
    assert plan.datasets[0].needed_rows == 1_000


def test_what_is_done_is_not_planned_again() -> None:
    done = {
        "ended_rows": 4_000,
        "accepted": Accepted(rows=4_000, output_tokens=4_000_000),
        "spent_pusd": 9 * PUSD_PER_USD,
    }
    plan = make_plan(demand(target_output_tokens=TEN_MILLION, facts=done), cap_usd=20)
    item = plan.datasets[0]
    assert (item.needed_rows, usd(plan.spent_pusd)) == (6_000, 9.0)
    assert usd(item.cost_low_pusd) == pytest.approx(0.6 * 23.125)
    assert usd(item.share_pusd) == pytest.approx(11.0)
    assert usd(item.cap_pusd) == pytest.approx(20.0)
    assert item.affordable_tokens == pytest.approx(4_000_000 + 11 / 23.125 * 1e7, abs=2)


def test_a_small_dataset_leaves_its_share_to_the_large_ones() -> None:
    small = demand("small", target_output_tokens=1_000_000)
    plan = make_plan(small, demand("large", target_output_tokens=TEN_MILLION), cap_usd=20)
    assert [usd(item.share_pusd) for item in plan.datasets] == [2.3125, 17.6875]


def test_an_own_cap_bounds_a_dataset_and_money_beyond_all_needs_is_spread() -> None:
    plan = make_plan(
        demand("bounded", target_output_tokens=TEN_MILLION, cap_pusd=5 * PUSD_PER_USD),
        demand("free", target_output_tokens=1_000_000),
        cap_usd=50,
    )
    bounded, free = plan.datasets
    assert (usd(bounded.share_pusd), usd(bounded.cap_pusd)) == (5.0, 5.0)
    assert (usd(free.share_pusd), usd(free.cap_pusd)) == (2.3125, 45.0)
    assert not plan.fits


def test_priority_serves_the_first_wholly() -> None:
    plan = make_plan(
        demand("late", target_output_tokens=TEN_MILLION, priority=2),
        demand("soon", target_output_tokens=TEN_MILLION, priority=1),
        cap_usd=30,
        allocation=Allocation.PRIORITY,
    )
    assert [usd(item.share_pusd) for item in plan.datasets] == [6.875, 23.125]


def test_a_price_for_reasoning_counts_for_the_share_that_is_reasoning() -> None:
    prices = {
        "prompt": Decimal("0.0000004"),
        "completion": Decimal("0.000002"),
        "internal_reasoning": Decimal("0.000004"),
        "request": Decimal("0.001"),
    }
    pricing = type(INCEPTRON.pricing)(prices=prices)
    dear = make_endpoint("dear/int4", "Dear", pricing=pricing)
    thinking = expectation(reasoning_share=0.5, input_tokens=250.0)
    plan = make_plan(demand(rows=1_000, expected=thinking, endpoints=(dear,)))
    # 250k in at 0.4, 500k out at 2, 500k reasoning at 4 (all $/M), a thousand fees of $0.001.
    assert usd(plan.datasets[0].cost_low_pusd) == 0.1 + 1 + 2 + 1


def test_a_zero_cap_affords_nothing_and_takes_no_time_to_say_so() -> None:
    plan = make_plan(demand(target_output_tokens=TEN_MILLION), cap_usd=0)
    assert (plan.affordable_tokens, plan.in_flight, plan.time_s) == (0, 0, None)
    assert not plan.fits


def test_a_finished_run_needs_nothing() -> None:
    done = {"ended_rows": 20_000, "accepted": Accepted(rows=20_000, output_tokens=TEN_MILLION)}
    plan = make_plan(demand(target_output_tokens=TEN_MILLION, facts=done), cap_usd=0)
    assert plan.fits
    assert (plan.datasets[0].cost_low_pusd, plan.datasets[0].reached, plan.time_s) == (0, 1.0, 0.0)


def test_input_is_estimated_from_bytes_until_it_is_measured() -> None:
    """968 bytes a prompt are 242 tokens and a template of 8; the bound is what holds rest on."""
    rough = make_plan(demand(rows=10, expected=expectation())).datasets[0]
    assert (rough.input_tokens, rough.input_bound_tokens) == (2_500, 11_400)
    exact = make_plan(demand(rows=10, input_tokens=199.0)).datasets[0]
    assert exact.input_tokens == 1_990


def test_a_plan_without_a_dataset_or_a_slot_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        make_plan()
    with pytest.raises(ConfigurationError):
        make_plan(demand(), max_in_flight=0)


def test_an_interval_comes_from_the_answers_that_were_bought() -> None:
    """Five lengths with mean 300 and standard deviation 158.1: 300 +- 2.776 x 70.7."""
    lengths = (100, 200, 300, 400, 500)
    sample = Sample(
        answers=5,
        output_tokens=sum(lengths),
        output_tokens_squared=sum(length**2 for length in lengths),
        reasoning_tokens=750,
        input_tokens=50,
        accepted_tokens=1_200,
        good=4,
        truncated=1,
        timed_tokens=1_500,
        total_s=30.0,
    )
    found = measured(sample, expectation())
    half = 2.7764 * math.sqrt(25_000 / 5)
    assert (found.low, found.high) == (
        pytest.approx(300 - half, rel=0.01),
        pytest.approx(300 + half, rel=0.01),
    )
    assert (found.output_tokens, found.reasoning_share, found.input_tokens) == (300.0, 0.5, 10.0)
    assert (found.accepted_share, found.good_share, found.truncated_share) == (0.8, 0.8, 0.2)
    assert found.answer_s == pytest.approx(6.0)
    assert found.sureness.startswith("measured on 5 answers: 300 tokens each (95 %: 10")


def test_a_handful_of_answers_does_not_replace_the_assumption() -> None:
    few = Sample(answers=4, output_tokens=4, output_tokens_squared=4)
    assert measured(few, expectation()) == expectation()
    assert expectation().sureness == "assumed"


def test_a_sample_without_a_good_answer_keeps_the_plan_finite() -> None:
    bad = Sample(answers=10, output_tokens=1_000, output_tokens_squared=100_000)
    found = measured(bad, expectation())
    assert (found.accepted_share, found.low, found.high) == (pytest.approx(0.05), 100.0, 100.0)
    assert make_plan(demand(expected=found, target_rows=10)).datasets[0].needed_rows == 200


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1_000, 1.962)],
)
def test_t_quantiles_agree_with_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, rel=0.003)


def test_a_conversation_pays_for_its_earlier_answers_again() -> None:
    """Two turns: the second sends the first answer along, without its reasoning."""
    base = demand(rows=100, expected=expectation(reasoning_share=0.4))
    census = type(base.census)(
        dataset="b3",
        prompts=100,
        rows=100,
        requests=200,
        input_bytes=4 * 100 * 300,
        input_bound_tokens=100 * 1_600,
        longest_bound_tokens=1_000,
        replayed_answers=100,
    )
    two_turns = type(base)(
        spec=base.spec, census=census, expectation=base.expectation, bound=base.bound
    )
    item = make_plan(two_turns).datasets[0]
    assert item.requests == 200
    assert item.input_tokens == 200 * 8 + 100 * 300 + 100 * 600
    assert item.input_bound_tokens == 100 * 1_600 + 100 * 8_192
    assert MOONSHOT.key == item.dearest
