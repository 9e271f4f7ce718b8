"""What comes in: an OpenAI chat request, read strictly. Nothing asked for is dropped silently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantroute.client import ChatRequest
from quantroute.domain import Message, Sampling
from quantroute.errors import ConfigurationError
from quantroute.ledger import Account

__all__ = ["ProxyRequest", "parse_request"]

#: Fields without an effect on the answer; taken and left alone.
_HARMLESS: Final = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text]
    name: None = None
    refusal: None = None

    def plain(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": role, "content": text}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Reasoning(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    effort: str | None = None


class _Body(BaseModel):
    """The fields that are understood; the names are OpenAI's and OpenRouter's."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[_Message]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: int | None = None
    min_p: _Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    repetition_penalty: _Number | None = None
    reasoning: _Reasoning | None = None
    reasoning_effort: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None

    def sampling(self) -> Sampling:
        reasoning = self.reasoning or _Reasoning()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=stop,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            reasoning=reasoning.enabled,
            reasoning_effort=self.reasoning_effort or reasoning.effort,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A request as the client understands it, and the form its answer is to have."""

    chat: ChatRequest
    is_streamed: bool
    wants_usage: bool


def parse_request(
    raw: bytes, *, account: Account, default_max_output_tokens: int, request_id: str
) -> ProxyRequest:
    """The request in a body.

    Raises:
        ConfigurationError: not JSON, or something is asked that would not be done: tools, several
            choices, images, log probabilities, an unknown field.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"body: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigurationError("body: must be a JSON object")
    # Null asks for nothing: many libraries send it for whatever was left out.
    asked = {
        name: value for name, value in fields.items() if value is not None and name not in _HARMLESS
    }
    try:
        body = _Body.model_validate(asked)
    except ValidationError as error:
        raise ConfigurationError(_problems(error.errors(include_url=False))) from None
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    return ProxyRequest(
        chat=ChatRequest(
            model=body.model,
            messages=tuple(message.plain() for message in body.messages),
            max_output_tokens=limits[0] if limits else default_max_output_tokens,
            sampling=body.sampling(),
            account=account,
            request_id=request_id,
        ),
        is_streamed=bool(body.stream),
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _problems(items: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, str] = {}
    for item in items:
        where = ".".join(str(part) for part in item["loc"]) or "body"
        if item["type"] == "extra_forbidden":
            problem = "is not supported here, and is not dropped silently: leave it out"
        else:
            problem = str(item["msg"])
        found.setdefault(where, problem)
    return "; ".join(f"{where}: {problem}" for where, problem in found.items())
