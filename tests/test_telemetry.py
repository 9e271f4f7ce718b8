"""Figures for other programs: true, well formed, and no harm to a run that nobody watches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from cli_support import MODEL, ROOT, SLOW_SCENARIO, start, write_prompts
from quantroute import Account, ChatRequest, Client, EnvKey, RetryPolicy, Service
from quantroute.client import Answered, SettledAttempt
from quantroute.domain import EndpointKey
from quantroute.generation import Progress, RowClass
from quantroute.ledger import BudgetLedger
from quantroute.routing import BreakerState, EndpointReport
from quantroute.simulator import Faults, Simulator, kimi_mission_scenario
from quantroute.telemetry import OpenTelemetryObserver, RunFigures, exposition, served_metrics

SAMPLE = re.compile(
    r'^quantroute_[a-z_]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)+\})? -?[0-9.]+$',
)
FAULTY = kimi_mission_scenario(faults=Faults(upstream_502=0.5))


@pytest.fixture
async def service(key: str) -> AsyncIterator[Simulator]:
    async with Simulator(FAULTY, seed=3) as simulator:
        assert simulator.api_key == key
        yield simulator


def client_of(simulator: Simulator, **settings: Any) -> Client:
    return Client(
        cap_usd="1.00",
        service=Service(base_url=simulator.base_url),
        key=EnvKey(),
        retry=RetryPolicy(base_s=0.001, cap_s=0.002),
        **settings,
    )


def question(number: int) -> ChatRequest:
    return ChatRequest(
        model=MODEL,
        messages=({"role": "user", "content": f"Number {number}?"},),
        max_output_tokens=500,
        account=Account("run/b3"),
        request_id=f"r{number}",
    )


# -- the observer ------------------------------------------------------------


async def test_the_observer_is_told_of_every_attempt_once(service: Simulator) -> None:
    told: list[SettledAttempt] = []
    async with client_of(service, observer=told.append) as client:
        done = await asyncio.gather(*(client.complete(question(number)) for number in range(12)))
        balance = client.ledger.balance()
        errors = client.error_counts()

    assert len(told) == balance.posted_entries + balance.voided_entries + balance.held_entries
    failed = [item for item in told if not item.is_answered]
    assert failed
    assert len(failed) == sum(errors.values())
    assert {item.status for item in failed} == {502}
    assert sum(item.charge_pusd or 0 for item in told) == balance.posted_pusd
    answers = [item.answer for item in told if item.is_answered]
    assert len(answers) == sum(isinstance(item, Answered) for item in done)
    assert all(item.elapsed_s >= 0 for item in told)


async def test_an_observer_that_fails_is_left_alone_and_the_run_goes_on(
    service: Simulator,
) -> None:
    calls: list[SettledAttempt] = []

    def fail(attempt: SettledAttempt) -> None:
        calls.append(attempt)
        raise RuntimeError("not my day")

    async with client_of(service, observer=fail) as client:
        for number in range(3):
            assert isinstance(await client.complete(question(number)), Answered)
    assert len(calls) == 1


# -- OpenTelemetry ------------------------------------------------------------


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from quantroute.errors import ConfigurationError

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"quantroute\[otel\]"):
        OpenTelemetryObserver()


async def test_spans_and_measurements_follow_the_conventions(service: Simulator) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, measured = InMemorySpanExporter(), InMemoryMetricReader()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    metering = MeterProvider(metric_readers=[measured])
    observer = OpenTelemetryObserver(tracer_provider=tracing, meter_provider=metering)
    async with client_of(service, observer=observer) as client:
        for number in range(6):
            await client.complete(question(number))
        balance = client.ledger.balance()

    finished = spans.get_finished_spans()
    assert len(finished) == balance.posted_entries + balance.voided_entries
    good = [span for span in finished if span.status.is_ok]
    bad = [span for span in finished if not span.status.is_ok]
    assert len(good) == 6
    assert bad
    assert {span.name for span in finished} == {f"chat {MODEL}"}
    assert {span.kind.name for span in finished} == {"CLIENT"}
    assert bad[0].attributes["error.type"] == "transient"
    assert bad[0].attributes["http.response.status_code"] == 502
    told = good[0].attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "openrouter"
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.request.max_tokens"] == 500
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["quantroute.account"] == "run/b3"
    assert sum(span.attributes["quantroute.charge_pusd"] for span in finished) == (
        balance.posted_pusd
    )
    assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in good) == (
        balance.output_tokens
    )
    assert not any("Number" in str(span.attributes) for span in finished)  # no prompts
    assert all(span.end_time >= span.start_time for span in finished)

    points = {
        metric.name: metric.data.data_points
        for resource in measured.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    tokens = {
        kind: sum(
            point.sum
            for point in points["gen_ai.client.token.usage"]
            if point.attributes["gen_ai.token.type"] == kind
        )
        for kind in ("input", "output")
    }
    assert tokens == {"input": balance.input_tokens, "output": balance.output_tokens}
    assert sum(p.count for p in points["gen_ai.client.operation.duration"]) == len(finished)
    assert sum(p.value for p in points["quantroute.client.charge"]) == balance.posted_pusd
    assert points["gen_ai.client.token.usage"][0].explicit_bounds[:3] == (1, 4, 16)
    metering.shutdown()
    tracing.shutdown()


# -- Prometheus ------------------------------------------------------------


def report(tag: str = "alpha/int4") -> EndpointReport:
    return EndpointReport(
        key=EndpointKey(MODEL, tag, 0),
        in_flight=3,
        limit=20,
        answered=7,
        faults=2,
        rate_limited=1,
        breaker=BreakerState.OPEN,
        paused_for_s=0.0,
        last_problem="",
    )


def progress() -> Progress:
    return Progress(
        finished=5,
        resumed=0,
        duplicates=0,
        refused=1,
        gave_up=0,
        live=4,
        answers=7,
        output_tokens=700,
        classes={RowClass.GOOD: 6, RowClass.TRUNCATED: 1},
        is_stopping=False,
    )


async def figures(name: str = "b3", tag: str = "alpha/int4") -> RunFigures:
    async with BudgetLedger.in_memory(cap="1.00") as ledger:
        await ledger.reserve(123_456_789, endpoint="e")
        return RunFigures(
            run=name,
            progress=progress(),
            balance=ledger.balance(),
            reports=[report(tag)],
            errors={"rate limited": 2},
        )


async def test_every_line_is_well_formed_and_declared() -> None:
    told = exposition(await figures())
    declared = set(re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", told, re.MULTILINE))
    lines = [line for line in told.splitlines() if not line.startswith("#")]
    assert told.endswith("\n")
    assert len(lines) > 25
    for line in lines:
        assert SAMPLE.match(line), line
        assert re.split(r"[{ ]", line)[0] in declared
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines})
    assert 'quantroute_endpoint_outcomes_total{endpoint="alpha/int4",outcome="fault"} 2' in lines
    assert 'quantroute_endpoint_breaker{endpoint="alpha/int4",state="open"} 1' in lines
    assert 'quantroute_attempt_errors_total{kind="rate limited"} 2' in lines
    assert "quantroute_pending_usd 0.000123456789" in lines
    assert "quantroute_rows_in_flight 4" in lines
    page = (ROOT / "docs/report.md").read_text()
    assert [name for name in sorted(declared) if f"`{name}`" not in page] == []


async def test_odd_names_are_quoted() -> None:
    told = exposition(await figures('a"b\\c\nd', "evil\n# TYPE x gauge\nx 1"))
    assert 'quantroute_info{run="a\\"b\\\\c\\nd"} 1' in told
    assert "\nx 1" not in told
    assert all(line.startswith(("# ", "quantroute_")) for line in told.splitlines())


async def test_it_is_served_to_this_machine_alone() -> None:
    told = await figures()
    async with served_metrics(lambda: told, port=0) as port, aiohttp.ClientSession() as web:
        url = f"http://127.0.0.1:{port}/metrics"
        async with web.get(url) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert await answer.text() == exposition(told)
        async with web.get(url, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403


def test_generate_serves_them_during_a_run(tmp_path: Any) -> None:
    import urllib.request

    (tmp_path / "slow.toml").write_text(SLOW_SCENARIO)
    process = start(
        "generate",
        write_prompts(tmp_path / "b3.jsonl", 400),
        *("--simulate", "--scenario", tmp_path / "slow.toml", "--cap", "1.00"),
        *("--out", tmp_path / "run", "--max-in-flight", 4, "--metrics-port", 0),
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "metrics at" in line)
        with urllib.request.urlopen(line.split("metrics at ")[1].strip(), timeout=10) as answer:
            told = answer.read().decode()
    finally:
        process.kill()
        process.communicate()
    assert 'quantroute_info{run="run"} 1' in told
    assert "quantroute_cap_usd 1" in told
