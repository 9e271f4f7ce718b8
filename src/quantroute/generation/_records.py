"""What the row store keeps, as immutable values: rows, turns, and what determines a resume."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from quantroute.client import Answer
from quantroute.domain import RowKey, Sampling
from quantroute.generation._config import Mode
from quantroute.generation._prompts import Prompt
from quantroute.generation._quality import Judgement, RowClass
from quantroute.ledger import EntryId
from quantroute.money import plain_usd
from quantroute.policy import Precision

__all__ = [
    "Reading",
    "RowCounts",
    "RowId",
    "RowState",
    "Standing",
    "StoredRow",
    "StoredRun",
    "TurnRecord",
    "current_chain",
    "digest",
    "turn_record",
]


class RowState(enum.Enum):
    """How far a conversation has come."""

    __hash__ = object.__hash__  # as `RowClass`

    OPEN = "open"  # turns are missing and can be had
    FINISHED = "finished"  # all turns are in, or one of them ended it by its class
    REFUSED = "refused"  # the service will never answer it as it is
    GAVE_UP = "gave_up"  # attempts used up this time; the next run tries again


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the store knows it. `config` is the configuration in force, as plain values."""

    run_id: int
    name: str
    created_at_s: float
    config_hash: str
    config: Mapping[str, Any]


class RowId(Struct, frozen=True, kw_only=True):
    """Which row: its key, and the prompt and rollout that the key was made from."""

    key: RowKey
    prompt: Prompt
    rollout: int


class Standing(NamedTuple):
    """How far a stored row is."""

    row_id: int
    state: RowState
    row_class: RowClass | None
    turns_done: int


class Reading(NamedTuple):
    """What a source gave that was read to its end: distinct rows, and rows that repeat others."""

    rows: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """How many rows of one dataset are in one state and class."""

    dataset: str
    state: RowState
    row_class: RowClass | None
    rows: int


class TurnRecord(Struct, frozen=True, kw_only=True):
    """One answer with everything that says where it came from and what it cost.

    `content` and `reasoning` are what the model wrote. Prices are the published strings, USD per
    token. `cost_pusd` (pico-dollars) is None while the ledger holds the charge as unknown.
    `messages_sha256` is of the messages that were sent, so a reader can check the prefix.
    Of several revisions of a turn, the highest counts; see `current_chain`.
    """

    turn: int
    revision: int = 0
    row_class: RowClass
    details: tuple[str, ...]
    flags: tuple[str, ...]
    loop_score: float
    content: str
    reasoning: str | None
    finish_reason: str | None
    native_finish_reason: str | None
    input_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    cached_tokens: int | None
    cache_write_tokens: int | None
    cost_pusd: int | None
    entry_id: str
    generation_id: str | None
    endpoint: str
    provider_name: str
    served_provider: str | None
    served_model: str | None
    quantization_label: str | None
    precision: Mapping[str, Any]
    input_usd_per_token: str | None
    output_usd_per_token: str | None
    listed_at_s: float
    sampling: Mapping[str, Any]
    max_output_tokens: int
    mode: str
    attempts: int
    first_byte_s: float | None
    total_s: float | None
    messages_sha256: str
    created_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A conversation as the store has it; `turns` is the chain that counts."""

    row_id: int
    key: RowKey
    prompt: Prompt
    rollout: int
    state: RowState
    row_class: RowClass | None
    problem: str | None
    turns: tuple[TurnRecord, ...] = field(default=())

    @property
    def is_whole(self) -> bool:
        """Whether every turn of the prompt has an answer."""
        return len(self.turns) == len(self.prompt.turns)


def turn_record(
    answer: Answer,
    judgement: Judgement,
    *,
    entry_id: EntryId,
    turn: int,
    messages_sha256: str,
    sampling: Sampling,
    max_output_tokens: int,
    created_at_s: float,
) -> TurnRecord:
    """The record of an answer that has just come in."""
    source, usage = answer.provenance, answer.usage
    pricing = source.endpoint.pricing
    asked, precision = _described(sampling, source.precision)
    return TurnRecord(
        turn=turn,
        row_class=judgement.row_class,
        details=judgement.details,
        flags=answer.flags,
        loop_score=judgement.loop_score,
        content=answer.content,
        reasoning=answer.reasoning,
        finish_reason=answer.finish_reason,
        native_finish_reason=answer.native_finish_reason,
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        reasoning_tokens=usage.reasoning_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        cache_write_tokens=usage.cache_write_tokens if usage else None,
        cost_pusd=answer.cost_pusd,
        entry_id=entry_id,
        generation_id=source.generation_id,
        endpoint=str(source.endpoint.key),
        provider_name=source.endpoint.provider_name,
        served_provider=source.served_provider,
        served_model=source.served_model,
        quantization_label=source.endpoint.quantization_label,
        precision=precision,
        input_usd_per_token=plain_usd(pricing.input_usd_per_token),
        output_usd_per_token=plain_usd(pricing.output_usd_per_token),
        listed_at_s=source.listed_at_s,
        sampling=asked,
        max_output_tokens=max_output_tokens,
        mode=Mode.of(sampling).value,
        attempts=answer.attempt,
        first_byte_s=answer.first_byte_s,
        total_s=answer.total_s,
        messages_sha256=messages_sha256,
        created_at_s=created_at_s,
    )


@functools.lru_cache(maxsize=256)
def _described(
    sampling: Sampling, precision: Precision
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """As plain values, which the records of a dataset share."""
    return sampling.parameters(), precision.as_dict()


def current_chain(turns: Iterable[TurnRecord]) -> tuple[TurnRecord, ...]:
    """The turns that count: an unbroken chain of answers, each given to the ones before it.

    Redoing a turn makes a higher revision of it. What came after the old answer was conditioned on
    that one and is out of date: it has a lower revision than the new answer before it.
    """
    latest: dict[int, TurnRecord] = {}
    for record in turns:
        known = latest.get(record.turn)
        if known is None or record.revision > known.revision:
            latest[record.turn] = record
    chain: list[TurnRecord] = []
    while (found := latest.get(len(chain))) is not None:
        if chain and found.revision < chain[-1].revision:
            break
        chain.append(found)
    return tuple(chain)


def digest(key: RowKey) -> bytes:
    """Sixteen bytes of a row's key: what sets of keys hold, at some 80 bytes of memory each."""
    return bytes.fromhex(key[:32])
