"""The client against a simulated service over real HTTP: answers, odd shapes, money, limits."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest

from client_support import MODEL, fast, opened, until
from quantroute import (
    NO_CAP,
    AccountError,
    BudgetExceeded,
    ChatRequest,
    Client,
    ConfigurationError,
    NoEligibleEndpoint,
    Sampling,
    Service,
)
from quantroute.client import Answered, GaveUp, RowRefused, Timeouts
from quantroute.errors import (
    CreditsExhausted,
    KeyRejected,
    ProviderDown,
    RequestRefused,
    UnknownName,
)
from quantroute.ledger import ROOT
from quantroute.money import to_pusd
from quantroute.simulator import (
    AccountSpec,
    EndpointChange,
    Faults,
    Simulator,
    TrafficSpec,
    kimi_mission_scenario,
)

pytestmark = pytest.mark.usefixtures("key")

#: Odd shapes after which the answer is still an answer.
STILL_ANSWERS = [
    "padding", "comments", "usage_missing", "usage_with_empty_delta", "usage_with_finish",
    "usage_twice", "usage_null", "usage_empty", "usage_details_null", "usage_floats",
    "usage_strings", "cost_missing", "cost_zero", "reasoning_plain", "reasoning_details_only",
    "reasoning_content", "byok", "cost_noise", "reasoning_overcount", "done_missing", "length",
    "reasoning_only", "reasoning_in_content", "wrong_provider", "wrong_model", "provider_missing",
    "key_echo", "content_null", "think_tags", "reasoning_although_off", "loop", "content_filter",
]  # fmt: skip
#: Odd shapes that call for another attempt.
TRANSIENT = [
    "platform_429", "html_429", "html_502", "edge_408", "edge_524", "edge_500", "upstream_429",
    "upstream_500", "upstream_502", "upstream_503", "upstream_504", "upstream_529", "error_in_200",
    "error_word_code", "error_mid_stream", "error_mid_stream_billed", "error_in_choice",
    "choices_null", "choices_empty", "choices_missing", "truncated_stream", "cut_content_length",
    "cut_chunked", "reset", "empty_stop", "insured_empty",
]  # fmt: skip
REFUSING = ["moderation_403", "region_403", "upstream_400"]


def request(text: str = "Hi", **changes: Any) -> ChatRequest:
    settings = {"model": MODEL, "max_output_tokens": 400, "request_id": text} | changes
    return ChatRequest(messages=({"role": "user", "content": text},), **settings)


async def assert_books_agree(client: Client, simulator: Simulator) -> None:
    """Before reconciliation the ledger is at least the bill; afterwards they are equal."""
    balance = client.ledger.balance()
    assert balance.posted_pusd + balance.pending_pusd >= simulator.bill.total_pusd
    done = await client.reconcile(quiet_s=0.0, patience_s=2.0)
    assert done.still_held == 0
    assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
    assert client.ledger.balance().pending_pusd == 0
    assert done.key_difference_pusd == 0
    await client.ledger.verify()


class TestAnswers:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_answer_with_its_provenance(self, stream: bool) -> None:
        async with opened() as (client, simulator):
            answer = await client.chat(MODEL, "Why is the sky blue?", stream=stream)
            assert answer.content
            assert answer.reasoning
            assert answer.finish_reason == "stop"
            assert answer.cost_pusd == simulator.bill.total_pusd > 0
            source = answer.provenance
            assert source.endpoint.quantization.value == "int4"
            assert source.served_provider == source.endpoint.provider_name
            assert source.served_model == f"{MODEL}-0127"
            assert source.generation_id in simulator.bill.records
            assert answer.flags == ()

    async def test_an_answer_as_plain_values_goes_through_json(self) -> None:
        async with opened() as (client, simulator):
            answer = await client.chat(MODEL, "Why?", max_output_tokens=400)
        plain = json.loads(json.dumps(answer.as_dict()))
        assert plain == answer.as_dict()
        assert answer.usage is not None
        assert plain["content"] == answer.content
        assert plain["usage"]["output_tokens"] == answer.usage.output_tokens
        assert to_pusd(Decimal(plain["cost_usd"])) == answer.cost_pusd == simulator.bill.total_pusd
        source = answer.provenance
        assert plain["provenance"]["endpoint"] == source.endpoint.tag
        assert plain["provenance"]["precision"] == source.precision.as_dict()
        assert plain["provenance"]["output_usd_per_token"] == str(
            source.endpoint.pricing.output_usd_per_token
        )

    async def test_requests_are_pinned_and_bounded(self) -> None:
        """Only eligible endpoints are even asked, one per attempt."""
        async with opened() as (client, simulator):
            bound = await client.verdicts(MODEL)
            allowed = {endpoint.tag for endpoint in bound.eligible}
            await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(200)))
            assert set(simulator.stats.attempts_by_tag) <= allowed
            assert not {"fireworks", "baseten/fp4"} & set(simulator.stats.attempts_by_tag)

    async def test_the_cheapest_eligible_endpoint_serves(self) -> None:
        async with opened() as (client, _):
            bound = await client.verdicts(MODEL)
            cheapest = min(
                bound.eligible,
                key=lambda endpoint: endpoint.pricing.output_usd_per_token or 0,
            )
            answer = await client.chat(MODEL, "x")
            assert answer.provenance.endpoint.tag == cheapest.tag

    async def test_sampling_that_an_endpoint_would_drop_excludes_it(self) -> None:
        async with opened() as (client, _):
            plain = await client.verdicts(MODEL)
            hot = await client.verdicts(MODEL, sampling=Sampling(temperature=0.6))
            dropped = {endpoint.tag for endpoint in plain.eligible} - {
                endpoint.tag for endpoint in hot.eligible
            }
            assert "moonshotai/int4" in dropped

    async def test_a_prompt_that_fits_nowhere_is_refused_without_being_sent(self) -> None:
        async with opened() as (client, simulator):
            completion = await client.complete(request("x" * 300_000))
            assert isinstance(completion, RowRefused)
            assert "fits no eligible endpoint" in completion.problem
            assert simulator.stats.requests == 0
            with pytest.raises(RequestRefused, match="shorten"):
                await client.chat(MODEL, "x" * 300_000)


class TestOddShapes:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("fault", STILL_ANSWERS)
    async def test_odd_answers_are_answers_and_the_books_agree(
        self, fault: str, stream: bool
    ) -> None:
        scenario = kimi_mission_scenario(faults=Faults(**{fault: 1.0}))
        async with opened(scenario) as (client, simulator):
            await client.note_baseline()
            completions = [await client.complete(request(f"p{n}", is_streamed=stream))
                           for n in range(3)]  # fmt: skip
            assert all(isinstance(item, Answered) for item in completions), completions
            await assert_books_agree(client, simulator)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("fault", TRANSIENT)
    async def test_transient_faults_are_retried_and_the_books_agree(
        self, fault: str, stream: bool
    ) -> None:
        scenario = kimi_mission_scenario(
            faults=Faults(**{fault: 0.4}, retry_after="mixed", retry_after_s=0.01)
        )
        async with opened(scenario, cap_usd="50") as (client, simulator):
            await client.note_baseline()
            completions = await asyncio.gather(
                *(client.complete(request(f"p{n}", is_streamed=stream)) for n in range(12))
            )
            kinds = Counter(type(item) for item in completions)
            assert kinds[Answered] >= 11, completions
            assert simulator.stats.requests >= 12
            await assert_books_agree(client, simulator)

    @pytest.mark.parametrize("fault", REFUSING)
    async def test_refused_rows_are_not_retried(self, fault: str) -> None:
        scenario = kimi_mission_scenario(faults=Faults(**{fault: 1.0}))
        async with opened(scenario) as (client, simulator):
            completion = await client.complete(request())
            assert isinstance(completion, RowRefused)
            assert simulator.stats.requests == 1
            assert client.ledger.balance().pending_pusd == 0

    async def test_answers_from_elsewhere_are_flagged(self) -> None:
        scenario = kimi_mission_scenario(faults=Faults(wrong_provider=1.0))
        async with opened(scenario) as (client, _):
            completion = await client.complete(request())
            assert isinstance(completion, Answered)
            assert "served_mismatch" in completion.answer.flags

    async def test_the_key_is_cut_out_of_whatever_echoes_it(self, key: str) -> None:
        scenario = kimi_mission_scenario(
            faults=Faults(key_echo=1.0, key_echo_in_errors=1.0, upstream_500=0.5)
        )
        async with opened(scenario) as (client, _):
            completions = [await client.complete(request(f"p{n}")) for n in range(6)]
            assert key not in repr(completions)
            assert any(
                "secret_redacted" in item.answer.flags
                for item in completions
                if isinstance(item, Answered)
            )
            lines = client.ledger.store.read(
                lambda c: c.execute("SELECT * FROM journal").fetchall()
            )
            assert key not in repr(lines)

    async def test_attempts_are_bounded_when_nothing_ever_works(self) -> None:
        scenario = kimi_mission_scenario(faults=Faults(upstream_503=1.0))
        async with opened(scenario) as (client, simulator):
            completion = await client.complete(request())
            assert isinstance(completion, GaveUp)
            assert completion.attempts == simulator.stats.requests == 8
            assert client.ledger.balance().pending_pusd == 0
            with pytest.raises(ProviderDown):
                await client.chat(MODEL, "x")

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_mixture_of_everything(self, stream: bool) -> None:
        mixture = dict.fromkeys(
            ["upstream_429", "upstream_503", "error_in_200", "choices_null", "truncated_stream",
             "cut_content_length", "usage_missing", "cost_missing", "padding", "comments",
             "reasoning_details_only", "html_502", "platform_429", "reset"], 0.04
        )  # fmt: skip
        scenario = kimi_mission_scenario(
            faults=Faults(**mixture), generation_misses=1, time_scale=0.001
        )
        async with opened(scenario, cap_usd="100") as (client, simulator):
            await client.note_baseline()
            completions = await asyncio.gather(
                *(client.complete(request(f"p{n}", is_streamed=stream)) for n in range(150))
            )
            assert sum(isinstance(item, Answered) for item in completions) >= 148
            await assert_books_agree(client, simulator)


class TestMoney:
    async def test_two_thousand_rows_at_once_never_pass_the_cap_and_use_it(self) -> None:
        cap = "0.20"
        async with opened(kimi_mission_scenario(time_scale=0.01), cap_usd=cap) as (client, sim):
            results = await asyncio.gather(
                *(client.complete(request(f"p{n}", max_output_tokens=2000)) for n in range(2000)),
                return_exceptions=True,
            )
            answered = sum(isinstance(item, Answered) for item in results)
            assert answered > 0
            assert all(isinstance(item, Answered | BudgetExceeded) for item in results)
            assert sim.bill.total_pusd == client.ledger.balance().posted_pusd <= 2 * 10**11
            # What is left is less than one worst case of the dearest endpoint in use.
            assert client.ledger.balance().posted_pusd > 2 * 10**11 - 10**10

    async def test_a_cap_of_zero_sends_nothing(self) -> None:
        async with opened(cap_usd=0) as (client, simulator):
            with pytest.raises(BudgetExceeded):
                await client.chat(MODEL, "x")
            assert simulator.stats.requests == 0

    def test_a_cap_must_be_given(self) -> None:
        with pytest.raises(ConfigurationError, match="NO_CAP"):
            Client()
        assert "not" not in repr(Client(cap_usd=NO_CAP)).split()

    async def test_running_out_of_credits_stops_everything_at_once(self) -> None:
        scenario = kimi_mission_scenario(account=AccountSpec(credits_usd="0.05"), time_scale=0.01)
        async with opened(scenario, max_in_flight=50) as (client, simulator):
            results = await asyncio.gather(
                *(client.complete(request(f"p{n}")) for n in range(1000)), return_exceptions=True
            )
            stopped = [item for item in results if isinstance(item, CreditsExhausted)]
            assert stopped
            assert all(isinstance(item, Answered | CreditsExhausted) for item in results)
            assert simulator.stats.requests < 1000  # those who waited were not sent
            assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd
            # After a top-up the same client goes on.
            simulator.change(add_credits_usd="5")
            assert (await client.chat(MODEL, "again")).content

    async def test_a_rejected_key_stops_with_advice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with opened() as (client, _):
            monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-wrongwrongwrongwrong")
            with pytest.raises(KeyRejected, match="OPENROUTER_API_KEY"):
                await client.chat(MODEL, "x")
            monkeypatch.delenv("OPENROUTER_API_KEY")
            with pytest.raises(KeyRejected, match="not set"):
                await client.chat(MODEL, "x")
            assert client.ledger.balance().pending_pusd == 0

    async def test_rows_refused_alike_stop_the_run(self) -> None:
        scenario = kimi_mission_scenario(faults=Faults(region_403=1.0))
        async with opened(scenario) as (client, simulator):
            for n in range(24):
                await client.complete(request(f"p{n}"))
            with pytest.raises(AccountError, match="in a row"):
                await client.complete(request("last"))
            assert simulator.stats.requests == 25

    async def test_cancelling_holds_the_reservation_until_the_bill_is_known(self) -> None:
        scenario = kimi_mission_scenario(time_scale=0.05)
        async with opened(scenario) as (client, simulator):
            await client.note_baseline()
            tasks = [asyncio.ensure_future(client.complete(request(f"p{n}"))) for n in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks)
            for _ in range(200):
                if simulator.stats.in_flight == 0:
                    break
                await asyncio.sleep(0.02)
            await assert_books_agree(client, simulator)

    async def test_a_sink_commits_with_the_charge(self) -> None:
        async with opened() as (client, _):
            await client.ledger.store.submit(
                lambda c: c.execute("CREATE TABLE rows (entry TEXT, text TEXT)") and None
            )

            def sink(answer: Any, entry_id: str) -> Any:
                return lambda c: c.execute(
                    "INSERT INTO rows VALUES (?, ?)", (entry_id, answer.content)
                )

            completion = await client.complete(request(), sink=sink)
            assert isinstance(completion, Answered)
            rows = client.ledger.store.read(lambda c: c.execute("SELECT * FROM rows").fetchall())
            assert rows == [(completion.entry_id, completion.answer.content)]

    async def test_a_failing_sink_does_not_lose_the_money(self) -> None:
        async with opened() as (client, simulator):

            def sink(answer: Any, entry_id: str) -> Any:
                raise RuntimeError("a bug in the sink")

            with pytest.raises(RuntimeError):
                await client.complete(request(), sink=sink)
            assert client.ledger.balance().posted_pusd == simulator.bill.total_pusd > 0


class TestRouting:
    async def test_an_endpoint_that_is_down_is_left_alone_and_others_serve(self) -> None:
        scenario = kimi_mission_scenario(provider_faults={"inceptron": Faults(upstream_503=1.0)})
        async with opened(scenario, max_in_flight=8) as (client, simulator):
            completions = await asyncio.gather(
                *(client.complete(request(f"p{n}")) for n in range(200))
            )
            assert all(isinstance(item, Answered) for item in completions)
            assert simulator.stats.attempts_by_tag["inceptron/int4"] < 60

    async def test_a_rate_limited_endpoint_spills_to_the_next(self) -> None:
        scenario = kimi_mission_scenario(
            provider_traffic={"inceptron": TrafficSpec(max_concurrent=5)}, time_scale=0.01
        )
        async with opened(scenario, max_in_flight=60) as (client, simulator):
            completions = await asyncio.gather(
                *(client.complete(request(f"p{n}")) for n in range(300))
            )
            assert all(isinstance(item, Answered) for item in completions)
            served = Counter(item.answer.provenance.endpoint.tag for item in completions)
            assert len(served) > 1
            assert simulator.stats.peak_in_flight <= 60

    async def test_a_relabelled_endpoint_is_resolved_anew(self) -> None:
        """The pinned tag vanishes during the run: one 404, a fresh listing, no lost row."""
        async with opened() as (client, simulator):
            first = await client.chat(MODEL, "a")
            tag = first.provenance.endpoint.tag
            simulator.change(
                endpoints=(EndpointChange(tag=tag, new_tag="inceptron/fp4", quantization="fp4"),)
            )
            second = await client.chat(MODEL, "b")
            assert second.provenance.endpoint.tag != tag
            assert "fp4" not in second.provenance.endpoint.tag

    async def test_a_price_rise_is_never_paid_unawares(self) -> None:
        """`max_price` makes the service refuse the dearer endpoint; the next listing knows."""
        async with opened() as (client, simulator):
            first = await client.chat(MODEL, "a")
            tag = first.provenance.endpoint.tag
            simulator.change(
                endpoints=(
                    EndpointChange(
                        tag=tag, pricing={"prompt": "0.0000009", "completion": "0.000009"}
                    ),
                )
            )
            second = await client.chat(MODEL, "b")
            assert second.provenance.endpoint.tag != tag
            assert "overrun" not in second.flags

    async def test_names_in_any_spelling_exclude_and_unknown_ones_are_refused(self) -> None:
        async with opened(exclude=["Fireworks", "Moonshot AI", "SILICONFLOW"]) as (client, _):
            bound = await client.verdicts(MODEL)
            left = {endpoint.provider_slug for endpoint in bound.eligible}
            assert not {"fireworks", "moonshotai", "siliconflow"} & left
        async with opened(exclude=["Firewarks"]) as (client, _):
            with pytest.raises(UnknownName, match="Fireworks"):
                await client.chat(MODEL, "x")

    async def test_no_eligible_endpoint_lists_the_reasons(self) -> None:
        async with opened(only=["BaseTen"]) as (client, _):
            with pytest.raises(NoEligibleEndpoint) as caught:
                await client.chat(MODEL, "x")
            assert len(caught.value.reasons) == 11


class TestTimeouts:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_silent_server_is_cut_off_and_the_row_goes_elsewhere(
        self, stream: bool
    ) -> None:
        scenario = kimi_mission_scenario(
            provider_faults={"inceptron": Faults(hang=1.0, hang_s=5.0)}
        )
        limits = Timeouts(first_byte_s=0.1, idle_s=0.1, total_s=3.0)
        async with opened(scenario, timeouts=limits) as (client, _):
            completion = await client.complete(request(is_streamed=stream))
            assert isinstance(completion, Answered)
            assert completion.attempts > 1
            assert client.ledger.balance().held_pusd > 0

    async def test_a_service_that_is_not_there_costs_nothing(self) -> None:
        async with opened(max_in_flight=1) as (client, simulator):
            await client.verdicts(MODEL)
            await simulator.close()
            completion = await client.complete(request())
            assert isinstance(completion, GaveUp)
            assert client.ledger.balance().pending_pusd == 0
            assert client.ledger.balance().voided_entries == completion.attempts


class TestLoops:
    @pytest.mark.parametrize("rows", [15, pytest.param(50, marks=pytest.mark.slow)])
    def test_successive_loops_and_no_leaked_descriptors(self, rows: int) -> None:
        """One client object on twenty loops, with hundreds of requests in all."""

        async def session(client: Client) -> None:
            async with client:
                await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(rows)))

        async def main() -> None:
            simulator = Simulator(kimi_mission_scenario())
            async with simulator:
                client = Client(service=Service(base_url=simulator.base_url), **fast())
                await asyncio.to_thread(asyncio.run, session(client))
                gc.collect()
                await asyncio.sleep(0.05)
                before = len(os.listdir("/proc/self/fd"))
                for _ in range(19):
                    await asyncio.to_thread(asyncio.run, session(client))
                gc.collect()
                await asyncio.sleep(0.05)
                assert len(os.listdir("/proc/self/fd")) <= before + 2

        asyncio.run(main())

    async def test_use_on_another_loop_is_a_clear_error(self) -> None:
        async with opened() as (client, _):
            with pytest.raises(ConfigurationError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, client.complete(request()))

    async def test_states(self) -> None:
        client = Client(cap_usd="1")
        with pytest.raises(ConfigurationError, match="async with"):
            await client.chat(MODEL, "x")
        async with opened() as (client, _):
            with pytest.raises(ConfigurationError, match="open already"):
                await client.__aenter__()
            await client.aclose()
            await client.aclose()
            with pytest.raises(ConfigurationError, match="closed"):
                await client.chat(MODEL, "x")

    @pytest.mark.parametrize("requests", [3, 40])
    async def test_closing_it_under_its_requests_ends_them_with_the_reason(
        self, requests: int
    ) -> None:
        """On the wire or still waiting, and without opening connections behind the closing."""
        slow = kimi_mission_scenario(time_scale=0.1)
        async with opened(slow, max_in_flight=5) as (client, simulator):
            asked = [asyncio.create_task(client.complete(request(str(n)))) for n in range(requests)]
            await until(lambda: simulator.stats.in_flight)
            await client.aclose()
            ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} == {ConfigurationError}
        assert "closed while the request was under way" in str(ends[0])

    def test_a_dropped_open_client_warns(self) -> None:
        async def drop() -> None:
            """Opened, never closed; what it holds is closed by hand, so that only it is noticed."""
            client = Client(cap_usd="1")
            await client.__aenter__()
            await client.ledger.aclose()
            await client._sessions.close()
            await client.registry.aclose()

        with pytest.warns(ResourceWarning, match="unclosed Client"):
            asyncio.run(drop())

    def test_repr_names_the_variable_and_not_the_key(self, key: str) -> None:
        assert key not in repr(Client(cap_usd="1"))
        assert "OPENROUTER_API_KEY" in repr(Client(cap_usd="1"))

    async def test_balance_of_everything_is_the_root(self) -> None:
        async with opened() as (client, _):
            await client.chat(MODEL, "x")
            assert client.ledger.balance(ROOT).posted_entries == 1


class TestService:
    @pytest.mark.parametrize(
        "url",
        ["ftp://x/api", "https://user:pw@host/api/v1", "https://host/api/v1?key=s", "nonsense"],
    )
    def test_urls_that_could_leak_or_cannot_work_are_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            Service(base_url=url)
        assert "pw" not in str(caught.value)

    def test_loopback_never_goes_through_a_proxy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "http://user:pass@proxy:3128")
        assert "via HTTPS_PROXY" in Service().route()
        assert "directly" in Service(base_url="http://127.0.0.1:1/api/v1").route()
        assert "pass" not in Service().route()


@pytest.mark.parametrize("name", ["key", "service", "policy"])
def test_text_in_place_of_an_object_is_refused_and_not_repeated(name: str) -> None:
    """Whoever gives the key itself must not find it in a log."""
    with pytest.raises(ConfigurationError, match=f"{name} takes ") as caught:
        Client(cap_usd="1", **{name: "sk-or-v1-secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": None}, "messages must be text, or a list of messages, not NoneType"),
        ({"messages": b"x"}, "messages must be text, or a list of messages, not bytes"),
        ({"messages": {"role": "user", "content": "x"}}, "list of messages, not dict"),
        ({"messages": "x", "sampling": {"temperature": 1}}, "sampling takes Sampling"),
    ],
)
async def test_what_a_notebook_easily_gives_is_refused_in_words(
    given: dict[str, Any], problem: str
) -> None:
    async with opened() as (client, _):
        with pytest.raises(ConfigurationError, match=problem):
            await client.chat(MODEL, **given)


def test_a_client_whose_loop_has_ended_says_so() -> None:
    """As with one `asyncio.run` to open it and another to use it."""

    async def use() -> None:
        with pytest.raises(ConfigurationError, match="has ended; open and use it within one"):
            await client.chat(MODEL, "Hello")
        await client.aclose()

    client = Client(cap_usd="1")
    asyncio.run(client.__aenter__())
    asyncio.run(use())
