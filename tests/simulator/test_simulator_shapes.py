"""Every odd shape, whole and streamed, and what it costs."""

from __future__ import annotations

import asyncio
import email.utils

import aiohttp
import pytest

from quantroute.simulator import AnswerSpec, Faults
from quantroute.simulator import _faults as names
from quantroute.testing import FakeClock


@pytest.fixture
def faulty(open_service, small, endpoint):
    """Opens a one-endpoint service with one fault always on."""

    async def open_faulty(*faults: str, settings=None, **how):
        spec = Faults(**dict.fromkeys(faults, 1.0), **how)
        return await open_service(small(endpoint("a"), faults=spec, **(settings or {})))

    return open_faulty


def only_record(service):
    (record,) = service.bill.records.values()
    return record


def test_every_fault_has_a_group_and_a_field():
    """No probability exists that nothing draws, and no group names a fault without one."""
    grouped = {name for group in names._GROUPS for name in group} | set(names.EXTRAS)
    assert grouped | {"retry_after", "retry_after_s", "hang_s"} == set(Faults.model_fields)


# -- before status 200 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("platform_429", 429),
        ("edge_408", 408),
        ("edge_500", 500),
        ("edge_524", 524),
        ("html_429", 429),
        ("html_502", 502),
        ("key_401", 401),
        ("moderation_403", 403),
        ("region_403", 403),
        ("upstream_400", 400),
        ("upstream_429", 429),
        ("upstream_500", 500),
        ("upstream_502", 502),
        ("upstream_503", 503),
        ("upstream_504", 504),
        ("upstream_529", 529),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_cost_nothing(faulty, fault, status, stream):
    service = await faulty(fault)
    got = await service.chat(stream=stream)
    assert got.status == status
    assert service.bill.requests == 0
    assert service.stats.by_status == {status: 1}
    if fault.startswith("html") or fault == "edge_524":
        assert got.headers["Content-Type"].startswith("text/html")
        assert got.raw.startswith(b"<!DOCTYPE html>")
    else:
        assert got.json["error"]["code"] == status
    if fault.startswith("upstream") and status != 500:
        assert got.json["error"]["metadata"]["provider_name"] == "A"
        assert got.json["error"]["message"] == "Provider returned error"
    if fault == "upstream_500":
        assert "metadata" not in got.json["error"]


async def test_platform_429_carries_rate_limit_headers_and_answers_do_not(faulty):
    got = await (await faulty("platform_429")).chat()
    assert got.headers["X-RateLimit-Remaining"] == "0"
    assert "provider_name" not in got.json["error"]["metadata"]
    assert "X-RateLimit-Limit" not in (await (await faulty()).chat()).headers


@pytest.mark.parametrize("fault", ["platform_429", "upstream_429", "upstream_503"])
@pytest.mark.parametrize("form", ["none", "seconds", "date"])
async def test_retry_after_forms(faulty, fault, form):
    service = await faulty(fault, retry_after=form, retry_after_s=120)
    header = (await service.chat()).headers.get("Retry-After")
    if form == "none":
        assert header is None
    elif form == "seconds":
        assert header == "120"
    else:
        assert header.endswith("GMT")
        until = email.utils.parsedate_to_datetime(header).timestamp()
        assert 118 < until - service.simulator.state.clock.time_s() <= 121


async def test_mixed_retry_after_shows_every_form(faulty):
    service = await faulty("upstream_429", retry_after="mixed", retry_after_s=3)
    seen = set()
    for number in range(30):
        header = (await service.chat(f"p{number}")).headers.get("Retry-After", "")
        seen.add("date" if "GMT" in header else header)
    assert seen == {"", "3", "date"}


async def test_retry_after_needs_a_hint_from_every_provider(open_service, small, endpoint):
    scenario = small(
        endpoint("a"),
        endpoint("b"),
        provider_faults={
            "a": Faults(upstream_429=1.0),
            "b": Faults(upstream_429=1.0, retry_after="seconds"),
        },
    )
    service = await open_service(scenario)
    assert "Retry-After" not in (await service.chat(provider={"order": ["a", "b"]})).headers
    assert "Retry-After" in (await service.chat(provider={"only": ["b"]})).headers


async def test_a_provider_table_replaces_only_what_it_sets(open_service, small, endpoint):
    scenario = small(
        endpoint("a"),
        endpoint("b"),
        faults=Faults(upstream_429=1.0, retry_after="seconds"),
        provider_faults={"b": Faults(upstream_429=0.0)},
    )
    service = await open_service(scenario)
    assert await service.names(1, only=["a"]) == ["429"]
    assert await service.names(1, only=["b"]) == ["B"]


# -- whole answers ---------------------------------------------------------------------------------


async def test_padding_before_the_body(faulty):
    got = await (await faulty("padding")).chat()
    assert got.raw.startswith(b"\n   ")
    assert got.json["choices"]


async def test_padding_while_the_model_works(faulty):
    """Status 200 and blanks come at once; the body when the answer is there."""
    service = await faulty("padding", settings={"time_scale": 0.1})
    url = service.simulator.base_url + "/chat/completions"
    async with service.session.post(url, json=service.body()) as response:
        first = await response.content.readany()
        assert not first.strip()
        assert response.headers["X-Generation-Id"]
        assert service.bill.requests == 0
        assert b'"usage"' in await response.content.read()
    assert service.bill.requests == 1


@pytest.mark.parametrize(
    ("fault", "code"), [("error_in_200", 502), ("error_word_code", "server_error")]
)
@pytest.mark.parametrize("padding", [(), ("padding",)])
async def test_error_in_a_200_body_is_insured(faulty, fault, code, padding):
    service = await faulty(fault, *padding)
    got = await service.chat()
    assert got.status == 200
    assert got.json["error"]["code"] == code
    assert "choices" not in got.json
    assert service.bill.total_usd == 0
    assert only_record(service).finish_reason == "error"


@pytest.mark.parametrize("fault", ["choices_null", "choices_empty", "choices_missing"])
async def test_missing_choices(faulty, fault):
    service = await faulty(fault)
    body = (await service.chat()).json
    expected = {"choices_null": None, "choices_empty": [], "choices_missing": "absent"}[fault]
    assert body.get("choices", "absent") == expected
    assert "usage" not in body
    assert service.bill.total_usd == 0


@pytest.mark.parametrize(
    ("fault", "is_billed"),
    [("error_in_choice", False), ("error_mid_stream", False), ("error_mid_stream_billed", True)],
)
async def test_error_in_the_choice(faulty, fault, is_billed):
    service = await faulty(fault)
    (choice,) = (await service.chat()).json["choices"]
    assert choice["finish_reason"] == "error"
    assert choice["error"]["code"] == 502
    assert choice["message"]["content"] or choice["message"]["reasoning"]
    assert bool(service.bill.total_usd) is is_billed


async def test_finish_reason_can_be_absent(faulty):
    (choice,) = (await (await faulty("finish_missing")).chat()).json["choices"]
    assert "finish_reason" not in choice


@pytest.mark.parametrize(
    ("fault", "finish", "content", "has_reasoning", "costs"),
    [
        ("empty_stop", "stop", "", False, False),
        ("insured_empty", None, "", False, False),
        ("content_null", "stop", None, True, True),
        ("reasoning_only", "length", "", True, True),
    ],
)
async def test_empty_answers(faulty, fault, finish, content, has_reasoning, costs):
    service = await faulty(fault)
    body = (await service.chat()).json
    (choice,) = body["choices"]
    assert choice["finish_reason"] == finish
    assert choice["message"]["content"] == content
    assert bool(choice["message"]["reasoning"]) is has_reasoning
    assert bool(service.bill.total_usd) is costs
    assert bool(body["usage"]["completion_tokens"]) is costs
    assert bool(body["usage"]["cost"]) is costs
    if fault == "empty_stop":
        assert body["usage"]["total_tokens"] == 0


async def test_unfinished_thoughts_leak_into_content(faulty):
    (choice,) = (await (await faulty("reasoning_in_content")).chat()).json["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert choice["message"]["reasoning"] is None


async def test_length_cuts_and_bills_what_is_there(faulty):
    service = await faulty("length", settings={"answers": AnswerSpec(mean_tokens=100)})
    body = (await service.chat(reasoning={"enabled": False})).json
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == len(choice["message"]["content"]) / 4


@pytest.mark.parametrize("fault", names.USAGE_BODY)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_bodies_never_change_the_bill(faulty, fault, stream):
    service = await faulty(fault)
    got = await service.chat(stream=stream)
    usage = (got.events[-2] if stream else got.json)["usage"]
    match fault:
        case "usage_null":
            assert usage is None
        case "usage_empty":
            assert usage == {}
        case "usage_details_null":
            assert usage["completion_tokens_details"] is None
        case "usage_floats":
            assert isinstance(usage["prompt_tokens"], float)
        case "usage_strings":
            assert isinstance(usage["completion_tokens"], str)
        case "cost_missing":
            assert "cost" not in usage
        case "cost_zero":
            assert usage["cost"] == 0
            assert usage["is_byok"] is False
    assert only_record(service).cost_usd > 0


async def test_usage_can_be_absent(faulty):
    service = await faulty("usage_missing")
    assert "usage" not in (await service.chat()).json
    assert only_record(service).cost_usd > 0


@pytest.mark.parametrize("fault", ["", *names.REASONING])
async def test_where_reasoning_stands(faulty, fault):
    message = (await (await faulty(*filter(None, [fault]))).chat()).json["choices"][0]["message"]
    details = [entry["text"] for entry in message.get("reasoning_details", [])]
    match fault:
        case "":
            assert [message["reasoning"]] == details
        case "reasoning_plain":
            assert message["reasoning"]
            assert not details
        case "reasoning_details_only":
            assert message["reasoning"] is None
            assert details
        case "reasoning_content":
            assert message["reasoning_content"]
            assert "reasoning" not in message


async def test_reasoning_tokens_can_exceed_completion_tokens(faulty):
    service = await faulty("reasoning_overcount")
    usage = (await service.chat()).json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] + 1


async def test_wrong_provider_is_billed_at_its_own_price(open_service, small, endpoint):
    scenario = small(
        endpoint("a", "0", "1"), endpoint("b", "0", "8"), faults=Faults(wrong_provider=1.0)
    )
    service = await open_service(scenario)
    body = (await service.chat(provider={"only": ["a"], "allow_fallbacks": False})).json
    assert body["provider"] == "B"
    assert only_record(service).tag == "b"
    assert body["usage"]["cost"] == pytest.approx(body["usage"]["completion_tokens"] * 8e-6)


async def test_wrong_model_and_missing_provider(faulty):
    assert (await (await faulty("wrong_model")).chat()).json["model"].startswith("impostor/")
    assert (await (await faulty("provider_missing")).chat()).json["provider"] is None


async def test_the_model_is_dated(faulty):
    assert (await (await faulty()).chat()).json["model"] == "moonshotai/kimi-k2.5-0127"


async def test_key_is_echoed_in_answers_and_errors(faulty):
    service = await faulty("key_echo")
    key = service.simulator.api_key
    assert key in (await service.chat()).json["choices"][0]["message"]["content"]
    stream = await service.chat(stream=True)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in stream.events[:-2])
    assert key in text
    broken = await faulty("key_echo_in_errors", "upstream_502")
    assert key in (await broken.chat()).json["error"]["message"]
    quiet = await faulty("upstream_502")
    assert key.encode() not in (await quiet.chat()).raw


# -- cut, silent and reset connections -------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["cut_content_length", "cut_chunked", "truncated_stream", "reset"]
)
async def test_a_cut_whole_body_is_billed_in_full(faulty, fault):
    service = await faulty(fault)
    with pytest.raises(aiohttp.ClientError):
        await service.chat()
    assert only_record(service).cost_usd > 0
    assert only_record(service).is_cancelled is False


@pytest.mark.parametrize("fault", ["cut_content_length", "cut_chunked", "reset"])
async def test_a_cut_stream_is_billed_in_full(faulty, fault):
    service = await faulty(fault)
    with pytest.raises(aiohttp.ClientError):
        await service.chat(stream=True)
    assert only_record(service).cost_usd > 0


@pytest.mark.parametrize("fault", ["hang", "stall"])
@pytest.mark.parametrize("stream", [False, True])
async def test_silence_lasts_until_the_client_leaves(faulty, fault, stream):
    service = await faulty(fault)

    async def ask():
        timeout = aiohttp.ClientTimeout(total=0.05)
        url = service.simulator.base_url + "/chat/completions"
        body = service.body(stream=stream)
        async with service.session.post(url, json=body, timeout=timeout) as response:
            assert fault == "stall"
            await response.read()

    with pytest.raises(asyncio.TimeoutError):
        await ask()
    assert only_record(service).cost_usd > 0
    await service.idle()


async def test_silence_ends_by_itself(faulty):
    service = await faulty("hang", hang_s=0.02)
    with pytest.raises(aiohttp.ClientError):
        await service.chat()


# -- streams ---------------------------------------------------------------------------------------


def text_of(events, key="content"):
    return "".join(
        e["choices"][0]["delta"].get(key) or ""
        for e in events
        if e != "[DONE]" and e.get("choices")
    )


async def test_a_plain_stream(faulty):
    service = await faulty()
    got = await service.chat(stream=True)
    *chunks, finish, usage, done = got.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["cost"] == float(only_record(service).cost_usd)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert chunks[0]["provider"] == "A"
    assert chunks[0]["model"] == "moonshotai/kimi-k2.5-0127"
    assert {c["id"] for c in chunks} == {got.headers["X-Generation-Id"]}
    assert got.headers["Content-Type"] == "text/event-stream"
    thoughts = text_of(chunks, "reasoning")
    details = "".join(
        d["text"] for c in chunks for d in c["choices"][0]["delta"].get("reasoning_details", [])
    )
    assert thoughts == details != ""
    tokens = (len(thoughts) + len(text_of(chunks))) / 4
    assert tokens == usage["usage"]["completion_tokens"]


async def test_streamed_and_whole_answers_are_the_same(open_service, small, endpoint):
    """One seed, one prompt: only the form differs."""
    found = []
    for stream in (False, True):
        service = await open_service(small(endpoint("a")), seed=5)
        got = await service.chat(stream=stream)
        if stream:
            found.append((text_of(got.events), text_of(got.events, "reasoning")))
        else:
            message = got.json["choices"][0]["message"]
            found.append((message["content"], message["reasoning"]))
    assert found[0] == found[1]


async def test_comments_between_events(faulty):
    got = await (await faulty("comments")).chat(stream=True)
    assert got.raw.startswith(b": OPENROUTER PROCESSING\n\n")
    assert got.raw.count(b": OPENROUTER PROCESSING") >= 3
    assert got.events[-1] == "[DONE]"


@pytest.mark.parametrize("fault", names.USAGE_PLACE)
async def test_where_usage_stands(faulty, fault):
    service = await faulty(fault)
    events = (await service.chat(stream=True)).events
    with_usage = [e for e in events if e != "[DONE]" and "usage" in e]
    record = only_record(service)
    match fault:
        case "usage_missing":
            assert not with_usage
        case "usage_with_empty_delta":
            assert with_usage[0]["choices"][0]["finish_reason"] is None
        case "usage_with_finish":
            assert with_usage[0]["choices"][0]["finish_reason"] == "stop"
        case "usage_twice":
            first, last = (e["usage"] for e in with_usage)
            assert first["completion_tokens"] < last["completion_tokens"]
            assert first["cost"] < last["cost"] == float(record.cost_usd)
        case "usage_before_text":
            assert "usage" in events[0]
    assert record.cost_usd > 0


@pytest.mark.parametrize("fault", ["error_in_200", "error_word_code"])
async def test_error_as_the_first_event(faulty, fault):
    service = await faulty(fault)
    got = await service.chat(stream=True)
    assert got.status == 200
    assert got.events[0]["error"]["code"] in (502, "server_error")
    assert got.events[0]["choices"] == []
    assert service.bill.total_usd == 0


@pytest.mark.parametrize(
    "fault", ["error_mid_stream", "error_in_choice", "error_mid_stream_billed"]
)
async def test_error_after_some_text(faulty, fault):
    service = await faulty(fault)
    events = (await service.chat(stream=True)).events
    error = next(e for e in events if "error" in e)
    assert text_of(events) or text_of(events, "reasoning")
    record = only_record(service)
    if fault == "error_mid_stream_billed":
        assert error["usage"]["cost"] == float(record.cost_usd) > 0
        assert error["usage"]["completion_tokens"] == record.usage.output_tokens
    else:
        assert record.cost_usd == 0
        assert events[-1] is error
    if fault == "error_in_choice":
        assert error["choices"][0]["finish_reason"] == "error"


@pytest.mark.parametrize("fault", ["choices_null", "choices_empty", "choices_missing"])
async def test_streams_without_choices(faulty, fault):
    events = (await (await faulty(fault)).chat(stream=True)).events
    assert not events[0].get("choices")
    assert "error" not in events[0]


@pytest.mark.parametrize(
    ("fault", "has_finish", "has_done"),
    [
        ("finish_missing", False, True),
        ("done_missing", True, False),
        ("truncated_stream", False, False),
    ],
)
async def test_streams_that_end_oddly(faulty, fault, has_finish, has_done):
    service = await faulty(fault)
    events = (await service.chat(stream=True)).events
    finishes = [
        e for e in events if e != "[DONE]" and e["choices"] and e["choices"][0]["finish_reason"]
    ]
    assert bool(finishes) is has_finish
    assert (events[-1] == "[DONE]") is has_done
    assert only_record(service).cost_usd > 0


# -- clients that leave ----------------------------------------------------------------------------


async def leave(service, **fields):
    """Start a request, leave after the first chunk (or the headers' time), wait for the bill."""
    url = service.simulator.base_url + "/chat/completions"
    response = None
    try:
        async with asyncio.timeout(0.1):
            response = await service.session.post(url, json=service.body(**fields))
            await response.content.readany()
    except TimeoutError:
        pass
    if response is not None:
        response.close()
    await service.idle()
    return only_record(service)


SLOW = {
    "time_scale": 0.02,
    "answers": AnswerSpec(mean_tokens=1000, sigma=0.0, chunk_tokens=20),
}


async def test_leaving_a_stream_stops_the_bill_where_the_provider_can(
    open_service, small, endpoint
):
    service = await open_service(small(endpoint("fireworks", "0", "2.5"), **SLOW))
    record = await leave(service, max_tokens=1000, stream=True)
    assert record.is_cancelled
    assert 0 < record.usage.output_tokens < 1000
    assert record.cost_usd == record.usage.output_tokens * 25 * record.cost_usd.__class__("1e-7")
    assert service.stats.disconnects == 1


async def test_leaving_a_stream_is_billed_in_full_where_it_cannot(open_service, small, endpoint):
    service = await open_service(small(endpoint("siliconflow"), **SLOW))
    record = await leave(service, max_tokens=1000, stream=True)
    assert not record.is_cancelled
    assert record.usage.output_tokens == 1000


async def test_leaving_a_whole_answer_is_billed_in_full(open_service, small, endpoint):
    service = await open_service(small(endpoint("fireworks"), **SLOW))
    record = await leave(service, max_tokens=1000)
    assert not record.is_cancelled
    assert record.usage.output_tokens == 1000


async def test_leaving_before_the_first_token_costs_nothing(open_service, small, endpoint):
    """No completion token and no finish reason: insured."""
    scenario = small(endpoint("fireworks", "5", "5"), time_scale=0.5)
    service = await open_service(scenario)
    record = await leave(service, stream=True)
    assert record.usage.output_tokens == 0
    assert record.cost_usd == 0


async def test_a_fake_clock_drives_latencies(open_service, small, endpoint):
    """An hour of model time passes in no time."""
    clock = FakeClock(autojump=True)
    scenario = small(endpoint("a"), time_scale=3600.0)
    service = await open_service(scenario, clock=clock)
    assert (await service.chat(stream=True)).events[-1] == "[DONE]"
    assert clock.now_s() > 100
