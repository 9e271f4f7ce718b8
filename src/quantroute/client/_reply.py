"""From bytes to a `Reply`: one shape for whole bodies, streams, errors and rubbish.

No I/O. Both decoders end in the same `Reply`, so that classification cannot differ between a
streamed and a non-streamed answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from msgspec import Struct

from quantroute._headers import wait_of
from quantroute._json import loads
from quantroute.client._sse import EventStream
from quantroute.client._wire import (
    AnyMessage,
    AnyReply,
    AnyUsage,
    WireError,
    read_any,
    read_usual,
)
from quantroute.money import parse_reported_usd
from quantroute.pricing import TokenUsage
from quantroute.secrets import Redactor

__all__ = [
    "BodyDecoder",
    "Reply",
    "ServiceError",
    "StreamDecoder",
    "billed_usd",
    "shortened",
    "storable",
]

_LONGEST_NAME: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceError:
    """An error the service reported, by status or inside a body. `message` is redacted."""

    status: int | None
    message: str
    error_type: str | None = None
    provider_name: str | None = None
    is_retryable: bool | None = None
    retry_after_s: float | None = None


class Reply(Struct, frozen=True, kw_only=True):
    """Everything an exchange told, before anyone judges it.

    `is_complete` is False when the body was cut or a stream ended without finish reason and
    without [DONE]. `cost_usd` is the service's figure, upstream share included for BYOK.
    """

    http_status: int
    is_json: bool
    is_complete: bool
    error: ServiceError | None = None
    has_choice: bool = False
    content: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    usage: TokenUsage | None = None
    cost_usd: Decimal | None = None
    generation_id: str | None = None
    model: str | None = None
    provider: str | None = None
    retry_after_s: float | None = None
    flags: tuple[str, ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether the status was one of success; a transforming proxy may make a 203 of a 200."""
        return 200 <= self.http_status < 300

    @property
    def has_text(self) -> bool:
        """Whether the model produced anything at all."""
        return bool(self.content or self.reasoning)


def _read(raw: bytes) -> AnyReply | None:
    """A whole body; None if it is not a JSON object."""
    usual = read_usual(raw)
    if usual is not None:
        return usual
    try:
        return read_any(loads(raw))
    except ValueError:
        return None


@dataclass(slots=True)
class BodyDecoder:
    """Decodes a whole body, which may start with any amount of keep-alive blanks."""

    http_status: int
    redactor: Redactor
    retry_after_s: float | None = None
    header_id: str | None = None
    _chunks: list[bytes] = field(default_factory=list, init=False)

    @property
    def generation_id(self) -> str | None:
        """The id, if the headers have named it; a body is read when it is whole."""
        return self.header_id

    def feed(self, chunk: bytes) -> bool:
        """Take a chunk; True once the answer itself (not padding) has begun."""
        if not self._chunks:
            chunk = chunk.lstrip()
        if chunk:
            self._chunks.append(chunk)
        return bool(self._chunks)

    def finish(self, *, is_cut: bool) -> Reply:
        """The reply; `is_cut` when the connection ended before the body did."""
        raw = b"".join(self._chunks)
        flags: list[str] = []
        if not self.redactor.is_clean(raw):
            raw = self.redactor.answer(raw.decode("utf-8", "replace")).encode()
            flags.append("secret_redacted")
        wire = _read(raw)
        assembly = _Assembly(self.http_status, self.redactor, self.header_id)
        if wire is not None:
            assembly.take(wire, is_delta=False)
            if is_cut:
                flags.append("cut_after_json")
        return assembly.reply(
            is_json=wire is not None,
            is_complete=wire is not None,
            retry_after_s=self.retry_after_s,
            flags=flags,
            excerpt="" if wire is not None and self.http_status < 300 else _excerpt(raw),
        )


@dataclass(slots=True)
class StreamDecoder:
    """Decodes an event stream chunk by chunk."""

    http_status: int
    redactor: Redactor
    retry_after_s: float | None = None
    header_id: str | None = None
    _events: EventStream = field(default_factory=EventStream, init=False)
    _assembly: _Assembly = field(init=False)
    _saw_done: bool = field(default=False, init=False)
    _has_hole: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._assembly = _Assembly(self.http_status, self.redactor, self.header_id)

    @property
    def generation_id(self) -> str | None:
        """The id, as soon as the headers or an event have named it."""
        named = self._assembly.generation_id
        return None if named is None else storable(named, self.redactor)

    def feed(self, chunk: bytes) -> bool:
        """Take a chunk; True once the first event (not a comment) has arrived."""
        self._take(self._events.feed(chunk))
        return self._assembly.events > 0

    def finish(self, *, is_cut: bool) -> Reply:
        """The reply; a stream is whole if it said [DONE] or gave a finish reason."""
        del is_cut  # what was said decides, not how the connection ended
        self._take(self._events.close())
        flags = []
        if self._saw_done and self._assembly.finish_reason is None:
            flags.append("no_finish_reason")
        elif self._assembly.finish_reason is not None and not self._saw_done:
            flags.append("no_done")
        if self._has_hole:
            flags.append("malformed_event")
        return self._assembly.reply(
            is_json=self._assembly.events > 0,
            is_complete=self._saw_done or self._assembly.finish_reason is not None,
            retry_after_s=self.retry_after_s,
            flags=flags,
        )

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            for chunk in self._chunks(payload):
                self._assembly.take(chunk, is_delta=True)

    def _chunks(self, payload: bytes) -> list[AnyReply]:
        text = payload.strip()
        if text == b"[DONE]":
            self._saw_done = True
            return []
        if not text or text.startswith(b":"):  # "data: : KEEPALIVE" has been seen
            return []
        usual = read_usual(text)
        if usual is not None:
            return [usual]
        try:
            tolerated = read_any(loads(text))
        except ValueError:
            pass
        else:
            return [] if tolerated is None else [tolerated]
        if b"\n" not in text:
            # A torn object was a piece of the answer; other words are somebody's keep-alive.
            # What comes behind the finish reason is no text.
            if text.startswith(b"{") and self._assembly.finish_reason is None:
                self._has_hole = True
            return []
        # Two events glued without the blank line between them: each line is JSON by itself.
        return [chunk for line in text.split(b"\n") for chunk in self._chunks(line)]


@dataclass(slots=True)
class _Assembly:
    """Puts a reply together from one body or from many chunks."""

    http_status: int
    redactor: Redactor
    generation_id: str | None
    events: int = 0
    finish_reason: str | None = None
    _native_finish_reason: str | None = None
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _usage: AnyUsage | None = None
    _error: ServiceError | None = None
    _model: str | None = None
    _provider: str | None = None
    _has_choice: bool = False

    def take(self, wire: AnyReply, *, is_delta: bool) -> None:
        """Add one body or chunk. `error` is looked at first, whatever else the chunk holds."""
        self.events += 1
        self.generation_id = wire.id or self.generation_id
        self._model = wire.model or self._model
        self._provider = wire.provider or self._provider
        usage = wire.usage
        if usage is not None and (usage.cost is not None or usage.completion_tokens is not None):
            self._usage = usage  # the last one that says something: usage is cumulative
        failure = wire.failure
        if failure is not None and self._error is None:
            self._error = _service_error(failure, self.redactor)
        choice = wire.first_choice
        if choice is None:
            return
        self.finish_reason = choice.finish_reason or self.finish_reason
        self._native_finish_reason = choice.native_finish_reason or self._native_finish_reason
        message = choice.delta if is_delta else choice.message
        message = message or choice.message or choice.delta
        if message is not None:
            self._has_choice = True
            self._content.append(message.content or "")
            self._reasoning.append(reasoning_text(message))

    def reply(
        self,
        *,
        is_json: bool,
        is_complete: bool,
        retry_after_s: float | None,
        flags: list[str],
        excerpt: str = "",
    ) -> Reply:
        """The finished reply, with key material cut out of whatever was put together."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        clean_content = self.redactor.answer(content)
        clean_reasoning = self.redactor.answer(reasoning)
        if (clean_content, clean_reasoning) != (content, reasoning):
            flags = [*flags, "secret_redacted"]  # a key cut in two by chunk borders
        usage, cost_usd = _usage(self._usage)
        finish_reason, native_finish_reason, generation_id, model, provider = self._clean(
            self.finish_reason,
            self._native_finish_reason,
            self.generation_id,
            self._model,
            self._provider,
        )
        error = self._error
        if error is None and not 200 <= self.http_status < 300:
            # Not the service's form of an error: what was said all the same, `detail` or a page.
            said = self.redactor.text(excerpt) or f"status {self.http_status} and no words"
            error = ServiceError(status=None, message=said)
        return Reply(
            http_status=self.http_status,
            is_json=is_json,
            is_complete=is_complete,
            error=error,
            has_choice=self._has_choice,
            content=clean_content,
            reasoning=clean_reasoning or None,
            finish_reason=finish_reason,
            native_finish_reason=native_finish_reason,
            usage=usage,
            cost_usd=cost_usd,
            generation_id=generation_id,
            model=model,
            provider=provider,
            retry_after_s=retry_after_s,
            flags=tuple(dict.fromkeys(flags)),
        )

    def _clean(self, *names: str | None) -> tuple[str | None, ...]:
        """Names and ids as they may be stored: no key in them, and text that UTF-8 can carry."""
        joined = "\n".join([name for name in names if name])
        is_plain = joined.isascii() and len(joined) <= _LONGEST_NAME
        if is_plain and self.redactor.answer(joined) == joined:
            return names  # nearly always: one look instead of five
        return tuple(None if name is None else storable(name, self.redactor) for name in names)


def storable(name: str, redactor: Redactor) -> str:
    """A name or an id of the service's without our key, short, and text that UTF-8 can carry."""
    return redactor.answer(name).encode("utf-8", "replace").decode()[:_LONGEST_NAME]


def reasoning_text(message: AnyMessage) -> str:
    """The reasoning of a message, once.

    Providers send the same text under `reasoning` and again in `reasoning_details`, or in one of
    them only, or as `reasoning_content`: the first alias that has text wins, never two.
    """
    if message.reasoning:
        return message.reasoning
    details = [
        detail.text
        for detail in message.reasoning_details or ()
        if detail and detail.text and detail.type in (None, "reasoning.text")
    ]
    return "".join(details) or message.reasoning_content or ""


def _usage(wire: AnyUsage | None) -> tuple[TokenUsage | None, Decimal | None]:
    if wire is None:
        return None, None
    usage = None
    if wire.prompt_tokens is not None and wire.completion_tokens is not None:
        prompt, completion = wire.prompt_tokens_details, wire.completion_tokens_details
        usage = TokenUsage(
            input_tokens=wire.prompt_tokens,
            output_tokens=wire.completion_tokens,
            reasoning_tokens=completion.reasoning_tokens if completion else None,
            cached_tokens=prompt.cached_tokens if prompt else None,
            cache_write_tokens=prompt.cache_write_tokens if prompt else None,
        )
    details = wire.cost_details
    upstream = details.upstream_inference_cost if details else None
    return usage, billed_usd(wire.cost, upstream=upstream, is_byok=bool(wire.is_byok))


def billed_usd(cost: object, *, upstream: object, is_byok: bool) -> Decimal | None:
    """What an answer or its record cost in all; None if a part of it is not said.

    On BYOK `cost` is the service's fee and the provider bills its share to the user's own account;
    otherwise the upstream cost repeats `cost` and must not be added.
    """
    cost_usd = parse_reported_usd(cost)
    if not is_byok or cost_usd is None:
        return cost_usd
    upstream_usd = parse_reported_usd(upstream)
    return None if upstream_usd is None else cost_usd + upstream_usd


def _service_error(wire: WireError, redactor: Redactor) -> ServiceError:
    metadata, availability = wire.metadata, wire.availability
    message = wire.message or "(no message)"
    if metadata is not None and metadata.raw:
        message = f"{message}: {_raw_text(metadata.raw)}"
    return ServiceError(
        status=wire.status,
        message=shortened(redactor.text(shortened(message, most=4_000))),
        error_type=_first(
            metadata.error_type if metadata else None,
            availability.code if availability else None,
            wire.type,
            wire.code if isinstance(wire.code, str) and wire.status is None else None,
        ),
        provider_name=metadata.provider_name if metadata else None,
        is_retryable=availability.retryable if availability else None,
        retry_after_s=wait_of(availability.retry_after) if availability else None,
    )


def _first(*texts: str | None) -> str | None:
    return next((text for text in texts if text), None)


def _raw_text(raw: object) -> str:
    """`metadata.raw` may be text, JSON text or an object."""
    return raw if isinstance(raw, str) else json.dumps(raw, default=str)


def shortened(text: str, *, most: int = 300) -> str:
    """One line of at most `most` characters that UTF-8 can carry."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _excerpt(raw: bytes) -> str:
    return shortened(raw[:2000].decode("utf-8", "replace"))
