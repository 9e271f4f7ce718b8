"""Bytes to replies to outcomes to settlements: every odd shape the service is known to send."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.client._classify import Kind, classify
from quantroute.client._reply import BodyDecoder, Reply, StreamDecoder
from quantroute.client._settlement import Hold, Post, Void, settle
from quantroute.ledger import Basis
from quantroute.pricing import Pricing, TokenUsage
from quantroute.secrets import Redactor

KEY = "sk-or-v1-0123456789abcdef0123456789abcdef"
REDACTOR = Redactor((KEY,))
PRICING = Pricing.flat(input_usd_per_token="0.0000006", output_usd_per_token="0.0000022")
FREE = Pricing.flat(input_usd_per_token="0", output_usd_per_token="0")
WHEN = datetime(2026, 9, 1, tzinfo=UTC)
USAGE = {"prompt_tokens": 100, "completion_tokens": 202, "cost": 0.0005044}


def body(raw: bytes | dict[str, Any], status: int = 200, *, is_cut: bool = False) -> Reply:
    decoder = BodyDecoder(status, REDACTOR)
    decoder.feed(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    return decoder.finish(is_cut=is_cut)


def stream(*chunks: dict[str, Any] | str, status: int = 200) -> Reply:
    decoder = StreamDecoder(status, REDACTOR)
    for chunk in chunks:
        text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
        decoder.feed(text.encode())
    return decoder.finish(is_cut=False)


def answer(content: str | None = "Hi", **more: Any) -> dict[str, Any]:
    return {
        "id": "gen-1-abc",
        "model": "m/x-0127",
        "provider": "Prov",
        "choices": [
            {
                "index": 0,
                "finish_reason": more.pop("finish_reason", "stop"),
                "message": {"role": "assistant", "content": content} | more.pop("message", {}),
            }
        ],
        "usage": USAGE,
    } | more


def delta(content: str = "", *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "gen-1-abc", "choices": [choice]} | more


DONE = "data: [DONE]\n\n"
COMMENT = ": OPENROUTER PROCESSING\n\n"


class TestReplies:
    def test_padding_before_the_body_is_not_the_answer(self) -> None:
        decoder = BodyDecoder(200, REDACTOR)
        assert not decoder.feed(b"\n         \n\n      ")
        assert not decoder.feed(b"\n")
        assert decoder.feed(b"  " + json.dumps(answer()).encode())
        reply = decoder.finish(is_cut=False)
        assert (reply.content, reply.generation_id, reply.provider) == ("Hi", "gen-1-abc", "Prov")

    def test_streamed_and_whole_answers_are_the_same_reply(self) -> None:
        whole = body(answer("Hello", message={"reasoning": " so"}))
        parts = stream(
            COMMENT,
            {
                "id": "gen-1-abc",
                "model": "m/x-0127",
                "provider": "Prov",
                "choices": [{"delta": {"role": "assistant", "content": "", "reasoning": " so"}}],
            },
            delta("Hel"),
            COMMENT,
            delta("lo", finish="stop"),
            {"id": "gen-1-abc", "choices": [], "usage": USAGE},
            DONE,
        )
        assert parts == whole

    @pytest.mark.parametrize(
        "message",
        [
            {"reasoning": "abc"},
            {"reasoning_content": "abc"},
            {"reasoning_details": [{"type": "reasoning.text", "text": "abc", "index": 0}]},
            {"reasoning": "abc", "reasoning_details": [{"type": "reasoning.text", "text": "abc"}]},
            {"reasoning": "abc", "reasoning_content": "abc"},
            {"reasoning": None, "reasoning_content": "abc", "reasoning_details": []},
        ],
    )
    def test_reasoning_is_read_once_under_any_alias(self, message: dict[str, Any]) -> None:
        assert body(answer(message=message)).reasoning == "abc"
        chunk = {"choices": [{"delta": message, "finish_reason": "stop"}]}
        assert stream(chunk, DONE).reasoning == "abc"

    @pytest.mark.parametrize(
        "usage_chunks",
        [
            [delta("", usage=USAGE)],
            [delta("", finish="stop", usage=USAGE)],
            [{"choices": [], "usage": USAGE}],
            [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "cost": 1e-6}},
             {"choices": [], "usage": USAGE}],
        ],
    )  # fmt: skip
    def test_usage_chunk_in_every_shape_last_one_counts(self, usage_chunks: list[Any]) -> None:
        reply = stream(delta("x"), delta("", finish="stop"), *usage_chunks, DONE)
        assert reply.cost_usd == Decimal("0.0005044")
        assert reply.usage == TokenUsage(input_tokens=100, output_tokens=202)

    @pytest.mark.parametrize(
        ("usage", "expected"),
        [
            (None, None),
            ({}, None),
            ({"prompt_tokens": 1}, None),
            ({"prompt_tokens": "12", "completion_tokens": 3.0}, (12, 3, None)),
            ({"prompt_tokens": -1, "completion_tokens": 3}, None),
            ({"prompt_tokens": 1, "completion_tokens": "many"}, None),
            (
                {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": None},
                (1, 2, None),
            ),
            (
                {
                    "prompt_tokens": 1,
                    "completion_tokens": 10,
                    "completion_tokens_details": {"reasoning_tokens": 11},
                },
                (1, 10, 11),
            ),
        ],
    )
    def test_usage_counts_are_read_tolerantly_and_never_guessed(
        self, usage: Any, expected: tuple[int, int, int | None] | None
    ) -> None:
        found = body(answer(usage=usage)).usage
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert (found.input_tokens, found.output_tokens, found.reasoning_tokens) == expected

    def test_nan_cost_is_not_said(self) -> None:
        raw = json.dumps(answer()).replace("0.0005044", "NaN").encode()
        assert body(raw).cost_usd is None

    def test_upstream_cost_counts_only_for_byok(self) -> None:
        details = {"cost_details": {"upstream_inference_cost": 0.0005044}}
        assert body(answer(usage=USAGE | details)).cost_usd == Decimal("0.0005044")
        byok = USAGE | {"cost": 0, "is_byok": True} | details
        assert body(answer(usage=byok)).cost_usd == Decimal("0.0005044")

    def test_glued_events_are_taken_apart(self) -> None:
        glued = f"data: {json.dumps(delta('a'))}\ndata: {json.dumps(delta('b', finish='stop'))}\n\n"
        reply = stream(glued, DONE)
        assert (reply.content, reply.flags) == ("ab", ())

    def test_a_malformed_event_is_told_of_and_not_fatal(self) -> None:
        reply = stream(delta("a"), "data: {broken\n\n", delta("b", finish="stop"), DONE)
        assert (reply.content, reply.flags) == ("ab", ("malformed_event",))

    def test_keep_alives_inside_data_are_ignored(self) -> None:
        reply = stream("data: : KEEPALIVE\n\n", delta("a", finish="stop"), DONE)
        assert (reply.content, reply.flags) == ("a", ())

    def test_key_is_cut_out_of_answers_even_across_chunks(self) -> None:
        whole = body(answer(f"your key is {KEY}!"))
        parts = stream(delta(f"your key is {KEY[:9]}"), delta(f"{KEY[9:]}!", finish="stop"), DONE)
        for reply in (whole, parts):
            assert reply.content == "your key is [redacted]!"
            assert "secret_redacted" in reply.flags

    def test_words_that_look_like_keys_stay_in_answers(self) -> None:
        text = "a risk-or-v1-adjusted-performance and sk-or-v1-someoneelseskey00"
        assert body(answer(text)).content == text

    @given(st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["choices", "usage", "error", "message", "delta", "code", "content",
                             "metadata", "prompt_tokens", "cost", "id", "reasoning_details"]),
            inner, max_size=5),
        max_leaves=20,
    ))  # fmt: skip
    def test_no_json_shape_raises(self, shape: Any) -> None:
        for reply in (body(json.dumps(shape).encode()), stream(f"data: {json.dumps(shape)}\n\n")):
            classify(reply)
            settle(reply, pricing=PRICING, when=WHEN)


CASES: list[tuple[str, Reply, Kind, type[Any]]] = [
    ("answer", body(answer()), Kind.ANSWER, Post),
    ("length is an answer", body(answer(finish_reason="length")), Kind.ANSWER, Post),
    ("reasoning only", body(answer(None, message={"reasoning": "x"})), Kind.ANSWER, Post),
    ("no usage", body(answer(usage=None)), Kind.ANSWER, Hold),
    ("empty usage", body(answer(usage={})), Kind.ANSWER, Hold),
    ("done without finish reason", stream(delta("x"), DONE), Kind.ANSWER, Hold),
    ("finish reason without done", stream(delta("x", finish="stop")), Kind.ANSWER, Hold),
    ("stream cut", stream(delta("x")), Kind.TRANSIENT, Hold),
    ("only comments", stream(COMMENT), Kind.TRANSIENT, Hold),
    ("body cut", body(json.dumps(answer()).encode()[:60]), Kind.TRANSIENT, Hold),
    ("empty body", body(b""), Kind.TRANSIENT, Hold),
    ("html under 200", body(b"<html>busy</html>"), Kind.TRANSIENT, Hold),
    ("choices null", body({"id": "g", "choices": None}), Kind.TRANSIENT, Hold),
    ("choices empty", body({"id": "g", "choices": []}), Kind.TRANSIENT, Hold),
    ("choices missing", body({"id": "g"}), Kind.TRANSIENT, Hold),
    ("empty, zero tokens", body(answer("", usage={"prompt_tokens": 0, "completion_tokens": 0,
                                                  "cost": 0})), Kind.TRANSIENT, Post),
    ("empty but billed", body(answer("")), Kind.ANSWER, Post),
    ("error in body", body({"id": "g", "error": {"code": 502, "message": "overloaded"}}),
     Kind.TRANSIENT, Void),
    ("error as text", body({"error": "boom"}), Kind.TRANSIENT, Void),
    ("error in choice", body({"choices": [{"error": {"code": 503, "message": "x"}}]}),
     Kind.TRANSIENT, Void),
    ("429 in body, number", body({"error": {"code": 429, "message": "x",
                                            "metadata": {"provider_name": "A"}}}),
     Kind.RATE_LIMITED, Void),
    ("429 in body, text", body({"error": {"code": "429", "message": "x"}}),
     Kind.ACCOUNT_LIMITED, Void),
    ("word as code", body({"error": {"code": "server_error", "message": "x"}}),
     Kind.TRANSIENT, Void),
    ("first chunk is an error", stream({"error": {"code": 502, "message": "x"}, "choices": []},
                                       DONE), Kind.TRANSIENT, Void),
    ("error after text, with bill", stream(delta("x"), {"error": {"code": 502, "message": "x"},
                                                        "choices": [], "usage": USAGE}),
     Kind.TRANSIENT, Post),
    ("error after text, no bill", stream(delta("x"), {"error": {"code": 502, "message": "x"}}),
     Kind.TRANSIENT, Hold),
    ("401", body({"error": {"code": 401, "message": "no"}}, 401), Kind.KEY_REJECTED, Void),
    ("upstream 401", body({"error": {"code": 401, "message": "no",
                                     "metadata": {"provider_name": "A"}}}, 401),
     Kind.TRANSIENT, Void),
    ("402", body({"error": {"code": 402, "message": "afford", "metadata": {"provider_name": None}}},
                 402), Kind.OUT_OF_FUNDS, Void),
    ("quota as 429", body({"error": {"code": 429, "type": "insufficient_quota", "message": "x"}},
                          429), Kind.OUT_OF_FUNDS, Void),
    ("403 moderation", body({"error": {"code": 403, "message": "x",
                                       "metadata": {"reasons": ["violence"]}}}, 403),
     Kind.REFUSED, Void),
    ("403 html", body(b"<html>blocked</html>", 403), Kind.ACCOUNT_LIMITED, Void),
    ("404", body({"error": {"code": 404, "message": "No endpoints found"}}, 404),
     Kind.NO_ENDPOINT, Void),
    ("unknown model", body({"error": {"code": 400, "message": "x",
                                      "metadata": {"error_type": "model_not_found"}}}, 400),
     Kind.NO_ENDPOINT, Void),
    ("400", body({"error": {"code": 400, "message": "bad"}}, 400), Kind.REFUSED, Void),
    ("400 said to be retryable", body({"error": {"code": 400, "message": "x", "availability":
                                                 {"retryable": True}}}, 400), Kind.TRANSIENT, Void),
    ("too long as 500", body({"error": {"code": 500, "message": "maximum context length is 9"}},
                             500), Kind.REFUSED, Void),
    ("too long in a 200", body({"error": {"code": 502, "message": "x", "metadata":
                                          {"error_type": "context_length_exceeded"}}}),
     Kind.REFUSED, Void),
    ("500", body({"error": {"code": 500, "message": "x"}}, 500), Kind.TRANSIENT, Void),
    ("503", body({"error": {"code": 503, "message": "x"}}, 503), Kind.TRANSIENT, Void),
    ("html 502", body(b"<html>bad gateway</html>", 502), Kind.TRANSIENT, Hold),
    ("524", body(b"<html>timeout</html>", 524), Kind.TRANSIENT, Hold),
    ("529", body({"error": {"code": 529, "message": "overloaded"}}, 529), Kind.TRANSIENT, Void),
    ("html 429", body(b"error code: 1015", 429), Kind.ACCOUNT_LIMITED, Void),
    ("availability without code", body({"error": {"http_status": 503, "message": "x"}}, 503),
     Kind.TRANSIENT, Void),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "kind", "settlement"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_outcome_and_settlement(reply: Reply, kind: Kind, settlement: type[Any]) -> None:
    assert classify(reply).kind is kind
    assert isinstance(settle(reply, pricing=PRICING, when=WHEN), settlement)


class TestSettlements:
    def test_the_reported_cost_is_posted_to_the_pico_dollar(self) -> None:
        noisy = json.dumps(answer()).replace("0.0005044", "0.00050440000000000004").encode()
        settlement = settle(body(noisy), pricing=PRICING, when=WHEN)
        assert isinstance(settlement, Post)
        assert settlement.charge.amount_pusd == 504_400_000
        assert settlement.charge.basis is Basis.REPORTED

    def test_zero_cost_on_a_paid_endpoint_is_held_or_priced_never_believed(self) -> None:
        free_of_charge = answer(usage=USAGE | {"cost": 0})
        assert isinstance(settle(body(free_of_charge), pricing=PRICING, when=WHEN), Hold)
        without_id = {name: value for name, value in free_of_charge.items() if name != "id"}
        settlement = settle(body(without_id), pricing=PRICING, when=WHEN)
        assert isinstance(settlement, Post)
        assert settlement.charge.amount_pusd == 100 * 600_000 + 202 * 2_200_000
        assert "zero_cost" in settlement.charge.flags

    def test_zero_cost_is_right_for_a_free_endpoint_and_a_cache_hit(self) -> None:
        free_of_charge = body(answer(usage=USAGE | {"cost": 0}))
        cached = body(answer(usage={"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}))
        for reply, pricing in ((free_of_charge, FREE), (cached, PRICING)):
            settlement = settle(reply, pricing=pricing, when=WHEN)
            assert isinstance(settlement, Post)
            assert settlement.charge.amount_pusd == 0

    def test_missing_cost_without_an_id_is_priced_from_the_list(self) -> None:
        usage = {"prompt_tokens": 10, "completion_tokens": 1}
        reply = body({"choices": answer()["choices"], "usage": usage})
        settlement = settle(reply, pricing=PRICING, when=WHEN)
        assert isinstance(settlement, Post)
        assert settlement.charge.basis is Basis.PRICED
        assert settlement.charge.amount_pusd == 10 * 600_000 + 2_200_000

    def test_contradicting_usage_is_flagged_and_the_reported_cost_stands(self) -> None:
        usage = USAGE | {"completion_tokens_details": {"reasoning_tokens": 999}}
        settlement = settle(body(answer(usage=usage)), pricing=PRICING, when=WHEN)
        assert isinstance(settlement, Post)
        assert settlement.charge.flags == ("usage_contradiction",)
        assert settlement.charge.amount_pusd == 504_400_000


def test_errors_are_short_and_without_secrets() -> None:
    echo = {"error": {"code": 500, "message": f"bad header Bearer {KEY} " + "x" * 9999}}
    outcome = classify(body(echo, 500))
    assert KEY not in outcome.problem
    assert len(outcome.problem) < 400
    metadata = {"raw": {"detail": f"key {KEY}"}, "provider_name": "A"}
    raw = {"error": {"code": 502, "message": "Provider returned error", "metadata": metadata}}
    problem = classify(body(raw, 502)).problem
    assert KEY not in problem
    assert "detail" in problem
