"""Two whole catalogues and fifty days of two models, as the service answered them."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

import pytest

from quantroute._json import loads
from quantroute.domain import Endpoint, Quantization
from quantroute.registry import (
    Change,
    ChangeKind,
    EndpointList,
    ModelQuery,
    ProviderRegistry,
    compare,
)
from quantroute.registry._endpoints import parse_endpoints
from registry_support import DATA, MODEL

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the recorded catalogues (../shared/data/openrouter) are not here"
)

JULY = DATA / "catalogue-2026-07-10.json.gz"
AUGUST = DATA / "catalogue-2026-08-22.json.gz"
SERIES = DATA / "kimi-endpoints-2026-07-04-to-08-22.jsonl.gz"


async def every_list(registry: ProviderRegistry) -> list[EndpointList]:
    return [await registry.endpoints(model) for model in registry._source.lists]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "lists", "endpoints", "empty", "models", "providers", "overrides"),
    [(JULY, 330, 979, 24, 346, 74, 0), (AUGUST, 422, 1204, 19, 422, 103, 177)],
    ids=["july", "august"],
)
async def test_a_whole_catalogue_parses_without_a_problem(
    path: object,
    lists: int,
    endpoints: int,
    empty: int,
    models: int,
    providers: int,
    overrides: int,
) -> None:
    registry = ProviderRegistry.from_snapshot(str(path))
    read = await every_list(registry)
    served = [endpoint for found in read for endpoint in found]
    assert (len(read), len(served), sum(not found.endpoints for found in read)) == (
        lists,
        endpoints,
        empty,
    )
    assert sum(bool(endpoint.pricing.overrides) for endpoint in served) == overrides
    assert [found.problems for found in read if found.problems] == []
    summaries, directory = await registry.models(), await registry.providers()
    assert (len(summaries), summaries.problems) == (models, ())
    assert (len(directory), directory.problems) == (providers, ())
    assert all(endpoint.pricing.is_bounded for endpoint in served)
    assert len({endpoint.key for endpoint in served}) == endpoints


async def test_august_in_figures() -> None:
    """Labels, statuses, twins, windows and unpriced routers, counted by hand beforehand."""
    registry = ProviderRegistry.from_snapshot(AUGUST)
    served = [endpoint for found in await every_list(registry) for endpoint in found]
    assert Counter(endpoint.quantization.value for endpoint in served) == {
        "unknown": 727,
        "fp8": 298,
        "bf16": 73,
        "fp4": 72,
        "int4": 19,
        "fp16": 8,
        "nvfp4": 4,
        "mxfp4": 3,
    }
    assert Counter(endpoint.status for endpoint in served) == {0: 1155, -2: 34, -5: 15}
    assert [str(endpoint.key) for endpoint in served if endpoint.ordinal] == [
        "together#2",
        "google-vertex/us-south1#2",
    ]
    windows = {
        (override.utc_start_minute, override.utc_end_minute)
        for endpoint in served
        for override in endpoint.pricing.overrides
        if override.utc_start_minute is not None
    }
    assert windows == {(0, 840), (840, 0)}
    unpriced = [m.id for m in await registry.models() if m.pricing.input_usd_per_token is None]
    assert len(unpriced) == 5
    assert all(model.startswith("openrouter/") for model in unpriced)


async def test_august_kimi_is_as_published() -> None:
    registry = ProviderRegistry.from_snapshot(AUGUST)
    found = {endpoint.tag: endpoint for endpoint in await registry.endpoints(MODEL)}
    assert len(found) == 10
    assert found["streamlake/fp8"].pricing.input_usd_per_token == Decimal("0.00000054")
    assert found["novita"].pricing.output_usd_per_token == Decimal("0.00000285")  # discount inside
    assert found["moonshotai/int4"].quantization is Quantization.INT4
    assert "temperature" not in found["moonshotai/int4"].supported_parameters
    directory = await registry.providers()
    for endpoint in found.values():
        assert directory.slug_of(endpoint.provider_name) == endpoint.provider_slug
        assert directory.name_of(endpoint.tag) == endpoint.provider_name
    seeded = await registry.models(ModelQuery(q="kimi", supported_parameters=("seed",)))
    assert MODEL in [model.id for model in seeded]
    hosted = await registry.models(ModelQuery(providers=("moonshot ai",)))
    assert MODEL in [model.id for model in hosted]


def series() -> Iterator[tuple[str, EndpointList]]:
    """Time stamp and list, both models, oldest first."""
    with gzip.open(SERIES, "rt", encoding="utf-8") as lines:
        for line in lines:
            captured = loads(line)
            assert isinstance(captured, dict)
            at = captured["captured_at"]
            at_s = datetime.fromisoformat(at).timestamp()
            for model, body in captured["endpoints"].items():
                yield at, parse_endpoints(model, body, fetched_at_s=at_s, source="archive")


@pytest.fixture(scope="module")
def changes() -> list[tuple[str, Change]]:
    """Every change of the fifty days with the time it was first seen."""
    before: dict[str, EndpointList] = {}
    found: list[tuple[str, Change]] = []
    for at, listing in series():
        assert listing.problems == ()
        if listing.model in before:
            found += [(at, change) for change in compare(before[listing.model], listing)]
        before[listing.model] = listing
    return found


Changes = list[tuple[str, Change]]


def told(changes: Changes, *, tag: str, kind: ChangeKind, model: str = MODEL) -> list[str]:
    """Day and text of one endpoint's changes of one kind."""
    return [
        f"{at[:10]} {str(change).split(': ', 1)[1]}"
        for at, change in changes
        if change.key.model == model and change.key.tag == tag and change.kind is kind
    ]


def test_digitalocean_rose_by_a_third_over_night(changes: Changes) -> None:
    assert told(changes, tag="digitalocean", kind=ChangeKind.PRICE) == [
        "2026-07-06 input_cache_read unpriced -> $0.203/M",
        "2026-08-21 prompt $0.375/M -> $0.5/M (+33%)",
        "2026-08-21 completion $2.025/M -> $2.7/M (+33%)",
    ]


def test_members_come_and_go(changes: Changes) -> None:
    members = [
        (at[:10], change.key.tag, change.kind.value)
        for at, change in changes
        if change.key.model == MODEL and change.kind in (ChangeKind.GONE, ChangeKind.APPEARED)
    ]
    assert members == [
        ("2026-07-17", "modelrun/fp4", "gone"),
        ("2026-07-18", "ambient/int4", "appeared"),
        ("2026-07-18", "ambient/int4", "gone"),
        ("2026-07-29", "chutes/int4", "gone"),
        ("2026-07-31", "amazon-bedrock/us-east-2", "appeared"),
    ]


def test_venice_flips_within_hours(changes: Changes) -> None:
    flips = told(changes, tag="venice", kind=ChangeKind.STATUS)
    assert len(flips) > 100
    assert "0 -> -2" in flips[0] + flips[1]


def test_a_corrected_label_is_a_relabel_with_its_new_prices(changes: Changes) -> None:
    model = "moonshotai/kimi-k2.6"
    moves = [change for _, change in changes if change.kind is ChangeKind.RELABELLED]
    (move,) = moves
    assert isinstance(move.before, Endpoint)
    assert isinstance(move.after, Endpoint)
    assert (move.before.tag, move.after.tag) == ("sail-research/fp8", "sail-research/int4")
    assert told(changes, tag="sail-research/int4", kind=ChangeKind.PRICE, model=model)[0] == (
        "2026-07-28 prompt $0.8/M -> $1/M (+25%)"
    )


def test_the_fifty_days_in_figures(changes: Changes) -> None:
    kinds = Counter((change.key.model, change.kind) for _, change in changes)
    assert kinds[MODEL, ChangeKind.STATUS] == 488
    assert kinds[MODEL, ChangeKind.PRICE] == 6
    assert kinds["moonshotai/kimi-k2.6", ChangeKind.PRICE] == 192
