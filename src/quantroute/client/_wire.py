"""The service's answers as pydantic models: everything optional, nothing fatal, nothing guessed.

A field of the wrong type becomes None ("not said") instead of failing the paid answer around it.
Unknown fields are kept. Nothing outside `client` sees these names.

Source: recorded OpenRouter traffic, November 2025 to August 2026, and its published schema.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

__all__ = ["WireChoice", "WireError", "WireGeneration", "WireMessage", "WireReply", "WireUsage"]


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


class _Wire(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


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
    summary: Text = None


class WireMessage(_Wire):
    """`message` of a whole answer, or `delta` of a chunk."""

    content: Text = None
    refusal: Text = None
    reasoning: Text = None
    reasoning_content: Text = None
    reasoning_details: Annotated[
        list[Annotated[WireReasoningDetail | None, WrapValidator(_or_none)]] | None,
        WrapValidator(_or_none),
    ] = None


class WireErrorMetadata(_Wire):
    provider_name: Text = None
    error_type: Text = None
    provider_code: Any = None
    raw: Any = None
    reasons: Any = None
    flagged_input: Any = None


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
    label: Annotated[None, BeforeValidator(lambda _: None)] = Field(default=None, exclude=True)
