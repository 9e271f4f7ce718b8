"""Wire bodies to values: what is kept, what is unknown, what is left out."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute._json import dumps, loads
from quantroute.domain import EndpointKey, Quantization
from quantroute.errors import ConfigurationError, RegistryError
from quantroute.registry import EndpointList, ModelQuery
from quantroute.registry._endpoints import parse_endpoints
from quantroute.registry._models import parse_models
from quantroute.registry._providers import parse_providers
from registry_support import MODEL, entry, listing, model_row


def parsed(*entries: Any) -> EndpointList:
    """An endpoint list from entries, through JSON text as over the wire."""
    body = loads(json.dumps(listing(*entries)))
    return parse_endpoints(MODEL, body, fetched_at_s=100.0, source="test")


def test_a_good_entry_is_read_whole() -> None:
    (endpoint,) = parsed(entry())
    assert endpoint.key == EndpointKey(MODEL, "hosta/int4")
    assert endpoint.provider_name == "HostA"
    assert endpoint.quantization is Quantization.INT4
    assert endpoint.pricing.input_usd_per_token == Decimal("0.00000045")
    assert endpoint.max_output_tokens == 65536
    assert endpoint.supported_parameters == {"max_tokens", "temperature", "seed"}
    assert (endpoint.uptime_30m_percent, endpoint.uptime_5m_percent) == (99.5, None)
    assert endpoint.served_name == f"{MODEL}-0127"


def test_prices_keep_the_published_digits() -> None:
    (endpoint,) = parsed(
        entry(pricing={"prompt": "4.5e-7", "completion": "0.0000022500", "input_cache_read": "0"})
    )
    assert endpoint.pricing.prices == {
        "prompt": Decimal("0.00000045"),
        "completion": Decimal("0.00000225"),
        "input_cache_read": Decimal(0),
    }


@pytest.mark.parametrize("price", ["-1", "-1000000", "NaN", "Infinity", "free", "", None, [], True])
def test_an_unusable_price_is_unknown_and_the_endpoint_stays(price: object) -> None:
    (endpoint,) = parsed(entry(pricing={"prompt": price, "completion": "0.000001"}))
    assert endpoint.pricing.input_usd_per_token is None
    assert endpoint.pricing.unknown == ("prompt",)
    assert not endpoint.pricing.is_bounded


@pytest.mark.parametrize("pricing", [None, [], "0.1", ...])
def test_missing_prices_are_unknown_not_zero(pricing: object) -> None:
    (endpoint,) = parsed(entry(pricing=pricing))
    assert endpoint.pricing.unknown == ("completion", "prompt")


def test_json_numbers_as_prices_never_pass_through_float() -> None:
    body = loads(
        '{"data": {"endpoints": [{"tag": "a", "provider_name": "A",'
        ' "pricing": {"prompt": 0.00000045, "completion": NaN, "request": 1e999999999}}]}}'
    )
    (endpoint,) = parse_endpoints(MODEL, body, fetched_at_s=0.0, source="test")
    assert endpoint.pricing.prices == {
        "prompt": Decimal("0.00000045"),
        "completion": None,
        "request": None,
    }


def test_a_discount_is_not_applied_again_and_is_no_price() -> None:
    (endpoint,) = parsed(
        entry(pricing={"prompt": "0.00000057", "completion": "0.00000285", "discount": 0.05})
    )
    assert endpoint.pricing.input_usd_per_token == Decimal("0.00000057")
    assert endpoint.pricing.is_bounded


def test_a_price_dimension_nobody_knows_refuses_the_endpoint_a_bound() -> None:
    (endpoint,) = parsed(
        entry(pricing={"prompt": "0", "completion": "0", "cuddles": "0.005", "request": "0.005"})
    )
    assert endpoint.pricing.unmetered == ("cuddles",)


def test_one_bad_entry_among_good_ones_becomes_a_problem() -> None:
    found = parsed(
        entry("a"),
        entry(...),
        "junk",
        entry("b", context_length="wide"),
        entry("c", quantization="mxfp6", shiny_new_field={"deep": [1]}),
        entry("d", quantization="nvfp4"),
    )
    assert [endpoint.tag for endpoint in found] == ["a", "c", "d"]
    assert [problem.entry for problem in found.problems] == ["1 ('HostA')", "2 (no tag)", "3 ('b')"]
    assert "context_length" in str(found.problems[2])
    assert "wide" not in str(found.problems[2])


def test_an_unseen_label_is_kept_and_counts_as_unknown() -> None:
    (endpoint,) = parsed(entry(quantization="mxfp6"))
    assert (endpoint.quantization, endpoint.quantization_label) == (Quantization.UNKNOWN, "mxfp6")


def test_an_empty_list_is_an_answer_and_no_list_is_an_error() -> None:
    assert len(parsed()) == 0
    for body in (None, [], {}, {"data": []}, {"data": {"endpoints": None}}):
        with pytest.raises(RegistryError):
            parse_endpoints(MODEL, body, fetched_at_s=0.0, source="test")


def test_twins_are_numbered_by_price_wherever_they_stand() -> None:
    cheap = entry("together", pricing={"prompt": "0.1", "completion": "0.2"})
    dear = entry("together", pricing={"prompt": "0.2", "completion": "0.2"})
    unpriced = entry("together", pricing={})
    for order in ([cheap, dear, unpriced], [unpriced, dear, cheap], [dear, unpriced, cheap]):
        by_price = {e.ordinal: e.pricing.input_usd_per_token for e in parsed(*order)}
        assert by_price == {0: Decimal("0.1"), 1: Decimal("0.2"), 2: None}


def test_equal_twins_are_numbered_in_list_order() -> None:
    found = parsed(entry("x", status=-2), entry("x", status=0))
    assert [(e.ordinal, e.status) for e in found] == [(0, -2), (1, 0)]
    assert [str(e.key) for e in found] == ["x", "x#2"]


def test_overrides_carry_their_conditions() -> None:
    (endpoint,) = parsed(
        entry(
            pricing={
                "prompt": "0.000001",
                "completion": "0.000002",
                "overrides": [
                    {"min_prompt_tokens": 272000, "prompt": "0.000004"},
                    {"utc_start": 1430, "utc_end": 0, "completion": "0.000003"},
                    {"utc_days": ["saturday", "sunday"], "completion": "0.0000005"},
                ],
            }
        )
    )
    long, evening, weekend = endpoint.pricing.overrides
    assert long.above_input_tokens == 272000
    assert (evening.utc_start_minute, evening.utc_end_minute) == (870, 0)
    assert weekend.utc_weekdays == {5, 6}
    friday_night = datetime(2026, 8, 21, 23, 0, tzinfo=UTC)
    saturday_noon = datetime(2026, 8, 22, 12, 0, tzinfo=UTC)
    price = endpoint.pricing.at(input_tokens=10, when=friday_night)
    assert price["completion"] == Decimal("0.000003")
    price = endpoint.pricing.at(input_tokens=300_000, when=saturday_noon)
    assert price == {"prompt": Decimal("0.000004"), "completion": Decimal("0.0000005")}


@pytest.mark.parametrize(
    "override",
    [
        "junk",
        {"utc_start": 1400, "prompt": "0"},
        {"utc_start": 1475, "utc_end": 0, "prompt": "0"},
        {"utc_start": 2500, "utc_end": 0, "prompt": "0"},
        {"utc_days": ["caturday"], "prompt": "0"},
        {"utc_days": 6, "prompt": "0"},
        {"min_prompt_tokens": -1, "prompt": "0"},
        {"min_prompt_tokens": "many", "prompt": "0"},
        {"some_new_condition": "eu", "prompt": "0"},
        {"max_prompt_tokens": 1000, "prompt": "0"},
    ],
)
def test_an_override_that_is_not_understood_leaves_no_bound(override: object) -> None:
    pricing = {"prompt": "0.000001", "completion": "0.000002", "overrides": [override]}
    (endpoint,) = parsed(entry(pricing=pricing))
    assert not endpoint.pricing.is_bounded


def test_an_answer_for_an_alias_keeps_the_asked_id_and_names_the_other() -> None:
    body = listing(entry(), model="moonshotai/kimi-k2.5-new")
    found = parse_endpoints(MODEL, body, fetched_at_s=0.0, source="test")
    assert (found.model, found.listed_id) == (MODEL, "moonshotai/kimi-k2.5-new")
    assert found.endpoints[0].model == MODEL
    assert found.canonical_slug == f"{MODEL}-0127"


def test_lists_print_as_one_line() -> None:
    assert repr(parsed(entry(), "junk")) == (
        f"EndpointList('{MODEL}', 1 endpoints, 1 left out, read 1970-01-01T00:01Z, test)"
    )


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["-1", "\ud800", "int4", "1e999999999", "0.1"])
)
_junk = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
_FIELDS = sorted(entry())


@given(
    st.lists(
        _junk
        | st.dictionaries(st.sampled_from(_FIELDS), _junk)
        | st.dictionaries(st.sampled_from(_FIELDS), _junk, max_size=3).map(lambda d: entry() | d)
        | st.fixed_dictionaries({"overrides": _junk, "prompt": _junk, "completion": _junk}).map(
            lambda pricing: entry(pricing=pricing)
        ),
        max_size=5,
    )
)
def test_junk_among_good_entries_never_raises(entries: list[Any]) -> None:
    """Each entry is an endpoint or a problem; the good one is always there."""
    found = parsed(*entries, entry("the-good-one"))
    assert len(found) + len(found.problems) == len(entries) + 1
    assert found.endpoints[-1].tag == "the-good-one"
    for endpoint in found:
        assert endpoint.tag
        assert all(
            p is None or (p.is_finite() and p >= 0) for p in endpoint.pricing.prices.values()
        )
        if endpoint.pricing.is_bounded:
            assert endpoint.pricing.worst_case_pusd(input_tokens=9, output_tokens=9) >= 0


@given(st.lists(_junk | st.dictionaries(st.sampled_from(["id", "slug", "name", "pricing"]), _junk)))
def test_junk_models_and_providers_never_raise(entries: list[Any]) -> None:
    body = loads(json.dumps({"data": entries}))
    models = parse_models(body, fetched_at_s=0.0, source="test")
    assert len(models) + len(models.problems) == len(entries)
    providers = parse_providers(body, fetched_at_s=0.0, source="test")
    assert len(providers) + len(providers.problems) == len(entries)


@given(_junk)
def test_what_is_written_reads_back_equal(value: Any) -> None:
    read = loads(json.dumps(value))
    again = loads(dumps(read))
    assert again == read or "NaN" in repr(read)  # NaN is no JSON and becomes null


def test_deep_nesting_is_refused_as_bad_json() -> None:
    with pytest.raises(ValueError, match="deep"):
        loads("[" * 200_000)


def test_variants_are_models_of_their_own() -> None:
    body = {
        "data": [
            model_row("x/y", pricing={"prompt": "0.1", "completion": "0.3"}),
            model_row("x/y:free", pricing={"prompt": "0", "completion": "0"}),
        ]
    }
    models = parse_models(body, fetched_at_s=0.0, source="test")
    paid, free = models.get("x/y"), models.get("x/y:free")
    assert paid is not None
    assert free is not None
    assert paid.pricing.input_usd_per_token == Decimal("0.1")
    assert (free.pricing.input_usd_per_token, free.variant) == (Decimal(0), "free")
    assert models.get("x/y:nitro") is None
    assert models.suggest("x/y:nitro") == ("x/y", "x/y:free")


def test_a_router_alias_with_a_negative_price_has_no_price() -> None:
    row = model_row("openrouter/auto", pricing={"prompt": "-1", "completion": "-1"})
    (model,) = parse_models({"data": [row]}, fetched_at_s=0.0, source="test")
    assert model.pricing.unknown == ("completion", "prompt")


MODELS = parse_models(
    {
        "data": [
            model_row("a/small", context_length=8192, created=3),
            model_row("a/seeing", architecture={"input_modalities": ["text", "image"]}, created=2),
            model_row("b/dear", pricing={"prompt": "0.00001", "completion": "0.00002"}, created=1),
            model_row("b/mute", supported_parameters=["max_tokens"], architecture=None),
            model_row("openrouter/auto", pricing={"prompt": "-1", "completion": "-1"}),
        ]
    },
    fetched_at_s=0.0,
    source="test",
)


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        (ModelQuery(q="SMALL"), ["a/small"]),
        (ModelQuery(model_authors=("b",)), ["b/dear", "b/mute"]),
        (ModelQuery(context_tokens=100_000, model_authors=("a",)), ["a/seeing"]),
        (ModelQuery(min_input_usd_per_million="0.46"), ["b/dear"]),
        (ModelQuery(max_output_usd_per_million=3, model_authors=("b",)), ["b/mute"]),
        (ModelQuery(max_input_usd_per_million=100, q="auto"), []),
        (ModelQuery(output_modalities=("text",), q="e"), ["b/dear", "openrouter/auto"]),
        (ModelQuery(input_modalities=("image",), model_authors=("a",)), ["a/small", "a/seeing"]),
        (ModelQuery(output_modalities=("all",), q="mute"), ["b/mute"]),
        (ModelQuery(arch="Other", q="small"), ["a/small"]),
        (
            ModelQuery(supported_parameters=("seed", "temperature"), sort="pricing-high-to-low"),
            ["b/dear", "a/small", "a/seeing", "openrouter/auto"],
        ),
        (ModelQuery(sort="context-high-to-low", model_authors=("a",)), ["a/seeing", "a/small"]),
    ],
)
def test_the_same_filters_work_on_a_list_in_hand(query: ModelQuery, kept: list[str]) -> None:
    assert [model.id for model in MODELS.filter(query)] == kept


@pytest.mark.parametrize(
    "query",
    [
        ModelQuery(zdr=True),
        ModelQuery(category="programming"),
        ModelQuery(sort="most-popular"),
        ModelQuery(other={"min_coding_index": "40"}),
    ],
)
def test_a_filter_that_a_summary_cannot_answer_is_refused(query: ModelQuery) -> None:
    with pytest.raises(ConfigurationError, match="only the service"):
        MODELS.filter(query)


@pytest.mark.parametrize("price", [0.45, "cheap", "-1", "NaN", True])
def test_a_price_bound_must_be_exact(price: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_input_usd_per_million"):
        ModelQuery(max_input_usd_per_million=price)


def test_a_single_string_is_no_tuple_of_parameters() -> None:
    with pytest.raises(ConfigurationError, match="tuple"):
        ModelQuery(supported_parameters="seed")  # type: ignore[arg-type]


def test_providers_are_found_by_any_spelling_and_by_tag() -> None:
    body = {
        "data": [
            {"name": "Moonshot AI", "slug": "moonshotai", "datacenters": None},
            {"name": "Google", "slug": "google-vertex", "headquarters": "US"},
            {"name": "AtlasCloud", "slug": "atlas-cloud", "datacenters": ["US", "SG"]},
            {"name": "no slug"},
        ]
    }
    directory = parse_providers(body, fetched_at_s=0.0, source="test")
    assert len(directory.problems) == 1
    for spelling in ("Moonshot AI", "moonshotai", "MOONSHOT-AI", "moonshotai/int4"):
        assert directory.slug_of(spelling) == "moonshotai"
        assert directory.name_of(spelling) == "Moonshot AI"
    assert directory.name_of("google-vertex/us-south1") == "Google"
    assert directory.slug_of("atlas cloud") == "atlas-cloud"
    assert directory.find("sambanova-turbo") is None
    assert directory.name_of("sambanova-turbo/x") == "sambanova-turbo"
