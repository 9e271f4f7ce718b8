"""Every rule but precision: names, status, uptime, prices, limits, parameters, settings."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_support import AT, K25, MOONSHOT, make_endpoint
from quantroute.domain import Endpoint, Quantization
from quantroute.errors import ConfigurationError
from quantroute.policy import EvidenceTable, ExclusionPolicy, Reason, Verdict
from quantroute.pricing import PriceOverride, Pricing


def excluding(policy: ExclusionPolicy, endpoint: Endpoint) -> list[str]:
    return [reason.code for reason in policy.judge(endpoint, at=AT).excluding]


def notes(policy: ExclusionPolicy, endpoint: Endpoint) -> list[str]:
    return [reason.code for reason in policy.judge(endpoint, at=AT).notes]


SPELLINGS = [
    "Moonshot AI", "moonshot ai", "moonshotai", "MOONSHOTAI", " Moonshot-AI ", "moonshotai/int4",
    "MoonshotAI/INT4", "Moonshot AI/int4",
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_any_spelling_denies_and_allows(spelling: str) -> None:
    """Display name, slug and tag mean the same endpoint, whatever the case."""
    assert excluding(ExclusionPolicy(exclude=[spelling]), MOONSHOT) == ["excluded_by_name"]
    assert excluding(ExclusionPolicy(only=[spelling]), MOONSHOT) == []
    assert excluding(ExclusionPolicy(only=[spelling]), make_endpoint()) == ["not_in_only"]


def test_denial_wins() -> None:
    """What is both allowed and denied does not serve, and there is one reason for it."""
    policy = ExclusionPolicy(only=["moonshotai"], exclude=["moonshotai/int4"])
    assert excluding(policy, MOONSHOT) == ["excluded_by_name"]
    assert excluding(policy, replace(MOONSHOT, tag="moonshotai/highspeed")) == []


def test_two_endpoints_of_one_host_are_judged_apart() -> None:
    """The tag decides nothing, the label does: hosta/turbo is fp4, hosta/int4 is not."""
    policy = ExclusionPolicy()
    assert excluding(policy, make_endpoint("hosta/int4", "HostA", "int4")) == []
    turbo = make_endpoint("hosta/turbo", "HostA", "fp4")
    assert excluding(policy, turbo) == ["precision_requantized"]
    assert excluding(ExclusionPolicy(exclude=["hosta/turbo"]), make_endpoint("hosta/int4")) == []


def test_degraded_is_a_note_or_a_reason() -> None:
    """Status -2 is tolerated by default and says so."""
    endpoint = make_endpoint(status=-2)
    assert notes(ExclusionPolicy(), endpoint) == ["degraded"]
    assert excluding(ExclusionPolicy(allow_degraded=False), endpoint) == ["degraded"]


def test_status_that_nobody_described() -> None:
    """A positive status is noted, a negative one taken for down."""
    assert notes(ExclusionPolicy(), make_endpoint(status=7)) == ["status_unknown"]
    assert excluding(ExclusionPolicy(), make_endpoint(status=-3)) == ["down"]


@pytest.mark.parametrize(
    ("uptime", "expected"), [(95.0, []), (94.9, ["uptime"]), (float("nan"), ["uptime"])]
)
def test_uptime(uptime: float, expected: list[str]) -> None:
    """The 30-minute figure counts, its bound inclusive."""
    endpoint = make_endpoint(uptime_30m_percent=uptime, uptime_1d_percent=10.0)
    assert excluding(ExclusionPolicy(min_uptime_percent=95), endpoint) == expected


def test_missing_uptime_is_no_data() -> None:
    """Too little traffic for a figure is not a bad figure."""
    policy = ExclusionPolicy(min_uptime_percent=95)
    assert notes(policy, make_endpoint()) == ["uptime_unknown"]
    assert excluding(policy, make_endpoint()) == []


def test_price_ceilings_are_inclusive_and_exact() -> None:
    """2.25 is not above 2.25, though 0.00000225 * 1e6 is in binary floating point."""
    at_price = ExclusionPolicy(max_input_usd_per_million="0.45", max_output_usd_per_million="2.25")
    assert excluding(at_price, make_endpoint()) == []
    below = ExclusionPolicy(max_input_usd_per_million="0.44", max_output_usd_per_million="2.24")
    assert excluding(below, make_endpoint()) == ["input_price", "output_price"]


def priced(*overrides: PriceOverride, **prices: str | None) -> Endpoint:
    table = {"prompt": "0.000001", "completion": "0.000002"} | prices
    return make_endpoint(
        pricing=Pricing(
            prices={name: None if usd is None else Decimal(usd) for name, usd in table.items()},
            overrides=overrides,
        )
    )


def test_price_ceilings_hold_at_the_dearest_override() -> None:
    """A long prompt or an hour of the day may double the price; that is what is compared."""
    dear = PriceOverride(prices={"completion": Decimal("0.000004")}, above_input_tokens=128_000)
    policy = ExclusionPolicy(max_output_usd_per_million="3")
    assert excluding(policy, priced()) == []
    assert excluding(policy, priced(dear)) == ["output_price"]


def test_reasoning_price_counts_as_output() -> None:
    """Reasoning tokens are output tokens at a price of their own."""
    policy = ExclusionPolicy(max_output_usd_per_million="3")
    assert excluding(policy, priced(internal_reasoning="0.000009")) == ["output_price"]


@pytest.mark.parametrize(
    ("prices", "expected"),
    [
        ({"prompt": None}, "price_unknown"),
        ({"completion": None}, "price_unknown"),
        ({"input_cache_read": None}, "price_unknown"),
        ({"fine_tuning": "0.1"}, "price_unmetered"),
        ({"fine_tuning": None}, "price_unmetered"),
        ({"request": "0.005"}, None),
        ({"image": "0.005"}, None),
    ],
)
def test_a_cap_needs_a_bound(prices: dict[str, str | None], expected: str | None) -> None:
    """Unknown is not zero, and a charge that nobody meters cannot be capped."""
    wanted = [expected] if expected else []
    assert excluding(ExclusionPolicy(), priced(**prices)) == wanted
    assert excluding(ExclusionPolicy(requires_bounded_price=False), priced(**prices)) == []


def test_unknown_price_cannot_pass_a_ceiling() -> None:
    """Even without a cap, an unknown price is not below anything."""
    policy = ExclusionPolicy(requires_bounded_price=False, max_input_usd_per_million="1")
    assert excluding(policy, priced(prompt=None)) == ["input_price_unknown"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"context_tokens": 262_144, "max_output_tokens": None}, []),
        ({"context_tokens": None, "max_output_tokens": None}, []),
        ({"context_tokens": 100_000, "max_output_tokens": None}, ["context"]),
        ({"context_tokens": 262_144, "max_output_tokens": 16_384}, ["output_limit"]),
        ({"context_tokens": 20_000, "max_output_tokens": None}, ["context", "output_limit"]),
        ({"context_tokens": 20_000, "max_output_tokens": 65_536}, ["context", "output_limit"]),
    ],
)
def test_limits(limits: dict[str, Any], expected: list[str]) -> None:
    """An endpoint without a limit of its own is bound by its context only."""
    policy = ExclusionPolicy(min_context_tokens=131_072, min_output_tokens=32_768)
    assert excluding(policy, make_endpoint(**limits)) == expected


def test_missing_parameters_are_named() -> None:
    """What would be dropped silently is listed, in order."""
    policy = ExclusionPolicy(required_parameters=frozenset({"top_k", "seed", "temperature"}))
    verdict = policy.judge(make_endpoint(), at=AT)
    assert [reason.code for reason in verdict.excluding] == ["parameters"]
    assert "seed, top_k" in str(verdict)
    assert "temperature" not in str(verdict)


def test_the_output_limit_goes_by_either_name() -> None:
    """55 endpoints of August 2026 list max_completion_tokens in place of max_tokens."""
    policy = ExclusionPolicy(required_parameters=frozenset({"max_tokens"}))
    newer = make_endpoint(supported_parameters=frozenset({"max_completion_tokens"}))
    assert excluding(policy, newer) == []
    assert excluding(policy, make_endpoint(supported_parameters=frozenset())) == ["parameters"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_output_usd_per_million": "10000.01"},
        {"max_output_usd_per_million": "0.0000009"},
        {"max_input_usd_per_million": "-1"},
        {"max_input_usd_per_million": "NaN"},
        {"max_input_usd_per_million": "cheap"},
        {"max_input_usd_per_million": 0.45},
        {"max_input_usd_per_million": True},
        {"min_uptime_percent": 101},
        {"min_uptime_percent": float("nan")},
        {"min_context_tokens": 0},
        {"min_output_tokens": -1},
        {"data_collection": "no"},
        {"native": "int5"},
        {"native": Quantization.UNKNOWN},
        {"accept": ["unknown"]},
        {"accept": "fp8"},
        {"only": "Moonshot AI"},
        {"exclude": [""]},
        {"exclude": ["moonshotai/"]},
        {"exclude": [3]},
        {"accept_unknown": "Fireworks"},
        {"required_parameters": "seed"},
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any]) -> None:
    """Wrong units, lone strings, unknown words and impossible numbers are refused at once."""
    with pytest.raises(ConfigurationError):
        ExclusionPolicy(**settings)


@pytest.mark.parametrize("price", ["10000", "0.000001", "0", "$2.50", Decimal("2.5"), 3])
def test_plausible_ceilings(price: Any) -> None:
    """The bounds themselves are allowed, zero means free endpoints only."""
    ceiling = ExclusionPolicy(max_output_usd_per_million=price).max_output_usd_per_million
    assert isinstance(ceiling, Decimal)


def test_policy_is_a_value() -> None:
    """Spelling of formats and prices does not matter; `replace` keeps what was resolved."""
    one = ExclusionPolicy(native="int4", accept=["fp8"], max_input_usd_per_million="0.5")
    other = ExclusionPolicy(
        native=Quantization.INT4,
        accept=(Quantization.FP8,),
        max_input_usd_per_million=Decimal("0.5"),
    )
    assert one == other
    assert hash(one) == hash(other)
    changed = replace(one, exclude=("Moonshot AI",))
    assert excluding(changed, MOONSHOT) == ["excluded_by_name"]
    assert excluding(changed, make_endpoint(label="fp8")) == []


@pytest.mark.parametrize(
    "policy",
    [
        ExclusionPolicy(),
        ExclusionPolicy(
            native="int4",
            accept=["fp8"],
            accept_unknown=["Novita"],
            exclude=["Fireworks"],
            max_output_usd_per_million="2.50",
            required_parameters=frozenset({"seed", "temperature"}),
        ),
    ],
)
def test_policy_is_written_to_a_manifest_and_read_back(policy: ExclusionPolicy) -> None:
    """as_dict names every setting in plain JSON, from which an equal policy can be built."""
    stored = json.loads(json.dumps(policy.as_dict()))
    settings = {item.name for item in fields(policy) if item.init} - {"evidence"}
    assert set(stored) == settings
    assert ExclusionPolicy(**stored) == policy


def test_verdict_cannot_contradict_its_reasons() -> None:
    """An eligible verdict with an excluding reason is a bug and does not exist."""
    precision = ExclusionPolicy().judge(MOONSHOT, at=AT).precision
    for eligible, reasons in ((True, (Reason("down", "down"),)), (False, ())):
        with pytest.raises(ValueError, match="against its reasons"):
            Verdict(endpoint=MOONSHOT, eligible=eligible, reasons=reasons, precision=precision)


TEXT = st.text(max_size=12)
PRICES = st.none() | st.decimals(0, 10, places=12)
ENDPOINTS = st.builds(
    make_endpoint,
    TEXT,
    TEXT,
    st.none() | TEXT | st.sampled_from([item.value for item in Quantization]),
    model=st.sampled_from([K25, "m/x", ""]),
    ordinal=st.integers(0, 2),
    status=st.integers(-10, 2),
    context_tokens=st.none() | st.integers(0, 300_000),
    max_output_tokens=st.none() | st.integers(0, 300_000),
    supported_parameters=st.frozensets(st.sampled_from(["seed", "temperature", "max_tokens"])),
    uptime_30m_percent=st.none() | st.floats(),
    pricing=st.builds(
        Pricing,
        prices=st.dictionaries(
            st.sampled_from(["prompt", "completion", "request", "internal_reasoning"]) | TEXT,
            PRICES,
        ),
    ),
)
NAMES = st.lists(st.sampled_from(["Moonshot AI", "siliconflow/int4", "a", "x#2"]), max_size=2)
POLICIES = st.builds(
    ExclusionPolicy,
    native=st.none() | st.sampled_from(["int4", "bf16", "mxfp4"]),
    accept=st.lists(st.sampled_from(["fp8", "fp4"]), max_size=2),
    accept_unknown=st.booleans() | NAMES,
    only=NAMES,
    exclude=NAMES,
    allow_degraded=st.booleans(),
    min_uptime_percent=st.none() | st.floats(0, 100),
    max_input_usd_per_million=st.none() | st.decimals("0.01", 100, places=2),
    max_output_usd_per_million=st.none() | st.decimals("0.01", 100, places=2),
    min_context_tokens=st.none() | st.integers(1, 300_000),
    min_output_tokens=st.none() | st.integers(1, 300_000),
    required_parameters=st.frozensets(st.sampled_from(["seed", "max_tokens"])),
    requires_bounded_price=st.booleans(),
    evidence=st.sampled_from([EvidenceTable(), EvidenceTable.builtin()]),
)


@given(policy=POLICIES, endpoint=ENDPOINTS, at=st.datetimes())
def test_judge_never_raises_and_always_explains(
    policy: ExclusionPolicy, endpoint: Endpoint, at: Any
) -> None:
    """Whatever is listed: excluded has a readable reason, eligible has none that excludes."""
    verdict = policy.judge(endpoint, at=at)
    assert verdict.eligible == (not verdict.excluding)
    assert all(reason.text.strip() and reason.code for reason in verdict.reasons)
    assert str(verdict)
    if verdict.eligible and not policy.accept_unknown and not policy.accept:
        assert verdict.precision.is_native
