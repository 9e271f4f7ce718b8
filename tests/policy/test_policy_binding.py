"""A policy bound to a listing: names resolved, twins, the provider object, the served check."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from policy_support import (
    AT,
    FIREWORKS,
    K25,
    MOONSHOT,
    PROVIDERS,
    SILICONFLOW,
    make_endpoint,
    recorded_catalogue,
    recorded_endpoints,
)
from quantroute.domain import Endpoint, Provider, Quantization
from quantroute.errors import NoEligibleEndpoint, UnknownName
from quantroute.policy import (
    BoundPolicy,
    EvidenceRow,
    EvidenceTable,
    ExclusionPolicy,
    pinned_preferences,
    served_by,
)
from quantroute.pricing import PriceOverride, Pricing

LISTING = (SILICONFLOW, MOONSHOT, FIREWORKS)


def bind(*endpoints: Endpoint, **settings: object) -> BoundPolicy:
    return ExclusionPolicy(**settings).bind(endpoints or LISTING, providers=PROVIDERS, at=AT)  # type: ignore[arg-type]


def tags(bound: BoundPolicy) -> list[str]:
    return [str(endpoint.key) for endpoint in bound.eligible]


# -- names ----------------------------------------------------------------------------------------


def test_the_mission_list_works_as_written() -> None:
    """Display names in any spelling exclude what they mean."""
    bound = bind(exclude=["Fireworks", "Moonshot AI"], accept_unknown=True)
    assert tags(bound) == ["siliconflow/int4"]
    assert bound.ignore == ("fireworks", "moonshotai", "moonshotai/int4")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("Firework", "Fireworks"),
        ("moonshot", "Moonshot AI"),
        ("moonshotai/int5", "moonshotai/int4"),
        ("silicon flows", "SiliconFlow"),
    ],
)
@pytest.mark.parametrize("rule", ["only", "exclude", "accept_unknown"])
def test_a_name_that_matches_nothing_is_refused_with_suggestions(
    name: str, suggestion: str, rule: str
) -> None:
    """A silent no-op in a deny list would let in what it was meant to keep out."""
    with pytest.raises(UnknownName) as caught:
        bind(**{rule: [name]})
    assert suggestion in caught.value.suggestions
    assert caught.value.rule == rule
    assert name in str(caught.value)


def test_nothing_near_is_suggested_for_nonsense() -> None:
    """No suggestion is better than a wild one."""
    with pytest.raises(UnknownName) as caught:
        bind(exclude=["qqqqqq"])
    assert caught.value.suggestions == ()


def test_a_provider_that_does_not_serve_this_model_is_no_mistake() -> None:
    """It may join later, so it stays in `ignore`, and the bound policy says that it is idle."""
    bound = bind(exclude=["base ten"])
    assert bound.unmatched == ("exclude: base ten",)
    assert bound.ignore == ("baseten",)
    with pytest.raises(UnknownName):
        ExclusionPolicy(exclude=["base ten"]).bind(LISTING, at=AT)


def test_a_reread_listing_may_have_lost_an_endpoint() -> None:
    """During a run a name that no longer matches is reported, not raised."""
    policy = ExclusionPolicy(exclude=["moonshotai/int4"])
    bound = policy.bind((SILICONFLOW,), providers=PROVIDERS, at=AT, must_match=False)
    assert bound.unmatched == ("exclude: moonshotai/int4",)
    assert tags(bound) == ["siliconflow/int4"]


def test_an_empty_listing_checks_no_names() -> None:
    """A model without endpoints is reported as such, not as a misspelt name."""
    bound = ExclusionPolicy(only=["Moonshot AI"]).bind((), at=AT)
    assert bound.verdicts == ()
    with pytest.raises(NoEligibleEndpoint):
        bound.preferences()


def test_display_name_and_slug_may_have_nothing_in_common() -> None:
    """Google's slug is google-vertex; the provider list says so even if the endpoint does not."""
    endpoint = make_endpoint("google-vertex/global", "Vertex", "int4")
    for name in ("Google", "google vertex", "google/global", "GOOGLE-VERTEX/GLOBAL"):
        assert tags(bind(endpoint, SILICONFLOW, exclude=[name])) == ["siliconflow/int4"]
    assert bind(endpoint, exclude=["Google"]).ignore == ("google-vertex", "google-vertex/global")


def test_slug_of_a_product_line_belongs_to_its_company() -> None:
    """sambanova-turbo is SambaNova's: both spellings of the company reach it."""
    endpoint = make_endpoint("sambanova-turbo", "SambaNova", "int4")
    for name in ("SambaNova", "sambanova", "sambanova-turbo"):
        assert tags(bind(endpoint, exclude=[name])) == []


# -- endpoints that share a tag -------------------------------------------------------------------


def twins(*, label: str = "int4", usd_out: str = "0.00000225") -> tuple[Endpoint, Endpoint]:
    first = make_endpoint("together", "Together", "int4")
    return first, make_endpoint("together", "Together", label, usd_out=usd_out, ordinal=1)


def test_twin_that_a_pinned_request_could_reach_takes_both_out() -> None:
    """Same tag, same label, same price: excluding the second alone cannot be asked for."""
    bound = bind(*twins(), exclude=["together#2"])
    assert tags(bound) == []
    assert [reason.code for reason in bound.verdicts[0].excluding] == ["inseparable_twin"]


def company(*, usd_out: str = "0.000001", **changes: Any) -> tuple[Endpoint, Endpoint]:
    """One company under its bare slug, and once more under a tag of its own."""
    bare = make_endpoint("siliconflow")
    return bare, make_endpoint("siliconflow/turbo", usd_out=usd_out, **changes)


def test_a_bare_slug_that_reaches_an_excluded_endpoint_takes_both_out() -> None:
    """The service reads `only: [siliconflow]` as all of the company's endpoints."""
    bound = bind(*company(), exclude=["siliconflow/turbo"])
    assert tags(bound) == []
    assert "may be served by 'siliconflow/turbo'" in bound.reasons()[0]


@pytest.mark.parametrize(
    "other",
    [
        company(label="fp8")[1],  # kept out by the label
        company(usd_out="0.000009")[1],  # by the price
        make_endpoint("siliconflow/flex"),  # a service tier, which a bare slug does not reach
    ],
    ids=lambda endpoint: f"{endpoint.tag} {endpoint.quantization_label}",
)
def test_a_bare_slug_stays_where_something_keeps_the_excluded_out(other: Endpoint) -> None:
    assert tags(bind(company()[0], other, exclude=[other.tag])) == ["siliconflow"]


def test_what_was_found_out_about_an_endpoint_counts_for_its_company_too() -> None:
    """One that an audit failed must not serve by way of the bare slug, whoever chooses."""
    row = EvidenceRow(
        model=K25,
        provider="SiliconFlow",
        tag="siliconflow/turbo",
        quantization=Quantization.INT4,
        source="audit",
        date=AT.date(),
        expires=AT.date(),
        failed=True,
    )
    evidence = EvidenceTable.builtin().merged(EvidenceTable(serving=(row,)))
    bound = bind(*company(), MOONSHOT, evidence=evidence)
    assert tags(bound) == ["moonshotai/int4"]
    dear = bind(*company(usd_out="0.000009"), evidence=evidence)
    assert tags(dear) == ["siliconflow"]
    assert dear.delegable == ()


def test_twin_with_another_label_is_kept_out_by_the_label() -> None:
    """The pinned request carries `quantizations`, so the fp8 twin cannot serve it."""
    first, second = twins(label="fp8")
    assert tags(bind(first, second)) == ["together"]
    assert pinned_preferences(first, ExclusionPolicy())["quantizations"] == ["int4"]


def test_generic_label_does_not_keep_out_what_it_covers() -> None:
    """A filter for fp4 lets nvfp4 pass, so an accepted fp4 is not safe beside an nvfp4 twin."""
    first, second = twins(label="nvfp4")
    first = make_endpoint("together", "Together", "fp4")
    assert tags(bind(first, second, accept=["fp4"])) == []


def test_label_that_cannot_be_sent_keeps_nobody_out() -> None:
    """A request without a label filter, for want of a known word, reaches the fp8 twin too."""
    _, second = twins(label="fp8")
    first = make_endpoint("together", "Together", "int3")
    assert tags(bind(first, second, accept_unknown=["Together"])) == []
    first = make_endpoint("together", "Together", "unknown")
    assert tags(bind(first, second, accept_unknown=["Together"])) == ["together"]


def test_dearer_twin_is_kept_out_by_the_price() -> None:
    """The pinned request carries the cheaper one's price as ceiling."""
    assert tags(bind(*twins(usd_out="0.000003"), exclude=["together#2"])) == ["together"]
    assert tags(bind(*twins(usd_out="0.000003"), exclude=["together#1"])) == []


def test_prices_that_are_not_known_keep_nobody_out() -> None:
    """Without a cap an unpriced endpoint may serve, but not beside an unwanted twin."""
    first, second = twins()
    unpriced = replace(second, pricing=Pricing(prices={"prompt": None, "completion": None}))
    bound = bind(first, unpriced, exclude=["together#2"], requires_bounded_price=False)
    assert tags(bound) == []


def test_twin_that_is_only_down_does_no_harm() -> None:
    """Its answers would be as good; only unwanted ones count."""
    first, second = twins()
    assert tags(bind(first, replace(second, status=-5))) == ["together"]


# -- the provider object --------------------------------------------------------------------------


def test_pinned_preferences() -> None:
    """One full tag, no fallback, and the listed price and label as the service's own filters."""
    policy = ExclusionPolicy(data_collection="deny", zdr=True, enforce_distillable_text=True)
    assert pinned_preferences(MOONSHOT, policy) == {
        "only": ["moonshotai/int4"],
        "allow_fallbacks": False,
        "require_parameters": True,
        "quantizations": ["int4"],
        "max_price": {"prompt": "0.45", "completion": "2.25"},
        "data_collection": "deny",
        "zdr": True,
        "enforce_distillable_text": True,
    }


def test_pinned_price_is_the_ceiling_over_overrides_and_includes_fees() -> None:
    """A night tariff must not make the service refuse the endpoint by day."""
    pricing = Pricing(
        prices={
            "prompt": Decimal("0.000001"),
            "completion": Decimal("0.000002"),
            "request": Decimal("0.005"),
        },
        overrides=(PriceOverride(prices={"prompt": Decimal("0.0000015")}, utc_start_minute=0),),
    )
    preferences = pinned_preferences(make_endpoint(pricing=pricing), ExclusionPolicy())
    assert preferences["max_price"] == {"prompt": "1.5", "completion": "2", "request": "0.005"}


def test_free_endpoint_is_pinned_to_free() -> None:
    """Zero is a price, not the absence of a ceiling."""
    free = make_endpoint(usd_in="0", usd_out="0")
    preferences = pinned_preferences(free, ExclusionPolicy())
    assert preferences["max_price"] == {"prompt": "0", "completion": "0"}


def test_unknown_price_is_pinned_to_the_users_ceiling() -> None:
    """Without a listed price the user's own ceiling is what can be sent."""
    endpoint = make_endpoint(pricing=Pricing(prices={"prompt": None, "completion": None}))
    policy = ExclusionPolicy(requires_bounded_price=False, max_output_usd_per_million="3.0")
    assert pinned_preferences(endpoint, policy)["max_price"] == {"completion": "3.0"}


def test_nothing_known_about_prices_sends_no_ceiling() -> None:
    """An empty `max_price` would say nothing; it is left out."""
    endpoint = make_endpoint(
        pricing=Pricing(prices={"prompt": None, "completion": None, "request": None})
    )
    policy = ExclusionPolicy(requires_bounded_price=False)
    assert "max_price" not in pinned_preferences(endpoint, policy)


@pytest.mark.parametrize(
    ("label", "expected"), [("unknown", ["unknown"]), ("int3", None), (None, None)]
)
def test_label_the_service_may_not_know_is_not_sent(
    label: str | None, expected: list[str] | None
) -> None:
    """ "unknown" is a filter value; a word of unseen vocabulary could be refused."""
    preferences = pinned_preferences(make_endpoint(label=label), ExclusionPolicy())
    assert preferences.get("quantizations") == expected


def test_delegated_preferences() -> None:
    """Full tags only, the deny list beside them, the dearest eligible price as ceiling."""
    dear = make_endpoint("venice", "Venice", "unknown", usd_in="0.0000006", usd_out="0.000003325")
    bound = bind(*LISTING, dear, exclude=["Moonshot AI"], accept_unknown=["venice"])
    preferences = bound.preferences()
    assert preferences == {
        "only": ["siliconflow/int4", "venice"],
        "allow_fallbacks": True,
        "require_parameters": True,
        "quantizations": ["int4", "unknown"],
        "max_price": {"prompt": "0.6", "completion": "3.325"},
        "ignore": ["moonshotai", "moonshotai/int4"],
    }
    assert json.loads(json.dumps(preferences)) == preferences


def test_delegated_routing_leaves_out_a_tag_with_an_unwanted_twin() -> None:
    """With several labels allowed at once, the label no longer separates the twins."""
    first, second = twins(label="fp8")
    assert bind(SILICONFLOW, first, second).preferences()["only"] == ["siliconflow/int4"]


def test_nothing_left_is_an_error_and_not_an_empty_list() -> None:
    """`only: []` would mean anybody."""
    with pytest.raises(NoEligibleEndpoint) as caught:
        bind(FIREWORKS).preferences()
    assert "Fireworks" in str(caught.value)


# -- who served -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "model", "expected"),
    [
        ("Moonshot AI", "moonshotai/kimi-k2.5-0127", ()),
        ("MoonshotAI", K25, ()),
        ("moonshotai", f"{K25}:free", ()),
        ("Moonshot AI", None, ()),
        ("Fireworks", "moonshotai/kimi-k2.5-0127", ("served_mismatch",)),
        ("Moonshot", K25, ("served_mismatch",)),
        ("Moonshot AI", "moonshotai/kimi-k2.6", ("model_mismatch",)),
        ("Moonshot AI", "moonshotai/kimi-k2.5-0711", ("model_mismatch",)),
        ("Fireworks", "other/model", ("served_mismatch", "model_mismatch")),
        (None, K25, ("served_unknown",)),
        ("", K25, ("served_unknown",)),
    ],
)
def test_served_by(provider: str | None, model: str | None, expected: tuple[str, ...]) -> None:
    """The company and the model of an answer are held against what was asked."""
    assert served_by(MOONSHOT, provider_name=provider, model=model) == expected


def test_dated_name_without_a_catalogue() -> None:
    """With no dated name at hand a date is tolerated; with one, only that date is."""
    bare = replace(MOONSHOT, served_name=None)
    answer = {"provider_name": "Moonshot AI", "model": "moonshotai/kimi-k2.5-0127"}
    assert served_by(bare, **answer) == ()
    assert served_by(bare, **answer, canonical_slug="moonshotai/kimi-k2.5-0127") == ()
    assert served_by(bare, **answer, canonical_slug="moonshotai/kimi-k2.5-0711") == (
        "model_mismatch",
    )


# -- printing -------------------------------------------------------------------------------------


def test_every_excluded_endpoint_has_its_line() -> None:
    """One line each, with name and reason; eligible ones are not in the list."""
    bound = bind()
    assert len(bound.reasons()) == 1
    assert bound.reasons()[0].startswith("fireworks (Fireworks): excluded: precision not published")


def test_tables_show_everything_and_escape_it() -> None:
    """Provider names come from outside: in HTML they are text, never markup."""
    odd = make_endpoint("evil/int4", "<script>alert(1)</script>", status=-5)
    bound = bind(*LISTING, odd)
    html = bound._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    for endpoint in (*LISTING, odd):
        assert str(endpoint.key) in html
        assert str(endpoint.key) in str(bound)
    assert html.startswith("<table>")
    assert str(bind()).count("\n") == len(LISTING)


# -- the real list --------------------------------------------------------------------------------


def test_recorded_kimi_list_of_august_2026() -> None:
    """The verdicts on all ten endpoints of that day, written by hand."""
    catalogue = recorded_catalogue()
    providers = [
        Provider(slug=entry["slug"], name=entry["name"]) for entry in catalogue["providers"]["data"]
    ]
    policy = ExclusionPolicy(exclude=["Fireworks", "moonshot ai"])
    bound = policy.bind(recorded_endpoints(catalogue, K25), providers=providers, at=AT)
    found = {
        verdict.endpoint.tag: [reason.code for reason in verdict.excluding]
        for verdict in bound.verdicts
    }
    assert found == {
        "deepinfra/fp4": ["precision_requantized"],
        "siliconflow/int4": [],
        "atlas-cloud/int4": [],
        "digitalocean": ["precision_unknown"],
        "venice": ["precision_unknown"],
        "streamlake/fp8": ["precision_above_native"],
        "novita": ["precision_unknown"],
        "amazon-bedrock/us-east-2": ["precision_unknown"],
        "moonshotai/int4": ["excluded_by_name"],
        "phala": ["precision_unknown"],
    }
    assert bound.unmatched == ("exclude: Fireworks",)
    sampled = ExclusionPolicy(required_parameters=frozenset({"temperature", "seed"}))
    with_seed = sampled.bind(recorded_endpoints(catalogue, K25), at=AT)
    assert tags(with_seed) == ["atlas-cloud/int4"]


def test_whole_recorded_catalogue_is_judged() -> None:
    """Every endpoint of every model binds, pins and prints; every exclusion has its line."""
    catalogue = recorded_catalogue()
    judged = 0
    for model in catalogue["endpoints"]:
        bound = ExclusionPolicy(native="bf16", accept_unknown=True).bind(
            recorded_endpoints(catalogue, model), at=AT
        )
        judged += len(bound.verdicts)
        assert len(bound.reasons()) + len(bound.eligible) == len(bound.verdicts)
        for endpoint in bound.eligible:
            json.dumps(pinned_preferences(endpoint, bound.policy))
    assert judged == 1_204
