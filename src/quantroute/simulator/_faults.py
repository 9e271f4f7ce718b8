"""The odd shapes the service can speak, each switched by a probability.

Faults fall into groups. Within a group at most one is drawn per request or attempt, so that two
shapes which contradict each other never meet; members of different groups combine freely.
Every shape was seen in recorded traffic or in public reports of it.
"""

from __future__ import annotations

import random
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["FaultTables", "Faults"]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
FaultTable = tuple[tuple[str, float], ...]
"""Pairs of a fault's name and the cumulated probability up to and including it."""

#: Answered by the platform before any provider is asked.
EDGE: Final = (
    "platform_429",
    "html_429",
    "html_502",
    "edge_408",
    "edge_524",
    "edge_500",
    "key_401",
    "moderation_403",
    "region_403",
)
#: Failures of one provider before its first token; another provider may take over.
UPSTREAM: Final = (
    "upstream_400",
    "upstream_429",
    "upstream_500",
    "upstream_502",
    "upstream_503",
    "upstream_504",
    "upstream_529",
)
#: What becomes of the answer once status 200 is committed.
ANSWER: Final = (
    "error_in_200",
    "error_word_code",
    "error_mid_stream",
    "error_mid_stream_billed",
    "error_in_choice",
    "choices_null",
    "choices_empty",
    "choices_missing",
    "finish_missing",
    "done_missing",
    "truncated_stream",
    "cut_content_length",
    "cut_chunked",
    "reset",
    "hang",
    "stall",
    "empty_stop",
    "insured_empty",
    "content_null",
    "reasoning_only",
    "reasoning_in_content",
    "think_tags",
    "reasoning_although_off",
    "loop",
    "content_filter",
    "length",
)
#: Where the usage object stands in a stream; without one, in a last chunk with `choices: []`.
USAGE_PLACE: Final = (
    "usage_missing",
    "usage_with_empty_delta",
    "usage_with_finish",
    "usage_twice",
    "usage_before_text",
)
#: What the usage object looks like.
USAGE_BODY: Final = (
    "usage_null",
    "usage_empty",
    "usage_details_null",
    "usage_floats",
    "usage_strings",
    "cost_missing",
    "cost_zero",
)
#: Where the reasoning text stands; without one, in `reasoning` and again in `reasoning_details`.
REASONING: Final = ("reasoning_plain", "reasoning_details_only", "reasoning_content")
#: Who seems to have answered.
IDENTITY: Final = ("wrong_provider", "wrong_model", "provider_missing")
#: Independent of each other and of everything above.
EXTRAS: Final = (
    "padding",
    "comments",
    "byok",
    "cost_noise",
    "reasoning_overcount",
    "key_echo",
    "key_echo_in_errors",
)
_GROUPS: Final = (EDGE, UPSTREAM, ANSWER, USAGE_PLACE, USAGE_BODY, REASONING, IDENTITY)


class Faults(BaseModel):
    """Probabilities (0 to 1) of the odd shapes; all off by default.

    A provider's own table replaces the global one for the names it sets. `edge` faults are drawn
    before a provider is chosen, so only the global table counts for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # edge: the platform itself
    platform_429: Probability = 0.0
    html_429: Probability = 0.0
    html_502: Probability = 0.0
    edge_408: Probability = 0.0
    edge_524: Probability = 0.0
    edge_500: Probability = 0.0
    key_401: Probability = 0.0
    moderation_403: Probability = 0.0
    region_403: Probability = 0.0
    # upstream: one provider, before its first token
    upstream_400: Probability = 0.0
    upstream_429: Probability = 0.0
    upstream_500: Probability = 0.0
    upstream_502: Probability = 0.0
    upstream_503: Probability = 0.0
    upstream_504: Probability = 0.0
    upstream_529: Probability = 0.0
    # answer: after status 200
    error_in_200: Probability = 0.0
    error_word_code: Probability = 0.0
    error_mid_stream: Probability = 0.0
    error_mid_stream_billed: Probability = 0.0
    error_in_choice: Probability = 0.0
    choices_null: Probability = 0.0
    choices_empty: Probability = 0.0
    choices_missing: Probability = 0.0
    finish_missing: Probability = 0.0
    done_missing: Probability = 0.0
    truncated_stream: Probability = 0.0
    cut_content_length: Probability = 0.0
    cut_chunked: Probability = 0.0
    reset: Probability = 0.0
    hang: Probability = 0.0
    stall: Probability = 0.0
    empty_stop: Probability = 0.0
    insured_empty: Probability = 0.0
    content_null: Probability = 0.0
    reasoning_only: Probability = 0.0
    reasoning_in_content: Probability = 0.0
    think_tags: Probability = 0.0
    reasoning_although_off: Probability = 0.0
    loop: Probability = 0.0
    content_filter: Probability = 0.0
    length: Probability = 0.0
    # usage: its place in a stream, then its body
    usage_missing: Probability = 0.0
    usage_with_empty_delta: Probability = 0.0
    usage_with_finish: Probability = 0.0
    usage_twice: Probability = 0.0
    usage_before_text: Probability = 0.0
    usage_null: Probability = 0.0
    usage_empty: Probability = 0.0
    usage_details_null: Probability = 0.0
    usage_floats: Probability = 0.0
    usage_strings: Probability = 0.0
    cost_missing: Probability = 0.0
    cost_zero: Probability = 0.0
    # reasoning and identity
    reasoning_plain: Probability = 0.0
    reasoning_details_only: Probability = 0.0
    reasoning_content: Probability = 0.0
    wrong_provider: Probability = 0.0
    wrong_model: Probability = 0.0
    provider_missing: Probability = 0.0
    # extras
    padding: Probability = 0.0
    comments: Probability = 0.0
    byok: Probability = 0.0
    cost_noise: Probability = 0.0
    reasoning_overcount: Probability = 0.0
    key_echo: Probability = 0.0
    key_echo_in_errors: Probability = 0.0
    # how the faults above behave
    retry_after: Literal["none", "seconds", "date", "mixed"] = "none"
    retry_after_s: Annotated[float, Field(ge=0.0)] = 1.0
    hang_s: Annotated[float, Field(ge=0.0)] = 600.0

    @model_validator(mode="after")
    def _groups_are_exclusive(self) -> Self:
        for group in _GROUPS:
            total = sum(getattr(self, name) for name in group)
            if total > 1.0 + 1e-9:
                raise ValueError(
                    f"at most one of {', '.join(group)} happens at a time, "
                    f"so their probabilities must not sum to more than 1 (they sum to {total:g})"
                )
        return self

    def overlaid(self, other: Faults | None) -> Faults:
        """These faults with the values that `other` sets explicitly."""
        if other is None:
            return self
        return Faults.model_validate(
            self.model_dump() | {name: getattr(other, name) for name in other.model_fields_set}
        )


class FaultTables:
    """Faults prepared for drawing: names with probability zero cost nothing."""

    __slots__ = (
        "answer",
        "edge",
        "extras",
        "hang_s",
        "identity",
        "reasoning",
        "retry_after",
        "retry_after_s",
        "upstream",
        "usage_body",
        "usage_place",
    )

    def __init__(self, faults: Faults) -> None:
        self.edge = _cumulate(faults, EDGE)
        self.upstream = _cumulate(faults, UPSTREAM)
        self.answer = _cumulate(faults, ANSWER)
        self.usage_place = _cumulate(faults, USAGE_PLACE)
        self.usage_body = _cumulate(faults, USAGE_BODY)
        self.reasoning = _cumulate(faults, REASONING)
        self.identity = _cumulate(faults, IDENTITY)
        self.extras = tuple((name, p) for name in EXTRAS if (p := getattr(faults, name)) > 0.0)
        self.retry_after = faults.retry_after
        self.retry_after_s = faults.retry_after_s
        self.hang_s = faults.hang_s

    def draw_extras(self, rng: random.Random) -> frozenset[str]:
        """The independent faults that happen this time."""
        if not self.extras:
            return _NONE
        return frozenset(name for name, p in self.extras if rng.random() < p)


_NONE: Final[frozenset[str]] = frozenset()


def draw(table: FaultTable, rng: random.Random) -> str:
    """The one fault of a group that happens this time, or the empty string."""
    if not table:
        return ""
    roll = rng.random()
    for name, up_to in table:
        if roll < up_to:
            return name
    return ""


def _cumulate(faults: Faults, group: tuple[str, ...]) -> FaultTable:
    table: list[tuple[str, float]] = []
    total = 0.0
    for name in group:
        probability = getattr(faults, name)
        if probability > 0.0:
            total += probability
            table.append((name, total))
    return tuple(table)
