"""Endpoints, prices, usage, sampling and row keys."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.domain import (
    Endpoint,
    Quantization,
    Sampling,
    canonical_json,
    canonical_messages,
    check_messages,
    row_key,
    slugify,
)
from quantroute.errors import ConfigurationError
from quantroute.pricing import PriceOverride, Pricing, TokenUsage

NIGHT = datetime(2026, 8, 3, 23, 30, tzinfo=UTC)  # a Monday
NOON = datetime(2026, 8, 3, 12, 0, tzinfo=UTC)
PLAIN = Pricing.flat(input_usd_per_token="0.0000005", output_usd_per_token="0.000002")


def priced(**prices: str) -> Pricing:
    return Pricing(prices={name: Decimal(price) for name, price in prices.items()})


class TestQuantization:
    @pytest.mark.parametrize("label", [None, 4, "mxfp6", "", "none"])
    def test_unseen_labels_are_unknown(self, label: object) -> None:
        assert Quantization.parse(label) is Quantization.UNKNOWN

    @pytest.mark.parametrize("member", list(Quantization))
    def test_every_label_is_parsed_in_any_case(self, member: Quantization) -> None:
        assert Quantization.parse(f" {member.value.upper()} ") is member

    def test_formats_of_equal_width_differ(self) -> None:
        assert Quantization.NVFP4 is not Quantization.INT4
        assert Quantization.NVFP4.bits == Quantization.INT4.bits == 4


class TestPricing:
    def test_unknown_and_unmetered_prices_have_no_bound(self) -> None:
        missing = Pricing(prices={"prompt": None, "completion": Decimal(1)})
        new_dimension = replace(PLAIN, prices={**PLAIN.prices, "per_second": Decimal("0.1")})
        assert missing.unknown == ("prompt",)
        assert new_dimension.unmetered == ("per_second",)
        for pricing in (missing, new_dimension):
            assert not pricing.is_bounded
            with pytest.raises(ValueError):
                pricing.quote()

    def test_what_text_cannot_incur_does_not_matter(self) -> None:
        assert replace(PLAIN, prices={**PLAIN.prices, "image": Decimal(1)}).is_bounded

    def test_request_fees_enter_bound_and_charge(self) -> None:
        pricing = priced(prompt="0", completion="0", request="0.005")
        usage = TokenUsage(input_tokens=9, output_tokens=9)
        assert pricing.worst_case_pusd(input_tokens=0, output_tokens=0) == 5 * 10**9
        assert pricing.charge_pusd(usage, when=NOON) == 5 * 10**9

    def test_cached_and_written_tokens_are_inside_the_input(self) -> None:
        pricing = priced(
            prompt="0.000003",
            completion="0.000015",
            input_cache_read="0.0000003",
            input_cache_write="0.00000375",
        )
        usage = TokenUsage(
            input_tokens=1000, output_tokens=10, cached_tokens=600, cache_write_tokens=300
        )
        expected = 100 * 3_000_000 + 600 * 300_000 + 300 * 3_750_000 + 10 * 15_000_000
        assert pricing.charge_pusd(usage, when=NOON) == expected

    def test_more_cached_than_input_is_charged_at_the_dearer_reading(self) -> None:
        pricing = priced(prompt="0.000003", completion="0", input_cache_read="0.0000003")
        usage = TokenUsage(input_tokens=10, output_tokens=0, cached_tokens=50)
        assert pricing.charge_pusd(usage, when=NOON) == 10 * 3_000_000
        assert usage.contradictions

    def test_reasoning_is_part_of_output_unless_priced_apart(self) -> None:
        usage = TokenUsage(input_tokens=0, output_tokens=100, reasoning_tokens=80)
        assert PLAIN.charge_pusd(usage, when=NOON) == 100 * 2_000_000
        apart = priced(prompt="0", completion="0.000002", internal_reasoning="0.000004")
        assert apart.charge_pusd(usage, when=NOON) == 20 * 2_000_000 + 80 * 4_000_000
        too_many = replace(usage, reasoning_tokens=101)
        assert apart.charge_pusd(too_many, when=NOON) == 100 * 4_000_000

    def test_overrides_apply_by_length_hour_and_weekday(self) -> None:
        night = PriceOverride(
            prices={"completion": Decimal("0.000001")},
            utc_start_minute=22 * 60,
            utc_end_minute=6 * 60,
        )
        long = PriceOverride(prices={"prompt": Decimal("0.000001")}, above_input_tokens=1000)
        pricing = replace(PLAIN, overrides=(night, long))
        assert pricing.at(input_tokens=1000, when=NOON) == PLAIN.prices
        assert pricing.at(input_tokens=1001, when=NIGHT) == {
            "prompt": Decimal("0.000001"),
            "completion": Decimal("0.000001"),
        }
        monday = replace(night, utc_weekdays=frozenset({0}))
        assert monday.applies(input_tokens=0, at=NIGHT)
        assert not monday.applies(input_tokens=0, at=NIGHT.replace(day=4))

    def test_the_bound_uses_the_dearest_override(self) -> None:
        dear = PriceOverride(prices={"completion": Decimal("0.00001")}, above_input_tokens=10)
        pricing = replace(PLAIN, overrides=(dear,))
        assert pricing.worst_case_pusd(input_tokens=0, output_tokens=1) == 10_000_000

    @given(
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.lists(st.decimals(0, "0.0001", places=10), min_size=6, max_size=6),
    )
    def test_no_charge_within_the_limits_exceeds_the_bound(
        self, input_tokens: int, output_tokens: int, part: int, prices: list[Decimal]
    ) -> None:
        names = (
            "prompt",
            "completion",
            "request",
            "internal_reasoning",
            "input_cache_read",
            "input_cache_write",
        )
        pricing = Pricing(prices=dict(zip(names, prices, strict=True)))
        usage = TokenUsage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            reasoning_tokens=part,
            cached_tokens=part,
            cache_write_tokens=part // 2,
        )
        bound = pricing.worst_case_pusd(input_tokens=input_tokens, output_tokens=output_tokens)
        # Parts are rounded up one by one: at most one pico-dollar each for the four token parts.
        assert pricing.charge_pusd(usage, when=NOON) <= bound + 4


class TestEndpoint:
    ENDPOINT = Endpoint(
        model="m/x",
        tag="prov/int4",
        provider_name="Prov",
        quantization=Quantization.INT4,
        pricing=PLAIN,
        context_tokens=1000,
        max_output_tokens=400,
        max_input_tokens=800,
    )

    @pytest.mark.parametrize(
        ("input_tokens", "wanted", "expected"), [(100, 300, 300), (100, 900, 400), (700, 400, 300),
                                                 (801, 10, 0), (800, 400, 200)]
    )  # fmt: skip
    def test_output_limit(self, input_tokens: int, wanted: int, expected: int) -> None:
        found = self.ENDPOINT.output_limit_tokens(input_tokens=input_tokens, wanted_tokens=wanted)
        assert found == expected

    @pytest.mark.parametrize(
        ("status", "is_degraded", "is_down"),
        [(0, False, False), (-2, True, False), (-5, False, True), (-1, False, True)],
    )
    def test_status(self, status: int, is_degraded: bool, is_down: bool) -> None:
        endpoint = replace(self.ENDPOINT, status=status)
        assert (endpoint.is_degraded, endpoint.is_down) == (is_degraded, is_down)

    def test_twins_are_told_apart(self) -> None:
        twin = replace(self.ENDPOINT, ordinal=1)
        assert twin.key != self.ENDPOINT.key
        assert str(twin.key) == "prov/int4#2"
        assert twin.provider_slug == "prov"


class TestSampling:
    def test_only_what_is_set_is_sent(self) -> None:
        sampling = Sampling(temperature=0.6, stop=("END",), reasoning=False)
        assert sampling.parameters() == {
            "temperature": 0.6,
            "stop": ["END"],
            "reasoning": {"enabled": False},
        }
        assert sampling.required_parameters() == {"temperature", "stop", "reasoning", "max_tokens"}
        assert Sampling().parameters() == {}

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"top_p": 1.1},
            {"top_k": -1},
            {"stop": ("a", "b", "c", "d", "e")},
            {"stop": ("",)},
            {"stop": "END"},
            {"reasoning": False, "reasoning_effort": "high"},
        ],
    )
    def test_impossible_values_are_refused(self, bad: dict[str, object]) -> None:
        with pytest.raises(ConfigurationError):
            Sampling(**bad)  # type: ignore[arg-type]


class TestRowKey:
    MESSAGES = ({"role": "user", "content": "Hi"},)

    def key(self, **changes: object) -> str:
        settings = {"model": "m/x", "messages": self.MESSAGES, "sampling": Sampling(), "rollout": 0}
        return row_key(**(settings | changes))  # type: ignore[arg-type]

    def test_a_list_of_stop_texts_is_as_good_as_a_tuple(self) -> None:
        given = Sampling(stop=["END"])  # type: ignore[arg-type]
        assert self.key(sampling=given) == self.key(sampling=Sampling(stop=("END",)))

    def test_everything_that_determines_a_row_changes_its_key(self) -> None:
        keys = {
            self.key(),
            self.key(model="m/y"),
            self.key(messages=({"role": "user", "content": "Hi "},)),
            self.key(sampling=Sampling(temperature=1.0)),
            self.key(rollout=1),
            self.key(salt="strict"),
        }
        assert len(keys) == 6

    def test_equal_numbers_are_one_row_however_they_are_written(self) -> None:
        for one, other in ((1, 1.0), (0.0, -0.0)):
            assert self.key(sampling=Sampling(temperature=one)) == self.key(
                sampling=Sampling(temperature=other)
            )

    def test_the_order_of_fields_does_not(self) -> None:
        assert self.key(messages=({"content": "Hi", "role": "user"},)) == self.key()

    def test_the_key_is_stable_across_versions(self) -> None:
        assert self.key() == "5b78dd75f02174334db5873345c6877dad650f7e010901245bb7cbf52f9fc73b"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"content": "x"}],
    ],
)
def test_messages_that_cannot_be_sent_are_refused(messages: list[dict[str, object]]) -> None:
    with pytest.raises(ConfigurationError):
        check_messages(messages)


def test_spellings_of_one_provider_meet() -> None:
    assert slugify("Moonshot AI") == slugify("moonshotai") == slugify("moonshot-AI")


def test_usage_refuses_negative_counts() -> None:
    with pytest.raises(ValueError):
        TokenUsage(input_tokens=1, output_tokens=-1)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant"]),
                "content": st.text() | st.text(st.characters(max_codepoint=0xA0)),
            },
            optional={
                "reasoning": st.text(),
                "number": st.floats(allow_nan=False, allow_infinity=False),
            },
        ),
        max_size=3,
    )
)
def test_messages_have_one_spelling_whichever_encoder_wrote_them(
    messages: list[dict[str, object]],
) -> None:
    """Row keys of millions of stored rows rest on it."""
    expected = canonical_json(messages)
    assert canonical_messages(messages) == expected
    assert canonical_messages(tuple(map(MappingProxyType, messages))) == expected
