"""What a request is, and the closed set of things that can come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from quantroute.domain import Endpoint, Message, Sampling, check_messages
from quantroute.errors import ConfigurationError
from quantroute.ledger import ROOT, Account, EntryId
from quantroute.money import plain_usd, to_usd
from quantroute.policy import Precision
from quantroute.pricing import TokenUsage
from quantroute.storage import Work

__all__ = [
    "Answer",
    "AnswerSink",
    "Answered",
    "ChatRequest",
    "Completion",
    "GaveUp",
    "Provenance",
    "RowRefused",
]


class ChatRequest(Struct, frozen=True, kw_only=True):
    """One chat request, complete: nothing about it is left to a hidden default.

    Args:
        account: the ledger account that pays, e.g. `Account("run-7/mt-bench")`.
        request_id: ours, for logs and errors; not sent to the service.
        is_streamed: how the answer travels; outcomes and rows are the same either way.
    """

    model: str
    messages: tuple[Message, ...]
    max_output_tokens: int
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    account: Account = ROOT
    request_id: str = ""
    is_streamed: bool = False

    def __post_init__(self) -> None:
        check_messages(self.messages)
        if not isinstance(self.sampling, Sampling):
            raise ConfigurationError(
                f"sampling takes Sampling(temperature=0.7), not {type(self.sampling).__name__}"
            )
        if self.max_output_tokens < 1:
            raise ConfigurationError(
                f"max_output_tokens must be at least 1, not {self.max_output_tokens}"
            )


class Provenance(Struct, frozen=True, kw_only=True):
    """Where an answer came from: what was asked for, what was served, and at which price.

    `endpoint` is the listed row the request was pinned to; `served_*` is what the answer says.
    """

    endpoint: Endpoint
    precision: Precision
    generation_id: str | None
    served_provider: str | None
    served_model: str | None
    listed_at_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; prices as they are published, USD per token."""
        endpoint = self.endpoint
        return {
            "model": endpoint.model,
            "endpoint": str(endpoint.key),
            "provider_name": endpoint.provider_name,
            "quantization_label": endpoint.quantization_label,
            "precision": self.precision.as_dict(),
            "input_usd_per_token": plain_usd(endpoint.pricing.input_usd_per_token),
            "output_usd_per_token": plain_usd(endpoint.pricing.output_usd_per_token),
            "generation_id": self.generation_id,
            "served_provider": self.served_provider,
            "served_model": self.served_model,
            "listed_at_s": self.listed_at_s,
        }


class Answer(Struct, frozen=True, kw_only=True):
    """A finished answer, good or not: `finish_reason`, `usage` and `flags` tell.

    `content` and `reasoning` are exactly what the model wrote ("" and None when absent).
    `cost_pusd` is the posted charge, None while the ledger holds the reservation until the bill is
    known. `flags` name oddities: "served_mismatch", "served_unknown", "served_ambiguous" (several
    of the allowed endpoints are that company's), "model_mismatch", "usage_missing",
    "usage_contradiction", "cost_missing", "zero_cost", "overrun", "secret_redacted",
    "no_finish_reason" and "no_done" (a stream that ended with only one of its two ends),
    "malformed_event" (a piece of a stream could not be read: the text may lack something),
    "cut_after_json" (the wire broke behind an answer that was whole).
    Units: seconds from sending to the first byte of the answer, and to its end.
    """

    content: str
    reasoning: str | None
    finish_reason: str | None
    native_finish_reason: str | None
    usage: TokenUsage | None
    cost_pusd: int | None
    provenance: Provenance
    flags: tuple[str, ...] = ()
    attempt: int = 1
    first_byte_s: float | None = None
    total_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `cost_usd` is `cost_pusd` as an exact decimal number."""
        cost_usd = None if self.cost_pusd is None else to_usd(self.cost_pusd)
        return {
            "content": self.content,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "native_finish_reason": self.native_finish_reason,
            "usage": None if self.usage is None else msgspec.to_builtins(self.usage),
            "cost_pusd": self.cost_pusd,
            "cost_usd": plain_usd(cost_usd),
            "flags": list(self.flags),
            "attempt": self.attempt,
            "first_byte_s": self.first_byte_s,
            "total_s": self.total_s,
            "provenance": self.provenance.as_dict(),
        }


class Answered(Struct, frozen=True, kw_only=True):
    """The service gave an answer; it is paid for, or its price is being found out."""

    answer: Answer
    entry_id: EntryId
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRefused:
    """The row can never succeed as it is (400, 403, 413, 422, too long for every endpoint)."""

    status: int
    problem: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Attempts or waiting time are used up; the row stays pending and can be tried again later."""

    problem: str
    attempts: int
    detail: Mapping[str, Any] = field(default_factory=dict)


Completion = Answered | RowRefused | GaveUp
"""What `Client.complete` returns. Whatever must stop a whole run is raised instead."""

AnswerSink = Callable[[Answer, EntryId], Work[None] | None]
"""Called with each answer before it is settled; the work it returns commits with the charge."""
