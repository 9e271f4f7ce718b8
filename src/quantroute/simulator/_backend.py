"""Where answers come from: a protocol, two small backends, and the token counting rule.

Counting is a rule, not a tokenizer: one token per four UTF-8 bytes, rounded up per piece of text,
plus a few for each message. So a prompt's count never exceeds its bytes plus those few.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from quantroute.simulator._scenario import AnswerSpec

__all__ = [
    "AnswerRequest",
    "Backend",
    "EchoBackend",
    "SimulatedAnswer",
    "SyntheticBackend",
    "count_prompt_tokens",
    "count_tokens",
    "prompt_id",
]

BYTES_PER_TOKEN: Final = 4
MESSAGE_OVERHEAD_TOKENS: Final = 4
REPLY_OVERHEAD_TOKENS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What a backend is asked: unsupported parameters are already dropped.

    `limit_tokens` bounds reasoning and content together, `thinking_limit_tokens` (a budget, or an
    effort's share) the reasoning alone. `sample` numbers the answers given to
    this prompt so far, so that several samples of one prompt can differ; `rng` is seeded by both.
    `endpoint` is the tag that serves, for backends in which endpoints differ.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    is_thinking: bool
    limit_tokens: int
    thinking_limit_tokens: int | None = None
    prompt_id: str
    sample: int
    rng: random.Random
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAnswer:
    """A backend's answer. `output_tokens` counts reasoning and content together."""

    content: str
    reasoning: str | None = None
    output_tokens: int
    reasoning_tokens: int = 0
    finish_reason: str = "stop"


class Backend(Protocol):
    """Anything that answers; a real small model behind it makes the rows real."""

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        """One answer, within `request.limit_tokens`."""
        ...


def count_tokens(text: str) -> int:
    """Tokens of a piece of text: one per four UTF-8 bytes, rounded up."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // BYTES_PER_TOKEN)


def count_prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Input tokens of a conversation; at most its UTF-8 bytes + 4 per message + 3."""
    total = REPLY_OVERHEAD_TOKENS
    for message in messages:
        total += MESSAGE_OVERHEAD_TOKENS
        content = message.get("content")
        if isinstance(content, str):
            total += count_tokens(content)
        elif isinstance(content, list):
            total += sum(
                count_tokens(part["text"])
                for part in content
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            )
        for key in ("reasoning", "reasoning_content"):
            if isinstance(text := message.get(key), str):
                total += count_tokens(text)
                break
    return total


def prompt_id(messages: Sequence[Mapping[str, Any]]) -> str:
    """Short stable name of a conversation: hex, from the messages alone."""
    text = json.dumps(messages, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class SyntheticBackend:
    """Made-up prose with log-normal lengths; instant, and the same for the same seed."""

    def __init__(self, spec: AnswerSpec) -> None:
        self.spec = spec
        # The median of a log-normal with this mean: exp(mu) = mean / exp(sigma^2 / 2).
        self._mu = math.log(spec.mean_tokens) - spec.sigma**2 / 2

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        rng, spec = request.rng, self.spec
        wanted = max(1, round(math.exp(rng.gauss(self._mu, spec.sigma))))
        wanted = min(wanted, spec.longest_tokens)
        thinking = round(wanted * rng.uniform(0.5, 1.5) * spec.reasoning_share)
        thinking = min(thinking, wanted - 1) if request.is_thinking else 0
        if request.thinking_limit_tokens is not None:
            spared = max(0, thinking - request.thinking_limit_tokens)
            thinking, wanted = thinking - spared, wanted - spared
        total = min(wanted, request.limit_tokens)
        thought = min(thinking, total)
        return SimulatedAnswer(
            content=_prose(rng, total - thought),
            reasoning=_prose(rng, thought) if request.is_thinking else None,
            output_tokens=total,
            reasoning_tokens=thought,
            finish_reason="stop" if total == wanted else "length",
        )


class EchoBackend:
    """Answers with the last message: shows which answer belongs to which prompt."""

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        last = str(request.messages[-1].get("content", ""))
        text = f"[{request.sample}] {last}"
        total = count_tokens(text)
        if total > request.limit_tokens:
            raw = text.encode()[: request.limit_tokens * BYTES_PER_TOKEN]
            text, total = raw.decode("utf-8", "ignore"), request.limit_tokens
            return SimulatedAnswer(content=text, output_tokens=total, finish_reason="length")
        return SimulatedAnswer(content=text, output_tokens=total)


_WORDS: Final = (
    "a the this that each model answer question reason step number value result case part whole "
    "first second last small large simple plain careful likely early late high low open closed "
    "find take give keep make show hold turn read write count measure compare follow begin end "
    "and or but so because while when where which who how not only also still then thus here "
    "there with without from into over under between after before about against through river "
    "stone paper window garden winter morning letter road house light water machine city field"
)
_CORPUS_BYTES: Final = 1 << 18


def _corpus() -> str:
    """A quarter megabyte of sentences, built once; answers are slices of it."""
    rng = random.Random(20260127)
    vocabulary = _WORDS.split()
    pieces: list[str] = []
    size = 0
    while size < _CORPUS_BYTES:
        words = rng.choices(vocabulary, k=rng.randint(5, 14))
        sentence = f"{' '.join(words).capitalize()}. "
        pieces.append(sentence)
        size += len(sentence)
    return "".join(pieces)


_corpus_text = ""


def _prose(rng: random.Random, tokens: int) -> str:
    """Exactly `tokens` tokens of text, beginning with a space like the real model's."""
    global _corpus_text  # built at the first use, so that importing stays cheap
    if tokens <= 0:
        return ""
    if not _corpus_text:
        _corpus_text = _corpus()
    size = tokens * BYTES_PER_TOKEN - 1
    start = _corpus_text.index(" ", rng.randrange(_CORPUS_BYTES - 200)) + 1
    text = _corpus_text[start : start + size]
    while len(text) < size:
        text += _corpus_text[: size - len(text)]
    return " " + text
