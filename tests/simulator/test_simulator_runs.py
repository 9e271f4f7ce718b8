"""Scenarios, seeds, events, rate limits, threads and load."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from decimal import Decimal

import aiohttp
import pytest

from quantroute.errors import ConfigurationError
from quantroute.simulator import (
    AnswerSpec,
    EchoBackend,
    Event,
    Faults,
    Scenario,
    Simulator,
    ThreadedSimulator,
    TrafficSpec,
    kimi_mission_scenario,
    load_scenario,
    serve,
)
from quantroute.testing import FakeClock

ODD = Faults(
    upstream_429=0.2,
    error_in_200=0.1,
    choices_null=0.1,
    length=0.1,
    reasoning_only=0.1,
    usage_null=0.1,
    padding=0.3,
    byok=0.2,
    wrong_provider=0.1,
)


async def outcomes(service, count=60):
    """Everything a run shows, apart from ids and times, by prompt."""

    async def one(number):
        got = await service.chat(f"p{number % 20}", provider={"allow_fallbacks": False})
        body = json.loads(got.raw)
        for key in ("id", "created"):
            body.pop(key, None)
        return number, got.status, json.dumps(body, sort_keys=True)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_same_seed_same_run_whatever_the_order(open_service):
    """Sixty concurrent requests, three per prompt: the bills and answers of two runs agree."""
    runs = []
    for _ in range(2):
        service = await open_service(kimi_mission_scenario(faults=ODD), seed=3)
        found = sorted(entry[1:] for entry in await outcomes(service))
        runs.append((found, service.bill.total_usd, service.stats.by_status))
    assert runs[0] == runs[1]


async def test_another_seed_is_another_run(open_service):
    totals = set()
    for seed in (1, 2):
        service = await open_service(kimi_mission_scenario(faults=ODD), seed=seed)
        await outcomes(service, 20)
        totals.add(service.bill.total_usd)
    assert len(totals) == 2


async def test_samples_of_one_prompt_differ_unless_seeded(service):
    plain = [await service.chat(provider={"only": ["novita"]}) for _ in range(3)]
    seeded = [await service.chat(seed=7, provider={"only": ["novita"]}) for _ in range(3)]
    dropped = [await service.chat(seed=7, provider={"only": ["siliconflow"]}) for _ in range(2)]

    def texts(answers):
        return {json.dumps(got.json["choices"]) for got in answers}

    assert len(texts(plain)) == 3
    assert len(texts(seeded)) == 1
    assert len(texts(dropped)) == 2  # SiliconFlow lists no seed: dropped without a word


async def test_lengths_follow_the_distribution(open_service, small, endpoint):
    scenario = small(endpoint("a"), answers=AnswerSpec(mean_tokens=200, sigma=0.6))
    service = await open_service(scenario)
    for number in range(300):
        await service.chat(f"p{number}", max_tokens=100_000)
    lengths = [record.usage.output_tokens for record in service.bill.records.values()]
    assert 175 < sum(lengths) / len(lengths) < 225
    assert min(lengths) < 100
    assert max(lengths) > 400


async def test_thinking_is_honoured(open_service, small, endpoint):
    scenario = small(endpoint("a"), answers=AnswerSpec(mean_tokens=300, reasoning_share=0.5))
    service = await open_service(scenario)

    async def thoughts(**fields):
        body = (await service.chat(max_tokens=2000, **fields)).json
        message = body["choices"][0]["message"]
        count = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        return bool(message["reasoning"]), count

    assert (await thoughts())[1] > 0
    for off in ({"enabled": False}, {"effort": "none"}):
        assert await thoughts(reasoning=off) == (False, 0)
    assert (await thoughts(reasoning={"max_tokens": 5}))[1] <= 5
    assert 0 < (await thoughts(reasoning={"effort": "minimal"}, temperature=1))[1] <= 200
    shown, billed = await thoughts(reasoning={"exclude": True})
    assert not shown
    assert billed > 0


async def test_mandatory_thinking_cannot_be_switched_off(open_service, small, endpoint):
    scenario = small(endpoint("a"))
    model = scenario.models[0].model_copy(update={"reasoning": {"mandatory": True}})
    service = await open_service(scenario.merged(models=(model,)))
    got = await service.chat(reasoning={"enabled": False})
    assert got.status == 400
    assert got.json["error"]["message"].startswith("Reasoning is mandatory")


@pytest.mark.parametrize("limit", [1, 7, 30])
@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_is_never_exceeded(open_service, small, endpoint, limit, stream):
    service = await open_service(small(endpoint("a"), answers=AnswerSpec(mean_tokens=60, sigma=0)))
    got = await service.chat(max_tokens=limit, stream=stream)
    body = got.events[-2] if stream else got.json
    assert body["usage"]["completion_tokens"] == limit
    choices = (got.events[-3] if stream else body)["choices"]
    assert choices[0]["finish_reason"] == "length"


async def test_without_max_tokens_the_providers_default_cuts(open_service, small, endpoint):
    scenario = small(
        endpoint("a", default_output_tokens=16), answers=AnswerSpec(mean_tokens=500, sigma=0.1)
    )
    got = await (await open_service(scenario)).chat(max_tokens=None)
    assert got.json["usage"]["completion_tokens"] == 16
    assert got.json["choices"][0]["finish_reason"] == "length"


async def test_stop_strings_cut_the_answer(open_service, small, endpoint):
    service = await open_service(small(endpoint("a")), backend=EchoBackend())
    body = (await service.chat("one two STOP three", stop=["STOP"])).json
    assert body["choices"][0]["message"]["content"] == "[0] one two "
    assert body["usage"]["completion_tokens"] == 3


async def test_an_echo_is_cut_at_the_limit(open_service, small, endpoint):
    service = await open_service(small(endpoint("a")), backend=EchoBackend())
    body = (await service.chat("word " * 20, max_tokens=3)).json
    assert body["choices"][0]["message"]["content"] == "[0] word wor"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_another_backend_answers(open_service, small, endpoint):
    service = await open_service(small(endpoint("a")), backend=EchoBackend())
    got = await service.chat("wörld \U0001f30d", stream=True)
    text = "".join(e["choices"][0]["delta"]["content"] for e in got.events[:-2])
    assert text == "[0] wörld \U0001f30d"


# -- rate limits and time --------------------------------------------------------------------------


async def test_concurrency_limit_of_a_provider(open_service, small, endpoint):
    scenario = small(
        endpoint("a"),
        provider_traffic={"a": TrafficSpec(max_concurrent=3, first_token_sigma=0.0)},
        time_scale=0.05,
    )
    service = await open_service(scenario)
    got = await asyncio.gather(*(service.chat(f"p{n}") for n in range(8)))
    assert sorted(g.status for g in got) == [200] * 3 + [429] * 5
    assert (await service.chat("later")).status == 200


async def test_rate_limit_of_a_provider_refills(open_service, small, endpoint):
    clock = FakeClock()
    scenario = small(endpoint("a"), provider_traffic={"a": TrafficSpec(requests_per_s=4.0)})
    service = await open_service(scenario, clock=clock)
    clock.advance(10)
    first = [(await service.chat(f"p{n}")).status for n in range(6)]
    clock.advance(0.5)
    second = [(await service.chat(f"q{n}")).status for n in range(3)]
    assert first == [200] * 4 + [429] * 2
    assert second == [200, 200, 429]


async def test_platform_rate_limit(open_service, small, endpoint):
    clock = FakeClock()
    service = await open_service(small(endpoint("a"), platform_requests_per_s=2.0), clock=clock)
    clock.advance(10)
    statuses = [(await service.chat(f"p{n}")).status for n in range(3)]
    assert statuses == [200, 200, 429]


async def test_latency_is_scaled(open_service, small, endpoint):
    scenario = small(
        endpoint("a"),
        traffic=TrafficSpec(first_token_s=2.0, first_token_sigma=0.0, tokens_per_s=10.0),
        answers=AnswerSpec(mean_tokens=10, sigma=0.0),
        time_scale=0.01,
    )
    service = await open_service(scenario)
    started_s = time.monotonic()
    await service.chat()
    assert 0.03 <= time.monotonic() - started_s < 0.5


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
async def test_very_many_wait_at_once(open_service, small, endpoint, count):
    scenario = small(endpoint("a"), traffic=TrafficSpec(first_token_s=2.0, first_token_sigma=0.0))
    service = await open_service(scenario.merged(time_scale=0.3))
    got = await asyncio.gather(*(service.chat(f"p{n}") for n in range(count)))
    assert {g.status for g in got} == {200}
    assert service.stats.peak_in_flight > count / 2
    assert service.stats.in_flight == 0
    assert service.bill.requests == count


# -- changes while it runs -------------------------------------------------------------------------


async def test_events_by_number_of_requests(open_service, small, endpoint):
    change = {"endpoints": [{"tag": "a/int4", "pricing": {"completion": "0.000009"}}]}
    scenario = small(
        endpoint("a/int4", "0", "1"),
        events=(Event.model_validate({"after_requests": 2, "change": change}),),
    )
    service = await open_service(scenario)

    async def listed():
        rows = (await service.get("/models/moonshotai/kimi-k2.5/endpoints")).json["data"]
        return rows["endpoints"][0]["pricing"]["completion"]

    await service.chat("1")
    assert await listed() == "1e-6"
    await service.chat("2")
    assert await listed() == "0.000009"
    usage = (await service.chat("3")).json["usage"]
    assert usage["cost"] == pytest.approx(usage["completion_tokens"] * 9e-6)
    model = (await service.get("/models")).json["data"][0]
    assert model["pricing"]["completion"] == "0.000009"


async def test_events_by_time(open_service, small, endpoint):
    clock = FakeClock()
    change = {"endpoints": [{"tag": "a", "is_out": True}]}
    scenario = small(endpoint("a"), events=(Event.model_validate({"at_s": 60, "change": change}),))
    service = await open_service(scenario, clock=clock)
    assert (await service.chat("1")).status == 200
    clock.advance(61)
    assert (await service.chat("2")).status == 502


async def test_a_relabelled_tag_starts_giving_404(service):
    only = {"only": ["parasail/int4"]}
    assert (await service.chat(provider=only)).status == 200
    got = await service.post(
        "/__sim/set",
        {"endpoints": [{"tag": "parasail/int4", "new_tag": "parasail/fp4", "quantization": "fp4"}]},
    )
    assert got.status == 200
    assert (await service.chat(provider=only)).status == 404
    assert (await service.chat(provider={"only": ["parasail/fp4"]})).status == 200
    rows = (await service.get("/models/moonshotai/kimi-k2.5/endpoints")).json["data"]["endpoints"]
    assert {"parasail/fp4": "fp4"}.items() <= {r["tag"]: r["quantization"] for r in rows}.items()


async def test_set_changes_everything_it_names(service):
    added = {
        "tag": "newcomer/fp8",
        "quantization": "fp8",
        "pricing": {"prompt": "0.0000001", "completion": "0.0000001"},
    }
    body = {
        "credits_usd": "0.5",
        "endpoints": [
            {"tag": "baseten/fp4", "uptime_last_30m": 90.0},
            {"tag": "chutes/int4", "removed": True},
        ],
        "add": [{"model": "moonshotai/kimi-k2.5", "endpoint": added}],
        "faults": {"padding": 1.0},
        "provider_faults": {"novita": {"upstream_502": 1.0}},
        "generation_misses": 1,
        "answers": {"mean_tokens": 5},
        "traffic": {"tokens_per_s": 1},
        "time_scale": 0.0,
        "generation_delay_s": 0.0,
        "reserve_in_flight": True,
        "add_credits_usd": "0.25",
    }
    assert (await service.post("/__sim/set", body)).status == 200
    rows = (await service.get("/models/moonshotai/kimi-k2.5/endpoints")).json["data"]["endpoints"]
    statuses = {row["tag"]: row["status"] for row in rows}
    assert statuses["baseten/fp4"] == -2
    assert "chutes/int4" not in statuses
    assert "newcomer/fp8" in statuses
    slugs = {row["slug"] for row in (await service.get("/providers")).json["data"]}
    assert "newcomer" in slugs
    assert await service.names(1, only=["novita"]) == ["502"]
    got = await service.chat(provider={"only": ["newcomer"]})
    assert got.raw.startswith(b"\n ")
    assert service.simulator.state.account.credits_usd == Decimal("0.75")


@pytest.mark.parametrize(
    "body",
    [
        {"credit": "1"},
        {"credits_usd": 1.5},
        {"faults": {"padding": 2}},
        {"endpoints": [{"tag": "nobody"}]},
        {"endpoints": [{"tag": "venice", "model": "no/such", "is_out": True}]},
        {"add": [{"model": "no/such", "endpoint": {"tag": "a", "pricing": {}}}]},
    ],
)
async def test_set_refuses_what_it_does_not_know(service, body):
    got = await service.post("/__sim/set", body)
    assert got.status == 422
    assert (
        next(iter(body)).split("_")[0] in got.json["error"]["message"] or "no" in got.raw.decode()
    )
    with pytest.raises(ConfigurationError):
        service.simulator.change(**body)


async def test_unknown_control_path(service):
    assert (await service.get("/__sim/nothing")).status == 404
    assert (await service.get("/__sim/set")).status == 404


# -- scenario files --------------------------------------------------------------------------------


def test_a_scenario_file_is_read(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        """
time_scale = 0.5
[faults]
padding = 0.25
[[models]]
id = "a/b"
[[models.endpoints]]
tag = "x/int4"
quantization = "int4"
pricing = { prompt = "0.000001", completion = "0.000002", discount = 0.1 }
[[events]]
after_requests = 10
change = { endpoints = [{ tag = "x/int4", is_out = true }] }
"""
    )
    scenario = load_scenario(path)
    assert scenario.faults.padding == 0.25
    assert scenario.models[0].endpoints[0].slug == "x"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("time_scale = = 1", r"line 1"),
        ("name = 'x'\nmodels = ]", r"line 2"),
        ("\ntime_scal = 1", r"line 2: time_scal: Extra inputs"),
        ("[faults]\npadding = 1.5", r"line 2: faults\.padding"),
        ("[faults]\npaddding = 1", r"line 2: faults\.paddding"),
        ("[faults]\nupstream_502 = 0.6\nupstream_503 = 0.6", r"line 1: faults: .*sum to 1\.2"),
        ("[account]\ncredits_usd = 1.5", r"line 2: account\.credits_usd: .*quotes"),
        ('[[models]]\nname = "x"', r"models\.0\.id"),
        ("[[events]]\nchange = {}", r"exactly one of at_s"),
        (
            '[[models]]\nid = "a/b"\n[[models.endpoints]]\ntag = "x"\n'
            "pricing = { prompt = 0.1, completion = '1' }",
            r"pricing\.prompt: write the price in quotes",
        ),
        ('catalogue = "nowhere.json"', r"nowhere\.json"),
    ],
)
def test_a_wrong_scenario_says_where(tmp_path, text, problem):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        load_scenario(path)


def test_a_missing_scenario(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")


def test_a_scenario_can_name_a_catalogue_beside_it(tmp_path):
    (tmp_path / "cat.json").write_text(
        json.dumps({"models": [{"id": "a/b"}], "providers": [], "endpoints": {}})
    )
    path = tmp_path / "s.toml"
    path.write_text('catalogue = "cat.json"')
    recorded = load_scenario(path).recorded
    assert recorded is not None
    assert recorded.models[0]["id"] == "a/b"


def test_the_shipped_scenario_takes_settings():
    scenario = kimi_mission_scenario(time_scale=1.0)
    assert scenario.time_scale == 1.0
    assert len(scenario.models[0].endpoints) == 11
    assert isinstance(scenario, Scenario)


# -- running it ------------------------------------------------------------------------------------


def test_a_thread_serves_code_without_a_loop():
    with ThreadedSimulator(seed=1) as simulator:
        request = urllib.request.Request(
            simulator.base_url + "/chat/completions",
            data=json.dumps(
                {
                    "model": "moonshotai/kimi-k2.5",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 20,
                }
            ).encode(),
            headers={"Authorization": f"Bearer {simulator.api_key}"},
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            assert json.load(response)["usage"]["cost"] == float(simulator.bill.total_usd)
        simulator.change(credits_usd="0")
        with pytest.raises(urllib.error.HTTPError, match="402") as refused:
            urllib.request.urlopen(request, timeout=5)
        refused.value.close()
        assert simulator.stats.requests == 2
        port = int(simulator.root_url.rsplit(":", 1)[1])
        with pytest.raises(ConfigurationError, match=f"port {port}"):
            ThreadedSimulator(port=port).start()
    simulator.close()


async def test_a_taken_port_is_a_clear_error(service):
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await Simulator(port=service.simulator.port).start()


async def test_a_simulator_starts_once():
    simulator = Simulator()
    async with simulator:
        with pytest.raises(ConfigurationError):
            await simulator.start()
    await simulator.close()


async def test_serve_tells_its_address_and_ends_with_its_task():
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(on_ready=ready.set_result))
    async with aiohttp.ClientSession() as session, session.get(await ready + "/models") as got:
        assert got.status == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_with_requests_in_flight_is_quick(open_service, small, endpoint):
    service = await open_service(small(endpoint("a"), time_scale=100.0))
    waiting = asyncio.ensure_future(service.chat())
    await service.wait_for(lambda: service.stats.in_flight == 1)
    started_s = time.monotonic()
    await service.simulator.close()
    assert time.monotonic() - started_s < 2
    with pytest.raises(aiohttp.ClientError):
        await waiting
    assert service.stats.in_flight == 0
    assert service.simulator.state.gates["a"].in_flight == 0


async def test_a_client_that_leaves_while_sending(service):
    """Half a body and goodbye: nothing is billed and the service goes on."""
    _, writer = await asyncio.open_connection("127.0.0.1", service.simulator.port)
    writer.write(
        b"POST /api/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Bearer " + service.simulator.api_key.encode() + b"\r\n"
        b"Content-Length: 1000\r\n\r\n{"
    )
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    await writer.wait_closed()
    await service.idle()
    assert service.bill.requests == 0
    assert (await service.chat()).status == 200
