"""The words of the trade as immutable values: endpoints, providers, requests, rows.

Pure: no I/O, no clock, no randomness. Wire formats stop at the edges (`registry`, `client`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NewType

import orjson

from quantroute.errors import ConfigurationError
from quantroute.pricing import Pricing

__all__ = [
    "Endpoint",
    "EndpointKey",
    "Message",
    "Provider",
    "Quantization",
    "RowKey",
    "Sampling",
    "canonical_json",
    "canonical_messages",
    "canonical_texts",
    "check_messages",
    "fit_for_path",
    "row_key",
    "slugify",
]

RowKey = NewType("RowKey", str)
"""Hex SHA-256 of what determines a row; see `row_key`."""

Message = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`, text only."""


class Quantization(enum.Enum):
    """A number *format*, not a bit count: nvfp4 and int4 both have four bits and differ.

    Source: OpenRouter's vocabulary of quantization labels, read 2026-11 (an open list).
    """

    INT4 = "int4"
    INT8 = "int8"
    FP4 = "fp4"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    FP6 = "fp6"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, label: object) -> Quantization:
        """The member for a published label; UNKNOWN for null, unseen or non-text labels."""
        if isinstance(label, str):
            try:
                return cls(label.strip().lower())
            except ValueError:
                pass
        return cls.UNKNOWN

    @property
    def bits(self) -> int | None:
        """Bits per stored weight, None for UNKNOWN. For display and sorting, never for policy."""
        return _BITS.get(self)


_BITS: Final = {
    Quantization.INT4: 4,
    Quantization.FP4: 4,
    Quantization.MXFP4: 4,
    Quantization.NVFP4: 4,
    Quantization.FP6: 6,
    Quantization.INT8: 8,
    Quantization.FP8: 8,
    Quantization.MXFP8: 8,
    Quantization.FP16: 16,
    Quantization.BF16: 16,
    Quantization.FP32: 32,
}


@dataclass(frozen=True, slots=True, order=True)
class EndpointKey:
    """Identifies one row of a model's endpoint list; tags alone are not unique.

    Source: two endpoints with tag `together` under google/gemma-4-31b-it, July-August 2026.
    """

    model: str
    tag: str
    ordinal: int = 0

    def __str__(self) -> str:
        return self.tag if self.ordinal == 0 else f"{self.tag}#{self.ordinal + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One provider serving one model, as listed at one moment.

    Units: tokens; uptimes in percent (0-100) or None when there was too little traffic.
    `status` is 0 (up), -2 (degraded, 30-minute uptime 80-95%), -5 (below 80%) or another negative.
    `max_output_tokens` and `max_input_tokens` are None when the list gives no limit of its own.
    """

    model: str
    tag: str
    provider_name: str
    quantization: Quantization
    pricing: Pricing
    ordinal: int = 0
    quantization_label: str | None = None
    status: int = 0
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    max_input_tokens: int | None = None
    supported_parameters: frozenset[str] = frozenset()
    uptime_5m_percent: float | None = None
    uptime_30m_percent: float | None = None
    uptime_1d_percent: float | None = None
    served_name: str | None = None  # right half of `name`, e.g. "moonshotai/kimi-k2.5-0127"
    is_local: bool = False  # a server of the user's own, not behind the service
    key: EndpointKey = field(init=False, repr=False, compare=False)
    """Identity within one list."""
    is_degraded: bool = field(init=False, repr=False, compare=False)
    """Listed at reduced priority: 80-95% of the last half hour's requests succeeded."""

    def __post_init__(self) -> None:
        # Made once: each request asks for them a dozen times.
        object.__setattr__(self, "key", EndpointKey(self.model, self.tag, self.ordinal))
        object.__setattr__(self, "is_degraded", self.status == -2)

    @property
    def provider_slug(self) -> str:
        """The tag's first segment: what request fields want, unlike the display name."""
        return self.tag.split("/", 1)[0]

    @property
    def is_down(self) -> bool:
        """Listed as down (-5) or with a status whose meaning is not published."""
        return self.status < 0 and not self.is_degraded

    def output_limit_tokens(self, *, input_tokens: int, wanted_tokens: int) -> int:
        """The `max_tokens` to send: the smallest of what is wanted, allowed and left in context.

        Zero or less means that the prompt does not fit.
        """
        limit = wanted_tokens  # compared by hand: a call of `min` takes three times as long
        if self.max_output_tokens is not None and self.max_output_tokens < limit:
            limit = self.max_output_tokens
        if self.context_tokens is not None and self.context_tokens - input_tokens < limit:
            limit = self.context_tokens - input_tokens
        if self.max_input_tokens is not None and input_tokens > self.max_input_tokens:
            return 0
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters; None leaves the provider's default and is not sent.

    `reasoning` is True (on), False (off) or None (the model's default); `reasoning_effort` is one
    of the service's words and implies on.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    reasoning: bool | None = None
    reasoning_effort: str | None = None
    # Made once: a run has one Sampling and asks it several times per request.
    _parameters: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    _required: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("frequency_penalty", -2.0, 2.0),
            ("presence_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, 2.0),
        ):
            number = getattr(self, name)
            if number is None:
                continue
            if not low <= number <= high:
                raise ConfigurationError(f"{name} must be in [{low}, {high}], not {number}")
            # 1 and 1.0 are equal but print differently, and row keys are made of what prints.
            object.__setattr__(self, name, float(number) + 0.0)
        if self.top_k is not None and self.top_k < 0:
            raise ConfigurationError(f"top_k must not be negative: {self.top_k}")
        if isinstance(self.stop, str):  # a sequence too: of letters, at each of which to stop
            raise ConfigurationError(f"stop takes a list of texts: ({self.stop!r},)")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > 4 or not all(self.stop):
            raise ConfigurationError("stop takes one to four non-empty strings")
        if self.reasoning is False and self.reasoning_effort not in (None, "none"):
            raise ConfigurationError("reasoning is off but an effort is asked; set only one")
        parameters = _parameters(self)
        object.__setattr__(self, "_parameters", parameters)
        object.__setattr__(self, "_required", frozenset(parameters) | {"max_tokens"})

    def parameters(self) -> dict[str, Any]:
        """The body fields to send, by their published names; only what is set."""
        return dict(self._parameters)

    def required_parameters(self) -> frozenset[str]:
        """Names an endpoint must list as supported, else it would drop them silently."""
        return self._required


def _parameters(sampling: Sampling) -> Mapping[str, Any]:
    body: dict[str, Any] = {
        item.name: getattr(sampling, item.name)
        for item in fields(sampling)
        if item.init
        and item.name not in ("stop", "reasoning", "reasoning_effort")
        and getattr(sampling, item.name) is not None
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.reasoning_effort is not None:
        body["reasoning"] = {"effort": sampling.reasoning_effort}
    elif sampling.reasoning is not None:
        body["reasoning"] = {"enabled": sampling.reasoning}
    return body


_ROLES: Final = frozenset({"system", "user", "assistant"})
_PLAIN_FIELDS: Final = frozenset({"role", "content"})


def check_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, verified to be text that a chat request can carry.

    Raises:
        ConfigurationError: empty, an unknown role, content that is not text, lone surrogates, or
            further fields that are not JSON.
    """
    if not messages:
        raise ConfigurationError("a request needs at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigurationError(
                f"message {position}: must be a mapping with role and content, "
                f"not {type(message).__name__}"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            raise ConfigurationError(
                f"message {position}: role must be one of {sorted(_ROLES)}, not {role!r}"
            )
        if not isinstance(content, str):
            raise ConfigurationError(
                f"message {position}: content must be text, not {type(content).__name__}"
            )
        _check_sendable(message, position)
    return tuple(messages)


def _check_sendable(message: Message, position: int) -> None:
    # Here, since a body that cannot be encoded must not be noticed after money was set aside.
    try:
        if message.keys() == _PLAIN_FIELDS:  # the usual case, without making JSON of it
            message["content"].encode()
        else:
            _sendable(dict(message)).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"message {position}: holds a lone surrogate and is not valid Unicode"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"message {position}: is not JSON: {error}") from None


# Encoders are made once: json.dumps with options makes a new one per call, twenty microseconds.
_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode
_sendable = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: object) -> str:
    """One spelling per value: sorted keys, no blanks, ASCII only, floats as they print."""
    return _canonical(value)


def canonical_messages(messages: Sequence[Message]) -> str:
    """`canonical_json` of messages; a tenth of the time for those that are plain ASCII text."""
    plain = None
    for message in messages:  # not `all`: a generator takes longer than what it looks at
        if message.keys() != _PLAIN_FIELDS or not isinstance(message["content"], str):
            break
    else:
        plain = _plain_json(messages)
    return _canonical([dict(message) for message in messages]) if plain is None else plain


def canonical_texts(texts: Sequence[str]) -> str:
    """`canonical_json` of a list of texts; a tenth of the time for those that are plain ASCII."""
    plain = _plain_json(texts)
    return _canonical(list(texts)) if plain is None else plain


def _plain_json(value: Sequence[Any]) -> str | None:
    """`canonical_json` of something with nothing but text in it, if that is plain ASCII.

    orjson and json then differ in how they spell what is not ASCII, and in the one character of
    ASCII that neither prints nor stands below the blank.
    """
    try:
        raw = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or a mapping that is no dict
        return None
    return raw.decode() if raw.isascii() and b"\x7f" not in raw else None


def row_key(
    *, model: str, messages: Sequence[Any], sampling: Sampling, rollout: int = 0, salt: str = ""
) -> RowKey:
    """Hash of what determines a row; equal keys are the same row, whatever file they came from.

    The output limit is left out on purpose: it cuts an answer short but does not change its
    distribution, and truncated rows must be redoable at a higher limit without touching good ones.
    `salt` carries a policy class when rows of different policies must not meet.
    """
    identity = (
        f'{{"messages":{canonical_messages(messages)}{_settings(model, sampling, rollout, salt)}'
    )
    return RowKey(hashlib.sha256(identity.encode()).hexdigest())


@functools.lru_cache(maxsize=256)  # a run has a handful of settings, and a million rows
def _settings(model: str, sampling: Sampling, rollout: int, salt: str) -> str:
    """The canonical JSON of what identifies a row, from behind its messages ("me" < "mo") on."""
    settings = canonical_json(
        {
            "model": model,
            "sampling": sampling.parameters(),
            "rollout": rollout,
            "salt": salt,
        }
    )
    return f",{settings[1:]}"


def fit_for_path(text: str) -> str:
    """`text` as one part of a path, of a file or an account: "/" and oddities become "-"."""
    kept = (character if character.isalnum() or character in "._-" else "-" for character in text)
    return "".join(kept) or "-"


@functools.lru_cache(maxsize=1_024)  # asked three times per answer, for the same few companies
def slugify(name: str) -> str:
    """Lower case letters and digits only: what two spellings of one provider share."""
    return "".join(character for character in name.casefold() if character.isalnum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A company on the service: `slug` for requests, `name` as answers print it."""

    slug: str
    name: str
    headquarters: str | None = None
    datacenters: tuple[str, ...] = field(default=())
