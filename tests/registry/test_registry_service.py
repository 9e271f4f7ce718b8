"""ProviderRegistry against a real HTTP server: cache, flights, faults, secrets, snapshots."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from quantroute._http import Service
from quantroute.errors import ConfigurationError, RegistryError, UnknownName
from quantroute.registry import Change, ChangeKind, ModelNotListed, ModelQuery, ProviderRegistry
from quantroute.secrets import EnvKey
from quantroute.testing import FakeClock
from registry_support import (
    MODEL,
    Answer,
    FakeCatalogue,
    dump,
    entry,
    error_answer,
    json_answer,
    listing,
    model_row,
    names,
    text_answer,
)

KEY = "sk-or-v1-0123456789abcdef0123456789abcdef"
PROVIDERS = {
    "data": [
        {"name": "HostA", "slug": "hosta"},
        {"name": "Moonshot AI", "slug": "moonshotai"},
    ]
}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(autojump=True)


@pytest.fixture
def registry(catalogue: FakeCatalogue, clock: FakeClock) -> ProviderRegistry:
    """Keyless, ten seconds fresh, a minute stale."""
    return ProviderRegistry(
        service=catalogue.service, key=None, ttl_s=10.0, max_stale_s=60.0, clock=clock
    )


def priced(prompt: str, **changes: Any) -> Answer:
    pricing = {"prompt": prompt, "completion": "0.000002"}
    return json_answer(listing(entry(pricing=pricing, **changes)))


async def test_a_list_is_read_once_while_it_is_fresh(
    catalogue: FakeCatalogue, registry: ProviderRegistry, clock: FakeClock
) -> None:
    catalogue.say_endpoints(priced("0.1"), priced("0.2"))
    async with registry:
        first = await registry.endpoints(MODEL)
        clock.advance(9.0)
        assert await registry.endpoints(MODEL) is first
        assert first.age_s(clock.time_s()) == 9.0
        clock.advance(1.5)
        second = await registry.endpoints(MODEL)
    assert [e.pricing.input_usd_per_token for e in second] == [Decimal("0.2")]
    assert len(catalogue.requests) == 2
    assert first.source == catalogue.service.base_url


async def test_refresh_reads_a_fresh_list_again_and_reports_changes(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(priced("0.1"), priced("0.1"), priced("0.2"), priced("0.3"))
    seen: list[tuple[Change, ...]] = []
    remove = registry.on_change(seen.append)
    async with registry:
        await registry.endpoints(MODEL)
        await registry.endpoints(MODEL, refresh=True)
        assert seen == []
        await registry.endpoints(MODEL, refresh=True)
        remove()
        await registry.endpoints(MODEL, refresh=True)
    ((change,),) = seen
    assert (change.kind, change.before, change.after) == (
        ChangeKind.PRICE,
        Decimal("0.1"),
        Decimal("0.2"),
    )


async def test_who_will_not_wait_has_the_last_list_while_a_new_one_is_read(
    catalogue: FakeCatalogue, registry: ProviderRegistry, clock: FakeClock
) -> None:
    catalogue.say_endpoints(priced("0.1"), priced("0.2"))
    async with registry:
        first = await registry.endpoints(MODEL, wait=False)  # there is none yet: waits
        clock.advance(11.0)
        catalogue.gate = asyncio.Event()
        catalogue.arrived.clear()
        assert await registry.endpoints(MODEL, wait=False) is first
        await catalogue.arrived.wait()
        assert await registry.endpoints(MODEL, wait=False) is first
        catalogue.gate.set()
        second = await registry.endpoints(MODEL)
        assert await registry.endpoints(MODEL, wait=False) is second
    assert [e.pricing.input_usd_per_token for e in second] == [Decimal("0.2")]
    assert len(catalogue.requests) == 2


async def test_after_a_long_silence_everybody_waits_for_a_new_list(
    catalogue: FakeCatalogue, clock: FakeClock
) -> None:
    catalogue.say_endpoints(priced("0.1"), priced("0.2"))
    async with ProviderRegistry(service=catalogue.service, key=None, clock=clock) as registry:
        await registry.endpoints(MODEL)
        clock.advance(3_600.0)
        listing = await registry.endpoints(MODEL, wait=False)
    assert [e.pricing.input_usd_per_token for e in listing] == [Decimal("0.2")]


async def test_many_callers_share_one_read_and_one_may_leave(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(priced("0.1"))
    catalogue.gate = asyncio.Event()
    async with registry, asyncio.TaskGroup() as group:
        callers = [group.create_task(registry.endpoints(MODEL)) for _ in range(200)]
        await catalogue.arrived.wait()
        callers[0].cancel()  # the one whose call started the read
        await asyncio.sleep(0)
        catalogue.gate.set()
        lists = [await caller for caller in callers[1:]]
    assert callers[0].cancelled()
    assert len(catalogue.requests) == 1
    assert all(found is lists[0] for found in lists)


async def test_closing_tells_whoever_still_waits(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(priced("0.1"))
    catalogue.gate = asyncio.Event()
    async with registry:
        waiting = asyncio.ensure_future(registry.endpoints(MODEL))
        await catalogue.arrived.wait()
    with pytest.raises(RegistryError, match="closed"):
        await waiting
    catalogue.gate.set()


@pytest.mark.parametrize(
    "fault",
    [
        error_answer(503),
        error_answer(429, status=200),
        text_answer("<html>bad gateway</html>", status=502),
        text_answer("<html>log in first</html>"),
        text_answer('{"data": {"endpoints": [', content_type="application/json"),
        json_answer({"data": {}}),
    ],
    ids=["503", "429-in-200", "html-502", "html-200", "cut-json", "no-list"],
)
async def test_a_fault_brings_the_old_list_marked_stale_until_it_is_too_old(
    catalogue: FakeCatalogue, registry: ProviderRegistry, clock: FakeClock, fault: Answer
) -> None:
    catalogue.say_endpoints(priced("0.1"), fault)
    async with registry:
        first = await registry.endpoints(MODEL)
        clock.advance(11.0)
        with capture_logs() as events:
            stale = await registry.endpoints(MODEL)
        assert (stale.is_stale, stale.endpoints) == (True, first.endpoints)
        assert stale.age_s(clock.time_s()) >= 11.0
        (event,) = [e for e in events if e["event"] == "catalogue_stale"]
        assert event["log_level"] == "warning"
        assert event["age_s"] >= 11.0
        asked = len(catalogue.requests)
        assert await registry.endpoints(MODEL) is stale  # rests: no caller waits again
        assert len(catalogue.requests) == asked
        clock.advance(60.0)
        with pytest.raises(RegistryError):
            await registry.endpoints(MODEL)


async def test_after_a_stale_answer_the_next_good_read_is_compared_with_the_last_good_one(
    catalogue: FakeCatalogue, registry: ProviderRegistry, clock: FakeClock
) -> None:
    catalogue.say_endpoints(priced("0.1"), *[error_answer(500)] * 3, priced("0.2"))
    seen: list[tuple[Change, ...]] = []
    registry.on_change(seen.append)
    async with registry:
        await registry.endpoints(MODEL)
        assert (await registry.endpoints(MODEL, refresh=True)).is_stale
        assert not (await registry.endpoints(MODEL)).is_stale  # still within its ten seconds
        assert not (await registry.endpoints(MODEL, refresh=True)).is_stale
    assert [str(change) for (change,) in seen] == [
        f"{MODEL} hosta/int4: prompt $100000/M -> $200000/M (+100%)"
    ]


async def test_faults_that_pass_are_retried_with_growing_waits(
    catalogue: FakeCatalogue, registry: ProviderRegistry, clock: FakeClock
) -> None:
    slow_down = json_answer(
        {"error": {"code": 429, "message": "slow"}}, status=429, **{"Retry-After": "7"}
    )
    catalogue.say_endpoints(slow_down, error_answer(502), priced("0.1"))
    async with registry:
        assert len(await registry.endpoints(MODEL)) == 1
    assert clock.slept_s == [7.0, 1.0]


@pytest.mark.parametrize(
    ("header", "waits_s"),
    [
        ("Mon, 21 Sep 2026 14:13:32 GMT", [12.0, 12.0]),
        ("Monday, 21-Sep-26 14:13:32 GMT", [12.0, 12.0]),
        ("soon", [0.5, 1.0]),
        ("-3", [0.5, 1.0]),
        ("3600", []),
    ],
)
async def test_retry_after_in_every_form(
    catalogue: FakeCatalogue,
    registry: ProviderRegistry,
    clock: FakeClock,
    header: str,
    waits_s: list[float],
) -> None:
    """An hour is longer than anybody waits for a catalogue: give up at once."""
    assert clock.time_s() == 1_790_000_000.0  # 2026-09-21T14:13:20Z
    headers = {"Retry-After": header, "Date": "Mon, 21 Sep 2026 14:13:20 GMT"}
    answer = json_answer({"error": {"code": 429}}, status=429, **headers)
    catalogue.say_endpoints(answer)
    async with registry:
        with pytest.raises(RegistryError, match="429"):
            await registry.endpoints(MODEL)
    assert clock.slept_s[:1] == waits_s[:1]
    assert len(clock.slept_s) == len(waits_s)


async def test_nothing_cached_and_no_service_is_one_clear_error(clock: FakeClock) -> None:
    service = Service(base_url="http://127.0.0.1:9/api/v1")
    async with ProviderRegistry(service=service, key=None, clock=clock) as registry:
        with pytest.raises(RegistryError, match=r"3 attempts \(127.0.0.1:9 directly\).*snapshot"):
            await registry.endpoints(MODEL)


async def test_a_silent_service_times_out(catalogue: FakeCatalogue, clock: FakeClock) -> None:
    catalogue.say_endpoints(priced("0.1"))
    catalogue.gate = asyncio.Event()
    async with ProviderRegistry(
        service=catalogue.service, key=None, timeout_s=0.02, clock=clock
    ) as registry:
        with pytest.raises(RegistryError, match=r"no answer within 0.02 s"):
            await registry.endpoints(MODEL)
    catalogue.gate.set()


async def test_an_unknown_model_is_refused_with_suggestions_once_models_are_known(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say("/models", json_answer({"data": [model_row(MODEL), model_row("x/other")]}))
    async with registry:
        with pytest.raises(ModelNotListed) as plain:
            await registry.endpoints("moonshot/kimi-k2.5")
        assert "did you mean" not in str(plain.value)
        await registry.models()
        with pytest.raises(ModelNotListed, match=f"did you mean {MODEL}"):
            await registry.endpoints("moonshot/kimi-k2.5")
        with pytest.raises(ModelNotListed, match=f"did you mean {MODEL}"):
            await registry.endpoints(f"{MODEL}-0127")


async def test_a_model_that_went_away_is_not_served_from_memory(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(priced("0.1"), error_answer(404))
    async with registry:
        await registry.endpoints(MODEL)
        for refresh in (True, False):
            with pytest.raises(ModelNotListed):
                await registry.endpoints(MODEL, refresh=refresh)


@pytest.mark.parametrize(
    "model", ["", "kimi", "a/../../key", "a/b?x=1", "a/b#c", "a b/c", "a//b", "a/\ud800"]
)
async def test_what_is_no_model_id_never_reaches_the_wire(
    catalogue: FakeCatalogue, registry: ProviderRegistry, model: str
) -> None:
    async with registry:
        with pytest.raises(RegistryError, match="no model id"):
            await registry.endpoints(model)
    assert catalogue.requests == []


@pytest.mark.parametrize("model", [f"{MODEL}:free", f"{MODEL}-0127", "~moonshotai/kimi-latest"])
async def test_variants_and_dated_ids_are_asked_for_as_they_are(
    catalogue: FakeCatalogue, registry: ProviderRegistry, model: str
) -> None:
    catalogue.say_endpoints(json_answer(listing(model=model)), model=model)
    async with registry:
        found = await registry.endpoints(model)
    assert (found.model, len(found)) == (model, 0)
    assert catalogue.requests[0].path == f"/api/v1/models/{model}/endpoints"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (text_answer("<html>nothing here</html>", status=404), "404 with text/html"),
        (error_answer(400, "bad model"), "400, 'bad model'"),
        (
            lambda request: web.Response(status=302, headers={"Location": "https://login.test/x"}),
            "redirected to login.test",
        ),
        (
            lambda request: web.Response(status=307, headers={"Location": "http://[bad"}),
            "redirected to another place",
        ),
    ],
)
async def test_faults_that_stay_are_not_retried(
    catalogue: FakeCatalogue, registry: ProviderRegistry, answer: Answer, problem: str
) -> None:
    catalogue.say_endpoints(answer)
    async with registry:
        with pytest.raises(RegistryError, match=problem) as caught:
            await registry.endpoints(MODEL)
    assert not isinstance(caught.value, ModelNotListed)
    assert len(catalogue.requests) == 1


async def test_unseen_labels_and_bad_entries_are_warned_of_once(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(json_answer(listing(entry("a", quantization="mxfp6"), "junk")))
    async with registry:
        with capture_logs() as events:
            for _ in range(3):
                await registry.endpoints(MODEL, refresh=True)
    assert [event["event"] for event in events] == [
        "endpoint_left_out",
        "quantization_label_unseen",
    ]
    assert (events[1]["endpoint"], events[1]["label"]) == ("a", "mxfp6")


async def test_model_queries_become_the_documented_parameters(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say("/models", json_answer({"data": [model_row()]}))
    catalogue.say("/providers", json_answer(PROVIDERS))
    query = ModelQuery(
        q="kimi k2",
        supported_parameters=("seed", "top_p"),
        providers=("moonshotai", "HOSTA"),
        context_tokens=100_000,
        min_input_usd_per_million="0.10",
        max_output_usd_per_million=4,
        zdr=True,
        sort="pricing-low-to-high",
        other={"min_age_days": "3"},
    )
    async with registry:
        assert [model.id for model in await registry.models(query)] == [MODEL]
        assert await registry.models(query) is await registry.models(query)
    assert len(catalogue.requests) == 2
    assert dict(catalogue.requests[-1].query) == {
        "q": "kimi k2",
        "supported_parameters": "seed,top_p",
        "providers": "Moonshot AI,HostA",
        "context": "100000",
        "min_price": "0.10",
        "max_output_price": "4",
        "zdr": "true",
        "sort": "pricing-low-to-high",
        "min_age_days": "3",
    }


async def test_a_query_for_a_provider_nobody_knows_is_refused(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say("/providers", json_answer(PROVIDERS))
    async with registry:
        with pytest.raises(UnknownName, match="Moonshot AI"):
            await registry.models(ModelQuery(providers=("Moonshat AI",)))


async def test_the_key_goes_along_if_set_and_is_not_needed(
    catalogue: FakeCatalogue, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue.say("/providers", json_answer(PROVIDERS))
    monkeypatch.delenv("TEST_KEY", raising=False)
    async with ProviderRegistry(
        service=catalogue.service, key=EnvKey("TEST_KEY"), clock=clock
    ) as registry:
        await registry.providers()
        monkeypatch.setenv("TEST_KEY", KEY)
        await registry.providers(refresh=True)
    sent = [request.headers.get("Authorization") for request in catalogue.requests]
    assert sent == [None, f"Bearer {KEY}"]


async def test_a_key_that_is_refused_is_reported_and_left_out(
    catalogue: FakeCatalogue, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    catalogue.say("/providers", error_answer(401, f"bad {KEY}"), json_answer(PROVIDERS))
    async with ProviderRegistry(
        service=catalogue.service, key=EnvKey("TEST_KEY"), clock=clock
    ) as registry:
        with capture_logs() as events:
            assert len(await registry.providers()) == 2
    assert [event["event"] for event in events] == ["catalogue_key_refused"]
    assert KEY not in repr(events)
    assert "Authorization" not in catalogue.requests[1].headers


async def test_an_echoed_key_reaches_no_error_value_log_or_file(
    catalogue: FakeCatalogue, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain, and written with JSON escapes."""
    monkeypatch.setenv("TEST_KEY", KEY)
    escaped = "".join(f"\\u{ord(character):04x}" for character in KEY)
    text = json.dumps(listing(entry(name=f"HostA | {KEY}", echo="@@"))).replace("@@", escaped)
    assert KEY in json.dumps(json.loads(text)["data"]["endpoints"][0]["echo"])
    catalogue.say_endpoints(
        text_answer(text, content_type="application/json"), error_answer(500, f"no {KEY} here")
    )
    catalogue.say("/models", json_answer({"data": [model_row(name=KEY)]}))
    catalogue.say("/providers", json_answer(PROVIDERS))
    target = tmp_path / "catalogue.json"
    async with ProviderRegistry(
        service=catalogue.service, key=EnvKey("TEST_KEY"), max_stale_s=300.0, clock=clock
    ) as registry:
        with capture_logs() as events:
            found = await registry.endpoints(MODEL)
            await registry.snapshot(target, models=[MODEL])
            await registry.endpoints(MODEL, refresh=True)
            clock.advance(301.0)
            with pytest.raises(RegistryError) as caught:
                await registry.endpoints(MODEL)
    written = target.read_text()
    assert "[redacted]" in written
    for artefact in (written, repr(found), repr(events), str(caught.value), repr(registry)):
        assert KEY not in artefact
    assert KEY not in json.dumps(json.loads(written))


async def test_a_snapshot_gives_the_same_answers_without_a_service(
    catalogue: FakeCatalogue, registry: ProviderRegistry, tmp_path: Path
) -> None:
    entries = (entry(new_field={"kept": 1}), entry("twin"), entry("twin", quantization="fp9"))
    catalogue.say_endpoints(json_answer(listing(*entries)))
    catalogue.say_endpoints(json_answer(listing()), model="x/empty")
    rows = [model_row(), model_row("x/empty", pricing={"prompt": "0", "completion": "0"})]
    catalogue.say("/models", json_answer({"data": rows, "total_count": 2}))
    catalogue.say("/providers", json_answer(PROVIDERS))
    paths = (tmp_path / "one.json", tmp_path / "one.json.gz")
    async with registry:
        for path in paths:
            await registry.snapshot(path, models=[MODEL, "x/empty"])
        online = await registry.endpoints(MODEL)
    assert names(tmp_path) == ["one.json", "one.json.gz"]
    assert gzip.decompress(paths[1].read_bytes()) == paths[0].read_bytes()
    kept = json.loads(paths[0].read_text())["endpoints"][MODEL]["data"]["endpoints"][0]
    assert kept == entry(new_field={"kept": 1})
    for path in paths:
        offline = ProviderRegistry.from_snapshot(path)
        found = await offline.endpoints(MODEL)
        assert found.endpoints == online.endpoints
        assert found.fetched_at_s == online.fetched_at_s
        assert found.source == f"snapshot {path.name}"
        assert await offline.endpoints(MODEL, refresh=True) is found
        assert len(await offline.endpoints("x/empty")) == 0
        assert [m.id for m in await offline.models(ModelQuery(providers=("hosta",)))] == [MODEL]
        assert len(await offline.models()) == 2
        assert (await offline.providers()).slug_of("Moonshot AI") == "moonshotai"
        with pytest.raises(ModelNotListed, match=MODEL):
            await offline.endpoints("moonshot/kimi-k2.5")


async def test_a_snapshot_that_fails_leaves_the_old_file(
    catalogue: FakeCatalogue, registry: ProviderRegistry, tmp_path: Path
) -> None:
    catalogue.say("/models", json_answer({"data": []}))
    catalogue.say("/providers", json_answer(PROVIDERS))
    target = dump(tmp_path / "old.json", {"old": True})
    folder = tmp_path / "taken.json"
    folder.mkdir()
    async with registry:
        with pytest.raises(ModelNotListed):
            await registry.snapshot(target, models=["x/gone"])
        for nowhere in (target / "no-folder.json", folder):
            with pytest.raises(RegistryError, match="not written"):
                await registry.snapshot(nowhere, models=[])
    assert json.loads(target.read_text()) == {"old": True}
    assert names(tmp_path) == ["old.json", "taken.json"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"models": []}', b"\x1f\x8b broken", b"\xff"])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(raw)
    with pytest.raises(RegistryError, match=r"bad\.json"):
        ProviderRegistry.from_snapshot(path)
    with pytest.raises(RegistryError, match="cannot read"):
        ProviderRegistry.from_snapshot(tmp_path / "missing.json")


async def test_a_snapshot_of_endpoints_only_says_what_it_lacks(tmp_path: Path) -> None:
    content = {"captured_at": "2026-07-04T14:04:07+00:00", "endpoints": {MODEL: listing(entry())}}
    registry = ProviderRegistry.from_snapshot(dump(tmp_path / "part.json", content))
    assert (await registry.endpoints(MODEL)).fetched_at_s == 1783173847.0
    with pytest.raises(RegistryError, match="holds no models"):
        await registry.models()


async def test_a_part_of_a_snapshot_can_be_cut_out_offline(tmp_path: Path) -> None:
    """Lists without a `data` around them are read too, and numbers keep their digits."""
    odd = listing(entry(pricing={"prompt": 4.5e-7, "completion": "0.10", "discount": 0.05}))
    content = {
        "captured_at": "2026-07-04T14:04:07+00:00",
        "models": [model_row()],
        "providers": PROVIDERS["data"],
        "endpoints": {MODEL: odd, "x/other": listing()},
    }
    whole = ProviderRegistry.from_snapshot(dump(tmp_path / "whole.json", content))
    await whole.snapshot(tmp_path / "part.json", models=[MODEL])
    part = ProviderRegistry.from_snapshot(tmp_path / "part.json")
    found = await part.endpoints(MODEL)
    assert found.endpoints == (await whole.endpoints(MODEL)).endpoints
    assert found.fetched_at_s == 1783173847.0
    assert found.endpoints[0].pricing.input_usd_per_token == Decimal("0.00000045")
    with pytest.raises(ModelNotListed):
        await part.endpoints("x/other")


async def test_it_must_be_open_and_only_once(registry: ProviderRegistry) -> None:
    with pytest.raises(ConfigurationError, match="not open"):
        await registry.endpoints(MODEL)
    async with registry:
        with pytest.raises(ConfigurationError, match="already open"):
            await registry.__aenter__()
    with pytest.raises(ConfigurationError, match="closed"):
        await registry.providers()


async def test_what_was_read_outlives_closing(
    catalogue: FakeCatalogue, registry: ProviderRegistry
) -> None:
    catalogue.say_endpoints(priced("0.1"))
    async with registry:
        first = await registry.endpoints(MODEL)
    async with registry:
        assert await registry.endpoints(MODEL) is first
    assert len(catalogue.requests) == 1


def test_one_offline_registry_serves_two_loops(tmp_path: Path) -> None:
    content = {"captured_at": "2026-07-04T14:04:07Z", "endpoints": {MODEL: listing(entry())}}
    registry = ProviderRegistry.from_snapshot(dump(tmp_path / "part.json", content))
    first = asyncio.run(registry.endpoints(MODEL))
    assert asyncio.run(registry.endpoints(MODEL)) is first


@pytest.mark.parametrize("name", ["ttl_s", "max_stale_s", "timeout_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(name: str, seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ProviderRegistry(**{name: seconds})  # type: ignore[arg-type]


async def test_a_lifetime_of_zero_reads_every_time(
    catalogue: FakeCatalogue, clock: FakeClock
) -> None:
    catalogue.say_endpoints(priced("0.1"), priced("0.2"))
    async with ProviderRegistry(
        service=catalogue.service, key=None, ttl_s=0.0, clock=clock
    ) as registry:
        first, second = await registry.endpoints(MODEL), await registry.endpoints(MODEL)
    assert first.endpoints != second.endpoints


def test_working_from_a_snapshot_never_loads_aiohttp(tmp_path: Path) -> None:
    path = dump(tmp_path / "part.json", {"endpoints": {MODEL: listing(entry())}})
    script = (
        "import asyncio, sys\n"
        "from quantroute.registry import ProviderRegistry\n"
        f"found = asyncio.run(ProviderRegistry.from_snapshot({str(path)!r}).endpoints({MODEL!r}))\n"
        "assert len(found) == 1\n"
        "assert 'aiohttp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
