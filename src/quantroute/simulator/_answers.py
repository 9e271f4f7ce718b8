"""The answer of one endpoint: asked of the backend, bent into its shape, priced."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final

from quantroute.pricing import Pricing, TokenUsage
from quantroute.simulator._backend import (
    BYTES_PER_TOKEN,
    AnswerRequest,
    SimulatedAnswer,
    count_tokens,
)
from quantroute.simulator._bill import GenerationRecord
from quantroute.simulator._catalogue import LiveEndpoint, LiveModel
from quantroute.simulator._faults import FaultTables, draw
from quantroute.simulator._pricing import FREE, charge
from quantroute.simulator._reply import Reply
from quantroute.simulator._request import ChatRequest
from quantroute.simulator._routing import output_limit
from quantroute.simulator._state import ServiceState

__all__ = ["Ask", "Served", "answer"]

_ZERO: Final = Decimal(0)
_BYOK_UNTOUCHED: Final = frozenset({"error_in_200", "error_word_code"})
#: No tokens, or an answer that ended in an error: not charged.
#: Source: OpenRouter's zero-completion insurance, read 2026-08.
_INSURED: Final = frozenset(
    {
        "error_in_200",
        "error_word_code",
        "error_mid_stream",
        "error_in_choice",
        "choices_null",
        "choices_empty",
        "choices_missing",
        "empty_stop",
        "insured_empty",
    }
)
#: Fails half-way: only what was made until then exists.
_BREAKS_OFF: Final = frozenset({"error_mid_stream", "error_mid_stream_billed", "error_in_choice"})
_WITHOUT_TOKENS: Final = frozenset(_INSURED - {"error_mid_stream", "error_in_choice"})
#: A loop ends at the output limit; a shorter one shows as much and costs less to send.
_LOOP_TOKENS: Final = 1_024
_PHRASE: Final = " and then once more,"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request on its way: what is asked, of which model, with its own randomness.

    `sample` numbers the requests of this prompt, from 0.
    """

    request: ChatRequest
    model: LiveModel
    rng: random.Random
    sample: int


@dataclass(slots=True, kw_only=True)
class Served:
    """An answer that is due: what to say, when, and what it will cost once said.

    `endpoint` serves and is paid; the provider `admitted_slug` let the request in. They differ only
    when the provider served is not the one asked. Price and labels are those of the start: what is
    listed later does not change a running answer.
    """

    reply: Reply
    request: ChatRequest
    endpoint: LiveEndpoint
    admitted_slug: str
    tag: str
    quantization: str
    pricing: Pricing
    tables: FaultTables
    first_token_s: float
    generation_s: float
    started_at_s: float
    held_usd: Decimal

    def record(
        self, state: ServiceState, *, produced: tuple[int, int] | None = None
    ) -> GenerationRecord:
        """The entry for the bill; `produced` (reasoning, content tokens) if it was cut short."""
        reply = self.reply
        usage, cost, bought = reply.usage, reply.cost_usd, reply.upstream_usd
        if produced is not None:
            usage = replace(usage, output_tokens=sum(produced), reasoning_tokens=produced[0])
            is_insured = reply.shape in _INSURED or not usage.output_tokens
            partial = FREE if is_insured else charge(self.pricing, usage, at_s=reply.created)
            cost, bought = _split(partial.total_usd, state, is_byok=reply.is_byok)
        now_s = state.clock.now_s()
        return GenerationRecord(
            generation_id=reply.generation_id,
            prompt_id=self.request.prompt_id,
            model=self.endpoint.model_id,
            tag=self.tag,
            provider_name=self.endpoint.provider_name,
            quantization=self.quantization,
            usage=usage,
            cost_usd=cost,
            upstream_usd=bought,
            finish_reason=None if produced is not None else reply.finish_reason,
            is_streamed=self.request.is_streamed,
            is_cancelled=produced is not None,
            is_byok=reply.is_byok,
            shape=reply.shape,
            created_at_s=reply.created,
            recorded_at_s=now_s,
            latency_ms=round(1000 * self.first_token_s),
            generation_ms=round(1000 * (now_s - self.started_at_s)),
        )


async def answer(
    state: ServiceState, ask: Ask, *, endpoint: LiveEndpoint, held_usd: Decimal
) -> Served:
    """What `endpoint`, which admitted the request, answers; nothing is billed yet."""
    request, rng, slug = ask.request, ask.rng, endpoint.slug
    tables = state.tables(slug)
    shape = draw(tables.answer, rng)
    identity = draw(tables.identity, rng)
    server = _impostor(ask.model, endpoint, rng) if identity == "wrong_provider" else endpoint
    asked = _question(state, ask, server)
    given = _stopped(await state.backend.answer(asked), asked.parameters.get("stop"))
    given = _reshaped(given, shape, limit_tokens=asked.limit_tokens)
    usage = _usage(state, server, request, given, shape, rng)
    created = int(state.clock.time_s())
    extras = tables.draw_extras(rng)
    bought = FREE if shape in _INSURED else charge(server.pricing, usage, at_s=created)
    is_byok = "byok" in extras and shape not in _BYOK_UNTOUCHED
    cost, upstream_usd = _split(bought.total_usd, state, is_byok=is_byok)
    content, reasoning = _texts(given, shape)
    if "key_echo" in extras and content is not None:
        content = f"{content} Authorization: Bearer {state.api_key}"
    shows_reasoning = not request.hides_reasoning
    reply = Reply(
        generation_id=state.new_generation_id(rng),
        created=created,
        model="impostor/other-model-8b" if identity == "wrong_model" else ask.model.permaslug,
        provider=None if identity == "provider_missing" else server.provider_name,
        content=content,
        reasoning=reasoning if shows_reasoning else None,
        finish_reason=_finish_reason(given, shape),
        usage=usage,
        charge=bought,
        cost_usd=cost,
        upstream_usd=upstream_usd,
        is_byok=is_byok,
        shape=shape,
        usage_place=draw(tables.usage_place, rng),
        usage_body=draw(tables.usage_body, rng),
        reasoning_form=draw(tables.reasoning, rng),
        extras=extras,
        chunk_tokens=state.answers.chunk_tokens,
    )
    first_s, whole_s = _durations(state, server, usage.output_tokens, rng)
    return Served(
        reply=reply,
        request=request,
        endpoint=server,
        admitted_slug=slug,
        tag=server.tag,
        quantization=server.quantization,
        pricing=server.pricing,
        tables=tables,
        first_token_s=first_s,
        generation_s=whole_s,
        started_at_s=state.clock.now_s(),
        held_usd=held_usd,
    )


def _impostor(model: LiveModel, asked: LiveEndpoint, rng: random.Random) -> LiveEndpoint:
    """Another provider's endpoint of the same model, if there is one."""
    others = [e for e in model.endpoints if e.provider_name != asked.provider_name]
    return rng.choice(others) if others else asked


def _question(state: ServiceState, ask: Ask, endpoint: LiveEndpoint) -> AnswerRequest:
    """What the backend is asked: only what the endpoint supports reaches it."""
    request, model, rng = ask.request, ask.model, ask.rng
    kept = {name: value for name, value in request.parameters.items() if name in endpoint.supported}
    thinks = model.reasoning is not None and "reasoning" in endpoint.supported
    if thinks and request.wants_thinking is None:
        thinks = bool(model.reasoning and model.reasoning.get("default_enabled", True))
    elif thinks:
        thinks = bool(request.wants_thinking)
    if "seed" in kept:
        # Best effort, like real providers: the same seed and prompt give the same answer.
        rng = state.rng(request.prompt_id, "seed", kept["seed"])
    limit = output_limit(endpoint, request)
    budget = request.thinking_limit_tokens
    if budget is None and request.thinking_share is not None:
        budget = int(limit * request.thinking_share)
    return AnswerRequest(
        model=model.model_id,
        messages=request.messages,
        parameters=kept,
        is_thinking=thinks,
        limit_tokens=limit,
        thinking_limit_tokens=budget,
        prompt_id=request.prompt_id,
        sample=ask.sample,
        rng=rng,
        endpoint=endpoint.tag,
    )


def _reshaped(answer: SimulatedAnswer, shape: str, *, limit_tokens: int) -> SimulatedAnswer:
    """The answer with the tokens that its shape leaves it."""
    if shape in _WITHOUT_TOKENS:
        return replace(answer, content="", reasoning=None, output_tokens=0, reasoning_tokens=0)
    if shape == "length":
        return replace(_first_half(answer), finish_reason="length")
    if shape in _BREAKS_OFF:
        return _first_half(answer)
    if shape in ("reasoning_only", "content_null", "reasoning_in_content"):
        text = answer.reasoning or answer.content
        tokens = count_tokens(text)
        return replace(
            answer, content="", reasoning=text, output_tokens=tokens, reasoning_tokens=tokens
        )
    if shape == "loop":
        tokens = min(limit_tokens, _LOOP_TOKENS)
        return replace(
            answer,
            content=(_PHRASE * tokens)[: tokens * BYTES_PER_TOKEN],
            reasoning=None,
            output_tokens=tokens,
            reasoning_tokens=0,
        )
    if shape == "reasoning_although_off" and not answer.reasoning:
        return _thinking_first(answer)
    return answer


def _thinking_first(answer: SimulatedAnswer) -> SimulatedAnswer:
    """The first half of the text as reasoning."""
    half = len(answer.content) // 2
    return replace(
        answer,
        reasoning=answer.content[:half],
        content=answer.content[half:],
        reasoning_tokens=answer.output_tokens // 2,
    )


def _first_half(answer: SimulatedAnswer) -> SimulatedAnswer:
    """The answer as far as its first half of tokens; reasoning comes first."""
    spoken = answer.output_tokens - answer.reasoning_tokens
    total = max(1, answer.output_tokens // 2)
    thought = min(answer.reasoning_tokens, total)
    return replace(
        answer,
        reasoning=_share(answer.reasoning, thought, answer.reasoning_tokens),
        content=_share(answer.content, total - thought, spoken) or "",
        output_tokens=total,
        reasoning_tokens=thought,
    )


def _share(text: str | None, tokens: int, of_tokens: int) -> str | None:
    return text[: len(text) * tokens // of_tokens] if text and of_tokens else text


def _stopped(answer: SimulatedAnswer, stops: list[str] | None) -> SimulatedAnswer:
    """The answer cut before the first stop string in its content."""
    ends = [at for stop in stops or () if stop and (at := answer.content.find(stop)) >= 0]
    if not ends:
        return answer
    content = answer.content[: min(ends)]
    total = answer.reasoning_tokens + count_tokens(content)
    return replace(
        answer,
        content=content,
        output_tokens=min(answer.output_tokens, total),
        finish_reason="stop",
    )


def _texts(answer: SimulatedAnswer, shape: str) -> tuple[str | None, str | None]:
    """(content, reasoning) as they are shown."""
    if shape == "content_null":
        return None, answer.reasoning
    if shape == "reasoning_in_content":
        return answer.reasoning, None
    if shape == "think_tags":
        return f"<think>{answer.reasoning or ''}</think>{answer.content}", None
    return answer.content, answer.reasoning


def _finish_reason(answer: SimulatedAnswer, shape: str) -> str | None:
    if shape in ("insured_empty", "choices_null", "choices_empty", "choices_missing"):
        return None
    if shape in ("reasoning_only", "reasoning_in_content", "loop"):
        return "length"
    if shape == "content_filter":
        return shape
    if shape in ("content_null", "empty_stop"):
        return "stop"
    return "error" if shape.startswith("error_") else answer.finish_reason


def _usage(
    state: ServiceState,
    endpoint: LiveEndpoint,
    request: ChatRequest,
    answer: SimulatedAnswer,
    shape: str,
    rng: random.Random,
) -> TokenUsage:
    if shape == "empty_stop":
        return TokenUsage(
            input_tokens=0,
            output_tokens=0,
            reasoning_tokens=0,
            cached_tokens=0,
            cache_write_tokens=0,
        )
    spec, prices = state.answers, endpoint.pricing.prices
    cached = written = 0
    shared = int(request.prompt_tokens * spec.cache_share)
    if spec.cache_read_probability and "input_cache_read" in prices:
        cached = shared if rng.random() < spec.cache_read_probability else 0
    if not cached and spec.cache_write_probability and "input_cache_write" in prices:
        written = shared if rng.random() < spec.cache_write_probability else 0
    return TokenUsage(
        input_tokens=request.prompt_tokens,
        output_tokens=answer.output_tokens,
        reasoning_tokens=answer.reasoning_tokens,
        cached_tokens=cached,
        cache_write_tokens=written,
    )


def _split(
    total_usd: Decimal, state: ServiceState, *, is_byok: bool
) -> tuple[Decimal, Decimal | None]:
    """(what the service charges, what the buyer's own provider account is charged)."""
    if not is_byok:
        return total_usd, None
    fee = state.account.byok_fee
    return total_usd * fee if fee else _ZERO, total_usd


def _durations(
    state: ServiceState, endpoint: LiveEndpoint, tokens: int, rng: random.Random
) -> tuple[float, float]:
    """(seconds to the first token, seconds from there to the last), scaled."""
    if not state.time_scale:
        return 0.0, 0.0
    traffic = state.traffic_of(endpoint.slug)
    first_s = traffic.first_token_s * math.exp(rng.gauss(0.0, traffic.first_token_sigma))
    return first_s * state.time_scale, tokens / traffic.tokens_per_s * state.time_scale
