"""Catalogue paths: lists, filters, endpoints, aliases, providers, recorded catalogues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantroute.errors import ConfigurationError
from quantroute.simulator import Scenario
from quantroute.simulator._catalogue import status_for

RECORDED = Path(__file__).resolve().parents[2] / "../shared/data/openrouter"
CATALOGUES = ("catalogue-2026-07-10.json.gz", "catalogue-2026-08-22.json.gz")


def recorded(name: str) -> Path:
    path = RECORDED / name
    if not path.exists():
        pytest.skip(f"recorded catalogue {name} is not beside the repository")
    return path


async def test_models_lists_the_mission_model(service):
    body = (await service.get("/models")).json
    assert body["total_count"] == 1
    model = body["data"][0]
    assert model["id"] == "moonshotai/kimi-k2.5"
    assert model["context_length"] == 262144
    assert model["pricing"]["prompt"] == "0.00000045"
    assert {"seed", "tools", "temperature"} <= set(model["supported_parameters"])


async def test_mission_endpoints_are_the_eleven(service):
    """Prices within the story's span; BaseTen fp4 at -5; Fireworks unlabelled; INT4 for most."""
    rows = (await service.get("/models/moonshotai/kimi-k2.5/endpoints")).json["data"]["endpoints"]
    assert len(rows) == 11
    by_tag = {row["tag"]: row for row in rows}
    assert {row["provider_name"] for row in rows} >= {"Fireworks", "BaseTen", "Moonshot AI"}
    assert by_tag["baseten/fp4"]["quantization"] == "fp4"
    assert by_tag["baseten/fp4"]["status"] == -5
    assert by_tag["baseten/fp4"]["uptime_last_30m"] < 80
    assert by_tag["fireworks"]["quantization"] == "unknown"
    labels = [row["quantization"] for row in rows]
    assert labels.count("int4") > len(rows) / 2
    inputs = sorted(float(row["pricing"]["prompt"]) * 1e6 for row in rows)
    outputs = sorted(float(row["pricing"]["completion"]) * 1e6 for row in rows)
    assert (inputs[0], inputs[-1]) == pytest.approx((0.45, 0.75))
    assert (outputs[0], outputs[-1]) == pytest.approx((2.20, 3.75))


async def test_dated_alias_gives_the_same_endpoints(service):
    plain = await service.get("/models/moonshotai/kimi-k2.5/endpoints")
    dated = await service.get("/models/moonshotai/kimi-k2.5-0127/endpoints")
    assert plain.raw == dated.raw


async def test_single_model_path_is_singular(service):
    assert (await service.get("/model/moonshotai/kimi-k2.5")).json["data"]["id"].endswith("k2.5")
    assert (await service.get("/models/moonshotai/kimi-k2.5")).status == 404


@pytest.mark.parametrize(
    "path", ["/models/no/such/endpoints", "/model/no/such", "/nothing", "/models/x"]
)
async def test_unknown_paths_answer_404_in_json(service, path):
    got = await service.get(path)
    assert got.status == 404
    assert got.json["error"]["code"] == 404


async def test_catalogue_needs_no_key(service):
    async with service.session.get(
        service.simulator.base_url + "/models", headers={"Authorization": ""}
    ) as response:
        assert response.status == 200


async def test_providers_map_names_to_slugs(service):
    rows = (await service.get("/providers")).json["data"]
    slugs = {row["name"]: row["slug"] for row in rows}
    assert slugs["Moonshot AI"] == "moonshotai"
    assert slugs["AtlasCloud"] == "atlas-cloud"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "KIMI"}, 1),
        ({"q": "llama"}, 0),
        ({"supported_parameters": "tools,temperature"}, 1),
        ({"supported_parameters": "no_such"}, 0),
        ({"providers": "Fireworks"}, 1),
        ({"providers": "fireworks"}, 0),
        ({"context": "262144"}, 1),
        ({"context": "300000"}, 0),
        ({"max_price": "0.45"}, 1),
        ({"max_price": "0.44"}, 0),
        ({"min_price": "0.45"}, 1),
        ({"min_price": "0.46"}, 0),
        ({"model_authors": "moonshotai"}, 1),
        ({"offset": "1"}, 0),
        ({"limit": "1"}, 1),
        ({"input_modalities": "text"}, 1),
        ({"output_modalities": "image"}, 0),
        ({"arch": "Other"}, 1),
        ({"zdr": "true"}, 0),
        ({"sort": "pricing-low-to-high"}, 1),
        ({"unheard_of": "x"}, 1),
    ],
)
async def test_model_filters(service, query, found):
    assert len((await service.get("/models", **query)).json["data"]) == found


async def test_a_filter_that_is_no_number_is_refused(service):
    assert (await service.get("/models", max_price="cheap")).status == 400


@pytest.mark.parametrize(
    ("uptime", "status"),
    [(100.0, 0), (95.0, 0), (94.99, -2), (80.0, -2), (79.99, -5), (0.0, -5), (None, 0)],
)
def test_status_follows_uptime(uptime, status):
    assert status_for(uptime) == status


@pytest.mark.parametrize("name", CATALOGUES)
async def test_a_recorded_catalogue_is_served_as_recorded(open_service, name):
    """Every model, provider and endpoint comes back exactly as it was answered that day."""
    scenario = Scenario.from_catalogue(recorded(name))
    service = await open_service(scenario)
    original = scenario.recorded
    assert original is not None
    assert (await service.get("/models")).json["data"] == list(original.models)
    assert (await service.get("/providers")).json["data"] == list(original.providers)
    aliases = {row["id"] for row in original.models if row.get("alias_target")}
    for model, body in original.endpoints.items():
        if model in aliases:
            continue  # listed without endpoints of its own; leads to its target
        assert (await service.get(f"/models/{model}/endpoints")).json["data"] == body


async def test_recorded_models_can_be_asked(open_service):
    """A catalogue's model answers and is billed by its own price; aliases lead to their target."""
    service = await open_service(Scenario.from_catalogue(recorded(CATALOGUES[1])))
    got = await service.chat(
        model="moonshotai/kimi-k2.6", provider={"quantizations": ["int4"], "sort": "price"}
    )
    assert got.status == 200
    record = service.bill.records[got.json["id"]]
    assert record.quantization == "int4"
    assert record.cost_usd > 0
    assert (await service.chat(model="~moonshotai/kimi-latest")).status == 200
    assert (await service.chat(model="openrouter/auto")).status == 404


async def test_twins_under_one_tag_are_both_listed_and_both_serve(open_service, small, endpoint):
    scenario = small(endpoint("together", "0.5", "1"), endpoint("together", "0.5", "4"))
    service = await open_service(scenario)
    rows = (await service.get("/models/moonshotai/kimi-k2.5/endpoints")).json["data"]["endpoints"]
    assert [row["tag"] for row in rows] == ["together", "together"]
    prices = set()
    for number in range(40):
        got = await service.chat(f"p{number}", provider={"only": ["together"]})
        usage = got.json["usage"]
        prices.add(
            round(
                1e6
                * usage["cost_details"]["upstream_inference_completions_cost"]
                / usage["completion_tokens"],
                3,
            )
        )
    assert prices == {1.0, 4.0}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"endpoints": {}, "models": {"data": 3}, "providers": []}', None],
)
def test_a_broken_catalogue_is_refused_by_name(tmp_path, content):
    path = tmp_path / "cat.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"cat\.json"):
        Scenario.from_catalogue(path)


async def test_a_catalogue_of_plain_lists_works_too(open_service, tmp_path):
    """`models` and `providers` may be bare lists; endpoints without a model row are ignored."""
    path = tmp_path / "cat.json"
    path.write_text(json.dumps({"models": [{"id": "a/b"}], "providers": [], "endpoints": {}}))
    service = await open_service(Scenario.from_catalogue(path))
    assert (await service.chat(model="a/b")).status == 404
    assert (await service.chat(model="x/y")).status == 400
