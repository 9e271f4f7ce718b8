"""The cost of an accepted row: who is preferred, who loses traffic, who comes back."""

from __future__ import annotations

import random
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.domain import Endpoint, EndpointKey, Quantization
from quantroute.pricing import Pricing
from quantroute.routing import Candidate, EndpointEconomy
from quantroute.routing._economy import PROBE_EVERY

CHEAP, DEAR = EndpointKey("m/x", "cheap"), EndpointKey("m/x", "dear")


def candidates(economy: EndpointEconomy, **prices: int) -> list[Candidate]:
    found = []
    for tag, price in prices.items():
        endpoint = Endpoint(
            model="m/x",
            tag=tag,
            provider_name=tag.title(),
            quantization=Quantization.INT4,
            pricing=Pricing.flat(input_usd_per_token="0", output_usd_per_token="0.000002"),
        )
        found.append(
            Candidate(
                endpoint=endpoint,
                expected_pusd=int(price * economy.factor(endpoint.key)),
                worst_pusd=2 * price,
                max_tokens=10,
                attempt_pusd=price,
            )
        )
    return found


def run(
    economy: EndpointEconomy, rows: int, *, accepts: dict[str, float], seed: int = 3, **prices: int
) -> dict[str, int]:
    """Give each row to the first in order; how many rows each endpoint had."""
    rng = random.Random(seed)
    had = dict.fromkeys(prices, 0)
    for _ in range(rows):
        first = economy.ordered(candidates(economy, **prices))[0]
        tag, key = first.endpoint.tag, first.endpoint.key
        had[tag] += 1
        price = prices[tag]
        answered(economy, key, listed_pusd=price, billed_pusd=price)
        economy.judged(key, account="", accepted=rng.random() < accepts[tag])
    return had


def answered(
    economy: EndpointEconomy,
    key: EndpointKey,
    *,
    listed_pusd: int,
    billed_pusd: int,
    account: str = "",
    output_tokens: int = 100,
) -> None:
    """An answer that the price list puts at `listed_pusd`, prompt left out."""
    economy.answered(
        key,
        account=account,
        input_pusd=0,
        pusd_per_output_token=listed_pusd / output_tokens,
        output_tokens=output_tokens,
        billed_pusd=billed_pusd,
    )


def worked(
    economy: EndpointEconomy, key: EndpointKey, account: str, *, tokens: int, accepted: float
) -> None:
    """A hundred answers at ten pico-dollars a token, of which a share is accepted."""
    for number in range(100):
        price = 10 * tokens
        answered(
            economy,
            key,
            listed_pusd=price,
            billed_pusd=price,
            account=account,
            output_tokens=tokens,
        )
        economy.judged(key, account=account, accepted=number % 10 < 10 * accepted)


def test_without_evidence_the_list_price_decides() -> None:
    economy = EndpointEconomy()
    tags = [item.endpoint.tag for item in economy.ordered(candidates(economy, dear=30, cheap=20))]
    assert tags == ["cheap", "dear"]


def test_a_cheap_endpoint_that_is_dearer_per_accepted_row_loses_its_traffic() -> None:
    had = run(EndpointEconomy(), 2_000, accepts={"cheap": 0.5, "dear": 0.98}, cheap=2200, dear=3000)
    assert had["cheap"] < 300
    assert had["cheap"] >= 1_700 // PROBE_EVERY - 2  # it is still probed


def test_a_cheap_endpoint_that_is_bad_but_still_cheaper_keeps_it() -> None:
    had = run(EndpointEconomy(), 2_000, accepts={"cheap": 0.7, "dear": 0.98}, cheap=1000, dear=3000)
    assert had["dear"] == 0


def test_prompts_that_fail_everywhere_move_nobody_for_long() -> None:
    had = run(EndpointEconomy(), 3_000, accepts={"cheap": 0.4, "dear": 0.4}, cheap=2200, dear=3000)
    assert had["cheap"] > 2_400


def test_an_endpoint_that_recovers_gets_its_traffic_back() -> None:
    economy = EndpointEconomy()
    bad = {"cheap": 0.3, "dear": 0.98}
    assert run(economy, 1_000, accepts=bad, cheap=2200, dear=3000)["cheap"] < 300
    run(economy, 6_000, accepts={"cheap": 1.0, "dear": 0.98}, cheap=2200, dear=3000)
    had = run(economy, 1_000, accepts={"cheap": 1.0, "dear": 0.98}, cheap=2200, dear=3000)
    assert had["cheap"] > 900


def test_one_bad_row_condemns_nobody() -> None:
    economy = EndpointEconomy()
    answered(economy, CHEAP, listed_pusd=100, billed_pusd=100)
    economy.judged(CHEAP, account="", accepted=False)
    assert economy.factor(CHEAP) < 1.15 * economy.factor(DEAR)


def test_a_paid_failure_before_the_first_answer_condemns_nobody() -> None:
    """Failures come back before answers: the whole first wave would go to the dearer one."""
    economy = EndpointEconomy()
    economy.wasted(CHEAP, billed_pusd=2_000_000_000)
    assert 1.0 < economy.factor(CHEAP) / economy.factor(DEAR) < 1.1
    for _ in range(20):
        economy.wasted(CHEAP, billed_pusd=2_000_000_000)
    assert economy.factor(CHEAP) / economy.factor(DEAR) > 1.9


def test_paid_attempts_without_an_answer_count() -> None:
    economy = EndpointEconomy()
    for _ in range(100):
        for key in (CHEAP, DEAR):
            answered(economy, key, listed_pusd=1_000, billed_pusd=1_000)
            economy.judged(key, account="", accepted=True)
        economy.wasted(CHEAP, billed_pusd=1_000)
    costs = {item.key: item for item in economy.costs()}
    assert costs[CHEAP].spend == pytest.approx(2.0, rel=0.15)
    assert costs[CHEAP].failures == pytest.approx(1.0, rel=0.01)
    assert costs[DEAR].spend == pytest.approx(1.0, rel=0.15)


def test_longer_answers_than_elsewhere_are_dearer() -> None:
    economy = EndpointEconomy()
    for _ in range(200):
        answered(economy, CHEAP, listed_pusd=1_000, billed_pusd=1_800)
        answered(economy, DEAR, listed_pusd=1_000, billed_pusd=1_000)
    assert economy.factor(CHEAP) > 1.5 * economy.factor(DEAR)


def test_an_endpoint_that_was_asked_first_is_no_cheaper_for_it() -> None:
    """Its answers are compared with the same length as those that came when lengths were known."""
    economy = EndpointEconomy()
    for _ in range(200):
        answered(economy, CHEAP, listed_pusd=2_200, billed_pusd=2_200)
    assert economy.factor(DEAR) == pytest.approx(economy.factor(CHEAP), rel=0.06)
    dearer_now, unseen = 2_800, 2_500
    found = economy.ordered(candidates(economy, cheap=dearer_now, dear=unseen))
    assert found[0].endpoint.key == DEAR


def test_the_usual_length_is_that_of_the_last_answers() -> None:
    economy = EndpointEconomy()
    assert economy.usual_output_tokens("m/x", "b3") is None
    for account, tokens in [*[("b4", 50)] * 300, *[("b3", 1_000)] * 1_500]:
        answered(
            economy, CHEAP, listed_pusd=5, billed_pusd=9, account=account, output_tokens=tokens
        )
    assert economy.usual_output_tokens("m/x", "b3") == pytest.approx(1_000, rel=0.01)
    assert economy.usual_output_tokens("m/x", "b4") == 50
    assert economy.usual_output_tokens("m/x", "not asked yet") == pytest.approx(1_000, rel=0.01)
    assert economy.usual_output_tokens("m/y", "b3") is None


def test_who_is_given_the_short_and_easy_work_is_no_cheaper_for_it() -> None:
    """Same prices, same answers to the same work; one has the long, hard dataset, one the other."""
    economy = EndpointEconomy()
    for _ in range(3):
        worked(economy, CHEAP, "short", tokens=50, accepted=1.0)
        worked(economy, CHEAP, "long", tokens=2_000, accepted=0.6)
        worked(economy, DEAR, "long", tokens=2_000, accepted=0.6)
    assert economy.factor(DEAR) == pytest.approx(economy.factor(CHEAP), rel=0.05)
    assert economy.acceptance(DEAR) == pytest.approx(economy.acceptance(CHEAP), rel=0.05)
    for _ in range(3):
        worked(economy, DEAR, "long", tokens=3_000, accepted=0.3)  # now it is dearer for the same
    assert economy.factor(DEAR) > 1.5 * economy.factor(CHEAP)


def test_old_evidence_weighs_less_and_less_however_long_it_goes_on() -> None:
    """Also where weights are scaled down: an answer weighs half after five hundred others."""
    economy = EndpointEconomy()
    for _ in range(210):
        worked(economy, CHEAP, "b3", tokens=100, accepted=1.0)
        worked(economy, DEAR, "b3", tokens=100, accepted=1.0)
    for _ in range(5):
        worked(economy, CHEAP, "b3", tokens=100, accepted=0.0)
    costs = {item.key: item for item in economy.costs()}
    assert costs[CHEAP].answers == pytest.approx(500 / log(2), rel=0.01)
    assert economy.acceptance(CHEAP) == pytest.approx(0.5, abs=0.02)
    assert economy.acceptance(DEAR) > 0.95


def test_an_account_for_every_request_does_not_fill_the_memory() -> None:
    economy = EndpointEconomy()
    for number in range(1_000):
        answered(economy, CHEAP, listed_pusd=100, billed_pusd=100, account=f"user-{number}")
        economy.judged(CHEAP, account=f"user-{number}", accepted=True)
    (sums,) = economy._sums.values()
    assert len(sums.shares) < 100
    assert economy.usual_output_tokens("m/x", "user-999") == 100
    assert economy.factor(CHEAP) == pytest.approx(1.0, rel=0.1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, 10**15),
            st.integers(0, 10**15),
            st.booleans(),
        ),
        max_size=200,
    )
)
def test_factors_stay_positive_and_finite_whatever_is_learnt(
    events: list[tuple[str, int, int, bool]],
) -> None:
    economy = EndpointEconomy()
    for tag, expected, billed, accepted in events:
        key = EndpointKey("m/x", tag)
        answered(economy, key, listed_pusd=expected, billed_pusd=billed)
        economy.judged(key, account="", accepted=accepted)
        assert 0 <= economy.factor(key) < float("inf")
        assert 0 < economy.acceptance(key) <= 1
    for item in economy.costs():
        assert item.factor >= 0
