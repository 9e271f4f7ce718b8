"""The service's answers as pydantic models: everything optional, nothing fatal, nothing guessed.

A field of the wrong type becomes None ("not said") instead of failing the paid answer around it.
Unknown fields are kept. Nothing outside `client` sees these names.

Bodies are read twice as the need be: `read_usual` decodes the usual shape in one pass, strictly and
without Python code per field (2 instead of 46 microseconds), and the tolerant models take whatever
does not fit. Where both fit they say the same, which tests prove.

Source: recorded OpenRouter traffic, November 2025 to August 2026, and its published schema.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

__all__ = [
    "AnyMessage",
    "AnyReply",
    "AnyUsage",
    "WireChoice",
    "WireError",
    "WireGeneration",
    "WireMessage",
    "WireReply",
    "WireUsage",
    "read_any",
    "read_usual",
]


def _or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


def _count(value: Any) -> int | None:
    """A token count from 12, 12.0, "12" or Decimal("12"); None from anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = Decimal(value.strip() if isinstance(value, str) else value)
    except ArithmeticError:
        return None
    if not number.is_finite() or number < 0 or number != number.to_integral_value():
        return None
    return int(number) if number < 2**53 else None


def _code(value: Any) -> int | None:
    """An error code from 429 or "429"; None from words such as "server_error"."""
    code = _count(value)
    return code if code is not None and 100 <= code <= 599 else None


Count = Annotated[int | None, BeforeValidator(_count)]
Text = Annotated[str | None, WrapValidator(_or_none)]
Flag = Annotated[bool | None, WrapValidator(_or_none)]


# `defer_build`: a model's validator is made when the first answer needs it, not at import.
class _Wire(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)


class WirePromptDetails(_Wire):
    cached_tokens: Count = None
    cache_write_tokens: Count = None


class WireCompletionDetails(_Wire):
    reasoning_tokens: Count = None


class WireCostDetails(_Wire):
    upstream_inference_cost: Any = None


class WireUsage(_Wire):
    prompt_tokens: Count = None
    completion_tokens: Count = None
    cost: Any = None
    is_byok: Flag = None
    prompt_tokens_details: Annotated[WirePromptDetails | None, WrapValidator(_or_none)] = None
    completion_tokens_details: Annotated[WireCompletionDetails | None, WrapValidator(_or_none)] = (
        None
    )
    cost_details: Annotated[WireCostDetails | None, WrapValidator(_or_none)] = None


class WireReasoningDetail(_Wire):
    type: Text = None
    text: Text = None


class WireMessage(_Wire):
    """`message` of a whole answer, or `delta` of a chunk."""

    content: Text = None
    reasoning: Text = None
    reasoning_content: Text = None
    reasoning_details: Annotated[
        list[Annotated[WireReasoningDetail | None, WrapValidator(_or_none)]] | None,
        WrapValidator(_or_none),
    ] = None


class WireErrorMetadata(_Wire):
    provider_name: Text = None
    error_type: Text = None
    raw: Any = None


class WireAvailability(_Wire):
    code: Text = None
    retryable: Flag = None
    retry_after: Any = None


class WireError(_Wire):
    code: Any = None
    http_status: Any = None
    message: Text = None
    type: Text = None
    metadata: Annotated[WireErrorMetadata | None, WrapValidator(_or_none)] = None
    availability: Annotated[WireAvailability | None, WrapValidator(_or_none)] = None

    @property
    def status(self) -> int | None:
        """The error's own HTTP-like code, if it is a number."""
        return _code(self.code) or _code(self.http_status)


class WireChoice(_Wire):
    finish_reason: Text = None
    native_finish_reason: Text = None
    message: Annotated[WireMessage | None, WrapValidator(_or_none)] = None
    delta: Annotated[WireMessage | None, WrapValidator(_or_none)] = None
    error: Annotated[WireError | None, WrapValidator(_or_none)] = None


class WireReply(_Wire):
    """A whole answer, one chunk of a stream, or an error body."""

    id: Text = None
    model: Text = None
    provider: Text = None
    error: Any = None
    choices: Annotated[
        list[Annotated[WireChoice | None, WrapValidator(_or_none)]] | None,
        WrapValidator(_or_none),
    ] = None
    usage: Annotated[WireUsage | None, WrapValidator(_or_none)] = None

    @property
    def failure(self) -> WireError | None:
        """The error of the body or of its first choice; a bare string counts too."""
        if isinstance(self.error, dict):
            return WireError.model_validate(self.error)
        if self.error:
            return WireError(message=str(self.error))
        return next(
            (choice.error for choice in self.choices or () if choice and choice.error), None
        )

    @property
    def first_choice(self) -> WireChoice | None:
        """The first usable choice; we never ask for more than one."""
        return next((choice for choice in self.choices or () if choice), None)


UsualCount: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)] | None
UsualAmount: TypeAlias = Decimal | None
"""Made of the number's text, or of the text itself; never by way of a float."""


class UsualPromptDetails(Struct):
    cached_tokens: UsualCount = None
    cache_write_tokens: UsualCount = None


class UsualCompletionDetails(Struct):
    reasoning_tokens: UsualCount = None


class UsualCostDetails(Struct):
    upstream_inference_cost: UsualAmount = None


class UsualUsage(Struct):
    prompt_tokens: UsualCount = None
    completion_tokens: UsualCount = None
    cost: UsualAmount = None
    is_byok: bool | None = None
    prompt_tokens_details: UsualPromptDetails | None = None
    completion_tokens_details: UsualCompletionDetails | None = None
    cost_details: UsualCostDetails | None = None


class UsualReasoningDetail(Struct):
    type: str | None = None
    text: str | None = None


class UsualMessage(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: list[UsualReasoningDetail] | None = None


class UsualChoice(Struct):
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    message: UsualMessage | None = None
    delta: UsualMessage | None = None
    error: None = None


class UsualReply(Struct):
    """A whole answer or a chunk as nearly all are: every field of its own type, and no error."""

    id: str | None = None
    model: str | None = None
    provider: str | None = None
    error: None = None
    choices: list[UsualChoice] | None = None
    usage: UsualUsage | None = None

    @property
    def failure(self) -> None:
        """None: a body with an error is not of this shape."""
        return

    @property
    def first_choice(self) -> UsualChoice | None:
        """The first choice; we never ask for more than one."""
        return self.choices[0] if self.choices else None


AnyReply: TypeAlias = WireReply | UsualReply
AnyMessage: TypeAlias = WireMessage | UsualMessage
AnyUsage: TypeAlias = WireUsage | UsualUsage


_decode_usual: Final = msgspec.json.Decoder(UsualReply).decode


def read_usual(raw: bytes) -> UsualReply | None:
    """The body if it is of the usual shape; None leaves it to the tolerant models."""
    try:
        if not raw.isascii():
            raw.decode()  # of fields that are passed over nobody else would check it
        return _decode_usual(raw)
    except (ValueError, RecursionError):
        return None


def read_any(body: object) -> WireReply | None:
    """Decoded JSON as a reply, whatever it holds; None if it is no object."""
    return WireReply.model_validate(body) if isinstance(body, dict) else None


class WireGeneration(_Wire):
    """`data` of /generation: the settled bill of one request."""

    id: Text = None
    total_cost: Any = None
    upstream_inference_cost: Any = None
    is_byok: Flag = None
    provider_name: Text = None
    model: Text = None
    cancelled: Flag = None
    finish_reason: Text = None
    native_tokens_prompt: Count = None
    native_tokens_completion: Count = None
    native_tokens_reasoning: Count = None
    native_tokens_cached: Count = None


class WireKey(_Wire):
    """`data` of /key. The label is not read: it shows parts of the key."""

    usage: Any = None
    byok_usage: Any = None
    limit: Any = None
    limit_remaining: Any = None
    limit_reset: Text = None
    expires_at: Text = None
    label: Annotated[None, BeforeValidator(lambda _: None)] = Field(default=None, exclude=True)
