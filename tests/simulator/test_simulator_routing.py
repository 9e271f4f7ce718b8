"""Provider preferences, balancing and failover, seen from outside."""

from __future__ import annotations

from collections import Counter

import pytest

from quantroute.simulator import Faults, TrafficSpec

INT4 = {"SiliconFlow", "Inceptron", "Chutes", "AtlasCloud", "Moonshot AI", "Parasail"}


async def test_only_a_full_tag(service):
    assert set(await service.names(8, only=["moonshotai/int4"])) == {"Moonshot AI"}


async def test_only_a_base_slug(service):
    assert set(await service.names(4, only=["baseten"])) == {"BaseTen"}


async def test_only_nothing_left_names_both_sides(service):
    got = await service.chat(provider={"only": ["nobody"]})
    assert got.status == 404
    message = got.json["error"]["message"]
    assert message.startswith("No allowed providers are available for the selected model.")
    assert "siliconflow" in message
    assert message.endswith("permits only: nobody.")
    assert got.json["error"]["availability"]["excluded_by"] == ["allowed_providers"]


async def test_display_names_are_silently_ignored(service):
    """Ignoring "Inceptron" by its name does nothing; by its slug it does."""
    by_name = await service.names(60, ignore=["Inceptron"])
    by_slug = await service.names(60, ignore=["inceptron"])
    assert "Inceptron" in by_name
    assert "Inceptron" not in by_slug
    assert (await service.chat(provider={"only": ["Inceptron"]})).status == 404


async def test_ignore_everything_is_404(service):
    tags = [
        e.tag for e in service.simulator.state.catalogue.models["moonshotai/kimi-k2.5"].endpoints
    ]
    got = await service.chat(provider={"ignore": tags})
    assert got.status == 404
    assert "ignored" in got.json["error"]["message"]


async def test_quantizations_treats_unknown_as_a_value(service):
    assert set(await service.names(60, quantizations=["int4"])) <= INT4
    unlabelled = set(await service.names(60, quantizations=["unknown"]))
    assert unlabelled <= {"Venice", "Novita", "Phala", "Fireworks"}
    assert len(unlabelled) > 1
    assert await service.names(1, quantizations=["bf16"]) == ["404"]
    assert await service.names(1, quantizations=["int5"]) == ["400"]


async def test_an_fp4_filter_includes_its_block_scaled_relatives(open_service, small, endpoint):
    scenario = small(
        endpoint("a/nvfp4", quantization="nvfp4"), endpoint("b/int4", quantization="int4")
    )
    service = await open_service(scenario)
    assert await service.names(1, quantizations=["fp4"]) == ["A"]


@pytest.mark.parametrize("ceiling", [2.5, "2.5"])
async def test_max_price_is_per_million_and_inclusive(service, ceiling):
    names = set(await service.names(40, max_price={"prompt": 0.49, "completion": ceiling}))
    assert names <= {"SiliconFlow", "Inceptron", "Chutes", "AtlasCloud"}
    assert "AtlasCloud" in names


async def test_max_price_below_everything_is_404(service):
    got = await service.chat(provider={"max_price": {"completion": 2.19}})
    assert got.status == 404
    assert got.json["error"]["availability"]["excluded_by"] == ["max_price"]
    assert (await service.chat(provider={"max_price": {"prompt": "free"}})).status == 400


async def test_max_price_sees_a_request_fee_in_dollars(open_service, small, endpoint):
    service = await open_service(small(endpoint("a", pricing={"request": "0.01"})))
    assert await service.names(1, max_price={"request": 0.01}) == ["A"]
    assert await service.names(1, max_price={"request": 0.009}) == ["404"]


async def test_require_parameters_removes_the_lab_itself(service):
    """Moonshot lists no temperature: required, it is gone; else the parameter is dropped."""
    only = ["moonshotai/int4"]
    dropped = await service.chat(temperature=0.6, provider={"only": only})
    assert dropped.status == 200
    needed = await service.chat(
        temperature=0.6, provider={"only": only, "require_parameters": True}
    )
    assert needed.status == 404
    assert needed.json["error"]["availability"]["excluded_by"] == ["require_parameters"]


async def test_response_format_is_only_a_soft_requirement(open_service, small, endpoint):
    service = await open_service(small(endpoint("a", supported_parameters=("max_tokens",))))
    got = await service.chat(
        response_format={"type": "json_object"}, provider={"require_parameters": True}
    )
    assert got.status == 200


async def test_tools_need_support(service):
    got = await service.chat(tools=[{"type": "function"}], provider={"only": ["novita"]})
    assert got.status == 404
    assert got.json["error"]["message"] == "No endpoints found that support tool use."


async def test_data_policy(open_service, small, endpoint):
    scenario = small(endpoint("a", collects_data=True), endpoint("b", is_zdr=True))
    service = await open_service(scenario)
    assert set(await service.names(10, data_collection="deny")) == {"B"}
    assert set(await service.names(10, zdr=True)) == {"B"}
    got = await service.chat(provider={"only": ["a"], "data_collection": "deny"})
    assert got.json["error"]["message"] == "No endpoints found matching your data policy"


async def test_endpoints_whose_output_limit_is_too_low_are_skipped(open_service, small, endpoint):
    scenario = small(
        endpoint("cheap", "0.1", "0.1", max_completion_tokens=100),
        endpoint("roomy", "1", "9", max_completion_tokens=1000),
    )
    service = await open_service(scenario)
    for number in range(10):
        got = await service.chat(f"p{number}", max_tokens=101)
        assert got.json["provider"] == "Roomy"
    assert (await service.chat(max_tokens=1001)).status == 404


async def test_context_decides_and_says_so(open_service, small, endpoint):
    scenario = small(endpoint("a", context_length=500), endpoint("b", context_length=1000))
    service = await open_service(scenario)
    got = await service.chat("x" * 2000, max_tokens=400)
    assert got.json["provider"] == "B"
    over = await service.chat("x" * 2000, max_tokens=900)
    assert over.status == 400
    assert over.json["error"]["metadata"]["error_type"] == "context_length_exceeded"
    assert "maximum context length is 1000 tokens" in over.json["error"]["message"]


async def test_a_base_slug_does_not_reach_service_tiers(open_service, small, endpoint):
    """`a` means a's ordinary endpoint; `a/flex` is served only when asked for by tag or tier."""
    scenario = small(endpoint("a", "5", "5"), endpoint("a/flex", "1", "1"))
    service = await open_service(scenario)
    tags = service.stats.attempts_by_tag
    await service.names(10, only=["a"])
    await service.names(10)
    assert set(tags) == {"a"}
    await service.names(1, only=["a/flex"])
    assert tags["a/flex"] == 1
    await service.chat(service_tier="flex", provider={"sort": "price"})
    assert tags["a/flex"] == 2
    assert (await service.chat(model="moonshotai/kimi-k2.5:floor")).status == 200
    assert tags["a/flex"] == 3


async def test_region_tags_belong_to_the_base_slug(open_service, small, endpoint):
    service = await open_service(small(endpoint("amazon/us-east-2"), endpoint("b")))
    assert set(await service.names(6, only=["amazon"])) == {"Amazon"}


async def test_default_balancing_follows_the_inverse_square_of_the_price(
    open_service, small, endpoint
):
    """$1 against $3 is nine to one."""
    service = await open_service(small(endpoint("a", "0.5", "0.5"), endpoint("b", "1.5", "1.5")))
    share = Counter(await service.names(400))["A"] / 400
    assert 0.84 < share < 0.96


@pytest.mark.parametrize(("sort", "first"), [("price", "A"), ("throughput", "B"), ("latency", "C")])
@pytest.mark.parametrize("form", ["text", "object"])
async def test_sort(open_service, small, endpoint, sort, first, form):
    scenario = small(
        endpoint("a", "1", "1"),
        endpoint("b", "2", "2"),
        endpoint("c", "3", "3"),
        provider_traffic={
            "b": TrafficSpec(tokens_per_s=500),
            "c": TrafficSpec(first_token_s=0.01),
        },
    )
    service = await open_service(scenario)
    wanted = sort if form == "text" else {"by": sort, "partition": "model"}
    assert set(await service.names(5, sort=wanted)) == {first}
    assert (await service.chat(provider={"sort": "beauty"})).status == 400


async def test_order_comes_first_then_the_rest(open_service, small, endpoint):
    scenario = small(
        endpoint("a"),
        endpoint("b"),
        endpoint("c"),
        provider_faults={"b": Faults(upstream_503=1.0), "c": Faults(upstream_502=1.0)},
    )
    service = await open_service(scenario)
    assert await service.names(1, order=["b", "c"]) == ["A"]
    assert await service.names(1, order=["b", "c"], allow_fallbacks=False) == ["502"]


async def test_failover_before_the_first_token_is_silent(open_service, small, endpoint):
    scenario = small(
        endpoint("a", "0.1", "0.1"),
        endpoint("b", "9", "9"),
        provider_faults={"a": Faults(upstream_429=1.0)},
    )
    service = await open_service(scenario)
    assert set(await service.names(10)) == {"B"}
    assert service.stats.attempts_by_tag["a"] > 0


async def test_all_failing_returns_the_last_error_with_the_earlier_ones(
    open_service, small, endpoint
):
    scenario = small(
        endpoint("a"),
        endpoint("b"),
        provider_faults={"a": Faults(upstream_503=1.0), "b": Faults(upstream_429=1.0)},
    )
    service = await open_service(scenario)
    got = await service.chat(provider={"order": ["a", "b"]})
    assert got.status == 429
    metadata = got.json["error"]["metadata"]
    assert metadata["provider_name"] == "B"
    assert metadata["previous_errors"] == [{"provider": "A", "code": 503, "status": 503}]
    alone = await service.chat(provider={"order": ["a", "b"], "allow_fallbacks": False})
    assert alone.status == 429


async def test_a_fault_of_the_request_bothers_one_provider_only(open_service, small, endpoint):
    scenario = small(endpoint("a"), endpoint("b"), faults=Faults(upstream_400=1.0))
    service = await open_service(scenario)
    got = await service.chat(provider={"order": ["a", "b"]})
    assert got.status == 400
    assert service.stats.attempts_by_tag == {"a": 1}


async def test_down_endpoints_are_a_last_resort(open_service, small, endpoint):
    """A cheap endpoint at status -5 serves only when the others fail."""
    scenario = small(
        endpoint("cheap", "0.01", "0.01", uptime_last_30m=50.0), endpoint("dear", "9", "9")
    )
    service = await open_service(scenario)
    assert set(await service.names(20)) == {"Dear"}
    service.simulator.change(endpoints=[{"tag": "dear", "is_out": True}])
    assert set(await service.names(3)) == {"Cheap"}


async def test_fallback_models(open_service, small, endpoint):
    service = await open_service(small(endpoint("a")))
    got = await service.post(
        "/chat/completions",
        {
            "models": ["no/such", "moonshotai/kimi-k2.5"],
            "messages": [{"role": "user", "content": "x"}],
        },
    )
    assert got.status == 200
    assert got.json["model"] == "moonshotai/kimi-k2.5-0127"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": 3},
        {"temperature": "warm"},
        {"top_p": -1},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"reasoning": "on"},
        {"reasoning": {"effort": "huge"}},
        {"reasoning": {"effort": "low", "max_tokens": 5}},
        {"provider": []},
        {"provider": {"only": "a"}},
        {"model": None},
        {"model": "no/such"},
    ],
)
async def test_bad_requests_are_refused_with_400(service, fields):
    got = await service.post("/chat/completions", service.body() | fields)
    assert got.status == 400
    assert got.json["error"]["code"] == 400
    assert not service.bill.records


async def test_a_body_that_is_not_json(service):
    url = service.simulator.base_url + "/chat/completions"
    async with service.session.post(url, data=b"{") as response:
        assert response.status == 400
    async with service.session.post(url, data=b"[]") as response:
        assert response.status == 400
    async with service.session.get(url) as response:
        assert response.status == 405
