"""What a chat template puts where, found by rendering marks in place of contents.

A template decides how an answer was framed when the model wrote it: what the prompt supplied, what
the model had to write itself, and which token ended its turn. None of it is guessed from names. The
template is rendered with marks (USER, ANSWER, THOUGHT below) and the result is taken apart:

    prompt     ...USER...<|im_assistant|>assistant<|im_middle|><think>
    finished   ...USER...<|im_assistant|>assistant<|im_middle|><think>THOUGHT</think>ANSWER...
                                                 what the model wrote ^

A prompt that is a beginning of the finished rendering shows the model's part exactly. Where the
template hides the thinking of a finished answer, an answer with a tool call may still show it;
where it never shows it, the tag at which the template cuts contents tells how thinking ends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantroute.errors import ConfigurationError
from quantroute.extraction._tokenizer import Message, TargetTokenizer, TemplateFailure

__all__ = ["Form", "ModelPart", "Rerender", "TemplateProfile", "probe_template"]

_USER: Final = "qrUserMark1"
_ANSWER: Final = "qrAnswerMark2"
_THOUGHT: Final = "qrThoughtMark3"
_SYSTEM: Final = "qrSystemMark4"
_LATER: Final = "qrLaterMark5"

#: Names under which templates read reasoning, in the order in which they are tried.
_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
#: Names of switches that templates have for thinking.
_SWITCHES: Final = ("thinking", "enable_thinking")
_MODES: Final = ("thinking", "instant", "default")


class Rerender(enum.Enum):
    """What becomes of the reasoning of the last answer when a conversation is rendered anew."""

    KEPT = "kept"
    EMPTIED = "emptied"  # the think tags stay, with nothing between
    DROPPED = "dropped"
    UNKNOWN_TO_IT = "unknown_to_it"  # a template without any notion of reasoning


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What the model writes around its reasoning and answer.

    Attributes:
        opener: before the reasoning; empty if the prompt supplies it.
        closer: between reasoning and answer.
    """

    opener: str
    closer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A template in one mode of thinking.

    Attributes:
        switches: what is passed to the template in that mode.
        tail: what a prompt ends with, from the end of the user's text.
        reasoning: how an answer with reasoning is written; None if the mode has none.
        plain_lead: what the model writes before an answer without reasoning (usually nothing);
            None if the prompt is no beginning of such a rendering.
        plain_is_prompted: whether an answer without reasoning is what this prompt asks for.
        is_prefix: whether prompts are beginnings of finished conversations as the template writes
            them, so that one can be compared with the other.
        found_by: how `reasoning` became known.
    """

    switches: Mapping[str, Any]
    tail: str
    reasoning: ModelPart | None
    plain_lead: str | None
    plain_is_prompted: bool
    is_prefix: bool
    found_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """All that is known of a template.

    Attributes:
        forms: by mode, "thinking", "instant" and "default" (nothing said).
        switch: names of the template's switches for thinking; empty if it has none.
        has_effort: whether it reads `reasoning_effort`.
        reasoning_field: under which name messages carry reasoning into it.
        end: the token that ends an answer, written by the model.
        default_system: the system prompt it supplies where none is given, if it does.
        rerender: see `Rerender`; anything but KEPT spoils training on re-rendered conversations.
        history_keeps_reasoning: whether the model sees the reasoning of its earlier answers.
        notes: what a person should know.
    """

    forms: Mapping[str, Form]
    switch: tuple[str, ...]
    has_effort: bool
    reasoning_field: str
    end: str
    default_system: str | None
    rerender: Rerender
    history_keeps_reasoning: bool
    notes: tuple[str, ...]

    @property
    def knows_reasoning(self) -> bool:
        """Whether answers with reasoning have a form in any mode."""
        return any(form.reasoning is not None for form in self.forms.values())

    def as_dict(self) -> dict[str, Any]:
        """For a manifest, as JSON values."""
        return {
            "forms": {
                mode: {
                    "switches": dict(form.switches),
                    "prompt_ends_with": form.tail,
                    "opener": form.reasoning.opener if form.reasoning else None,
                    "closer": form.reasoning.closer if form.reasoning else None,
                    "found_by": form.found_by,
                }
                for mode, form in self.forms.items()
            },
            "switch": list(self.switch),
            "end": self.end,
            "default_system": self.default_system,
            "rerender": self.rerender.value,
            "history_keeps_reasoning": self.history_keeps_reasoning,
            "notes": list(self.notes),
        }


def probe_template(
    tokenizer: TargetTokenizer,
    *,
    variables: Mapping[str, Any] | None = None,
    think_opener: str | None = None,
    think_closer: str | None = None,
    end_token: str | None = None,
) -> TemplateProfile:
    """Find out how the template frames answers.

    Args:
        variables: further variables for every rendering.
        think_opener, think_closer, end_token: what the model writes, where you know better.
    Raises:
        ConfigurationError: it cannot render a plain conversation, or no end token is to be found.
    """
    probe = _Probe(tokenizer, dict(variables or {}))
    plain = probe.must(probe.finished())
    if _ANSWER not in plain or _USER not in plain:
        raise ConfigurationError("the chat template leaves out the user's or the model's text")
    end = end_token or _end_token(probe, plain)
    if end not in tokenizer.control:
        raise ConfigurationError(f"end_token: {end!r} is no control token of the tokenizer")
    switch = tuple(name for name in _SWITCHES if probe.depends_on(name, True, False))
    given = (think_opener, think_closer)
    forms = {
        mode: _form(
            probe, _switches(switch, mode), (None, None) if mode == "instant" and switch else given
        )
        for mode in _MODES
    }
    default_system = _default_system(probe)
    history = probe.render(
        [probe.user, probe.answer(thought=True), {"role": "user", "content": _LATER}], prompt=True
    )
    return TemplateProfile(
        forms=forms,
        switch=switch,
        has_effort=probe.depends_on("reasoning_effort", "high", "low"),
        reasoning_field=probe.field,
        end=end,
        default_system=default_system,
        rerender=_rerender(probe, forms),
        history_keeps_reasoning=_THOUGHT in (history or ""),
        notes=tuple(_notes(tokenizer, end, default_system)),
    )


class _Probe:
    """Renders marks; a template's refusal is None."""

    user: Final[Message] = {"role": "user", "content": _USER}

    def __init__(self, tokenizer: TargetTokenizer, variables: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.variables = variables
        self.problem = ""
        self.field = next((name for name in _FIELDS if self._shows(name)), _FIELDS[0])

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> str | None:
        try:
            return self.tokenizer.render(
                messages, prompt=prompt, switches={**self.variables, **(switches or {})}
            )
        except TemplateFailure as problem:
            self.problem = str(problem)
            return None

    def must(self, text: str | None) -> str:
        if text is None:
            raise ConfigurationError(
                f"the chat template cannot render one question and one answer: {self.problem}"
            )
        return text

    def answer(
        self, content: str = _ANSWER, *, thought: bool = False, field: str | None = None
    ) -> dict[str, Any]:
        extra = {field or self.field: _THOUGHT} if thought else {}
        return {"role": "assistant", "content": content, **extra}

    def finished(self, switches: Mapping[str, Any] | None = None, **options: Any) -> str | None:
        return self.render([self.user, self.answer(**options)], switches=switches)

    def prompt(self, switches: Mapping[str, Any] | None = None) -> str:
        return self.must(self.render([self.user], prompt=True, switches=switches))

    def showings(
        self, switches: Mapping[str, Any] | None = None, field: str | None = None
    ) -> Iterator[str]:
        """Renderings of an answer with reasoning: as it is, and with a tool call to keep it new."""
        answer = self.answer(thought=True, field=field)
        attempts: tuple[Any, ...] = (None, {}, "{}")
        for arguments in attempts:
            call = {"name": "f", "arguments": arguments}
            calls = [{"id": "functions.f:0", "type": "function", "function": call}]
            message = answer if arguments is None else {**answer, "tool_calls": calls}
            text = self.render([self.user, message], switches=switches)
            if text is not None and 0 <= text.find(_THOUGHT) < text.find(_ANSWER):
                yield text

    def depends_on(self, name: str, one: object, other: object) -> bool:
        """Whether a prompt differs by the value of a variable."""
        return self.prompt({name: one}) != self.prompt({name: other})

    def _shows(self, field: str) -> bool:
        return next(self.showings(field=field), None) is not None


def _switches(switch: tuple[str, ...], mode: str) -> dict[str, Any]:
    return {} if mode == "default" else dict.fromkeys(switch, mode == "thinking")


def _form(probe: _Probe, switches: Mapping[str, Any], given: tuple[str | None, str | None]) -> Form:
    prompt = probe.prompt(switches)
    part, found_by = _reasoning_part(probe, prompt, switches)
    if given != (None, None):
        part, found_by = _overridden(part, *given), "settings"
    tail = prompt[prompt.rindex(_USER) + len(_USER) :]
    lead = _lead(probe, prompt, switches)
    is_prefix = lead is not None and found_by != "settings"
    if lead is None and part is None and _is_closed(tail):
        lead = ""
    return Form(
        switches=switches,
        tail=tail,
        reasoning=part,
        plain_lead=lead,
        plain_is_prompted=lead is not None and part is None,
        is_prefix=is_prefix,
        found_by=found_by,
    )


def _overridden(part: ModelPart | None, opener: str | None, closer: str | None) -> ModelPart:
    """The part as the settings say, and as found where they say nothing."""
    if part is None and closer is None:
        raise ConfigurationError("think_opener needs think_closer: the template shows neither")
    known = part or ModelPart("", "")
    return ModelPart(
        known.opener if opener is None else opener, known.closer if closer is None else closer
    )


def _reasoning_part(
    probe: _Probe, prompt: str, switches: Mapping[str, Any]
) -> tuple[ModelPart | None, str]:
    """What the model writes around its reasoning after this prompt, and how that was seen."""
    for text in probe.showings(switches):
        if text.startswith(prompt):
            thought, answer = text.index(_THOUGHT), text.index(_ANSWER)
            opener, closer = text[len(prompt) : thought], text[thought + len(_THOUGHT) : answer]
            return ModelPart(opener, closer), "rendering"
    opened = _open_tag(probe, prompt)
    if opened is None:
        return None, "rendering"
    closer = f"{opened[0]}/{opened[1:]}"
    emptied = _lead(probe, prompt, switches)
    if emptied is not None and emptied.startswith(closer):
        return ModelPart("", emptied), "empty pair"
    # Contents that hold the closing tag are cut there by templates that take it for one.
    cut = probe.finished(switches, content=f"{_THOUGHT}{closer}{_ANSWER}")
    if cut is not None and _ANSWER in cut and _THOUGHT not in cut:
        return ModelPart("", closer), "cut of contents"
    return None, "rendering"


def _open_tag(probe: _Probe, prompt: str) -> str | None:
    """The tag that the prompt leaves open at its end: `<think>`, by whatever name."""
    tail = prompt[prompt.rindex(_USER) + len(_USER) :].rstrip()
    token = next(
        (match[0] for match in probe.tokenizer.controls(tail) if match.end() == len(tail)), ""
    )
    if not token:
        start = tail.rfind("<")
        token = tail[start:] if start >= 0 and tail.endswith(">") else ""
    return token if len(token) > 2 and token[1] != "/" else None


def _is_closed(tail: str) -> bool:
    """Whether the prompt ends with a pair of tags around nothing."""
    return re.search(r"<([^<>/]+)>\s*</\1>\s*$", tail) is not None


def _lead(probe: _Probe, prompt: str, switches: Mapping[str, Any]) -> str | None:
    """What stands between prompt and answer where there is no reasoning."""
    text = probe.finished(switches)
    if text is None or not text.startswith(prompt):
        return None
    return text[len(prompt) : text.index(_ANSWER)]


def _end_token(probe: _Probe, plain: str) -> str:
    """The control token right after a finished answer."""
    followed = probe.render([probe.user, probe.answer(), {"role": "user", "content": _LATER}])
    for text in (plain, followed or ""):
        after = text[text.find(_ANSWER) + len(_ANSWER) :]
        if (token := probe.tokenizer.leading_control(after)) is not None:
            return token
    raise ConfigurationError(
        "the chat template writes no control token right after an answer; say what ends the "
        "model's turn (end_token)"
    )


def _default_system(probe: _Probe) -> str | None:
    """The text that stands where a system prompt would, though none was given."""
    own = probe.render([{"role": "system", "content": _SYSTEM}, probe.user], prompt=True)
    if own is None or not 0 <= own.find(_SYSTEM) < own.find(_USER):
        return None
    before, rest = own.split(_SYSTEM, 1)
    between = rest[: rest.index(_USER)]
    bare = probe.prompt()
    found = bare[: bare.index(_USER)]
    if not (before and found.startswith(before) and found.endswith(between)):
        return None
    if len(found) < len(before) + len(between):
        return None
    return found[len(before) : len(found) - len(between)]


def _rerender(probe: _Probe, forms: Mapping[str, Form]) -> Rerender:
    form = forms["thinking"] if forms["thinking"].reasoning else forms["default"]
    text = probe.finished(form.switches, thought=True) or ""
    if form.reasoning is None:
        return Rerender.UNKNOWN_TO_IT
    if _THOUGHT in text:
        return Rerender.KEPT
    return Rerender.EMPTIED if f"{form.reasoning.closer}{_ANSWER}" in text else Rerender.DROPPED


def _notes(tokenizer: TargetTokenizer, end: str, default_system: str | None) -> Iterator[str]:
    ends = tokenizer.generation_ends
    if ends and tokenizer.control[end] not in ends:
        yield (
            f"the template ends answers with {end} ({tokenizer.control[end]}), but the model's "
            f"generation stops at {sorted(ends)}"
        )
    if default_system is not None:
        yield "the template supplies a system prompt where none is given; it is part of the prompt"
    if "strftime_now" in tokenizer.template:
        yield (
            "the template writes today's date; fix it with one of template_variables, if it allows "
            "that: on another day the same rows are other tokens"
        )
