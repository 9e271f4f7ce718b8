"""How earlier reasoning is passed back in a conversation: one text, in the field an endpoint reads.

Answers carry the same reasoning as `reasoning`, `reasoning_details` or `reasoning_content`, or
twice; asked again, each endpoint has a field it reads. Conversations are kept with `reasoning`
alone, and this writes the form that the endpoint of the attempt wants, in that attempt's body.

Known forms, read 2026-11: OpenRouter takes `reasoning` and `reasoning_details`, and
`reasoning_content` as an alias. Moonshot's own service refuses assistant turns without
`reasoning_content` when the Kimi models think (status 400), so its endpoint is sent that name;
servers based on vLLM and SGLang read it, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quantroute.domain import Endpoint, Message

__all__ = ["ReplayForm", "demands_reasoning", "form_for", "lacks_reasoning", "replayed"]


class ReplayForm(enum.Enum):
    """The field that carries an assistant turn's reasoning."""

    REASONING = "reasoning"
    DETAILS = "reasoning_details"
    CONTENT = "reasoning_content"
    NONE = "none"  # sent without


#: By the company's slug; everybody else reads `reasoning`.
_FORMS: Final[Mapping[str, ReplayForm]] = {"moonshotai": ReplayForm.CONTENT}
#: Companies that refuse later turns of a thinking model without what it thought before.
_DEMANDING: Final = frozenset({"moonshotai"})
_FIELDS: Final = frozenset({"reasoning", "reasoning_details", "reasoning_content"})
_TEXT: Final = "reasoning.text"


def form_for(endpoint: Endpoint) -> ReplayForm:
    """The form for an endpoint behind the service."""
    return _FORMS.get(endpoint.provider_slug, ReplayForm.REASONING)


def demands_reasoning(endpoint: Endpoint) -> bool:
    """Whether an endpoint is known to refuse what `lacks_reasoning`, while the model thinks."""
    return endpoint.provider_slug in _DEMANDING


def lacks_reasoning(messages: Sequence[Message]) -> bool:
    """Whether an assistant turn comes without its reasoning."""
    return any(message.get("role") == "assistant" and _text(message) == "" for message in messages)


def replayed(messages: Sequence[Message], form: ReplayForm) -> list[Message]:
    """The messages with each turn's reasoning once, in `form`; the others as they are.

    A turn whose details are more than text (encrypted, say) can be rewritten by nobody and is left.
    """
    return [_rewritten(message, form) for message in messages]


def _rewritten(message: Message, form: ReplayForm) -> Message:
    if _FIELDS.isdisjoint(message):
        return message
    text = _text(message)
    if text is None:
        return message
    plain: dict[str, Any] = {name: value for name, value in message.items() if name not in _FIELDS}
    if not text or form is ReplayForm.NONE:
        return plain
    if form is ReplayForm.DETAILS:
        plain[form.value] = [{"type": _TEXT, "text": text, "format": "unknown", "index": 0}]
    else:
        plain[form.value] = text
    return plain


def _text(message: Message) -> str | None:
    """The reasoning, by the first name that has text; None if it is not plain text."""
    details = message.get("reasoning_details")
    if isinstance(details, Sequence) and not isinstance(details, str) and details:
        texts = [
            item["text"]
            for item in details
            if isinstance(item, Mapping)
            and item.get("type") == _TEXT
            and isinstance(item.get("text"), str)
        ]
        if len(texts) != len(details):
            return None
        return str(message.get("reasoning") or "".join(texts))
    return str(message.get("reasoning") or message.get("reasoning_content") or "")
