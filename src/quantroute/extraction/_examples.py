"""Answers to token ids and masks: exactly what the target saw, then exactly what it wrote.

Prompt and completion are encoded apart, as a server does: the ids of the prompt are fixed before
the first token is generated. What the prompt supplies is never trained on; what the model wrote
(a think opener that was its own, reasoning, closer, answer, end token) always is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from quantroute.errors import ConfigurationError
from quantroute.extraction._records import Example
from quantroute.extraction._rows import Turn, turns_of
from quantroute.extraction._template import (
    Form,
    ModelPart,
    Rerender,
    TemplateProfile,
    probe_template,
)
from quantroute.extraction._tokenizer import Marked, TargetTokenizer, TemplateFailure, Unencodable
from quantroute.extraction._tokens_report import Refusal, RefusalReason, TokensReport

__all__ = ["TokenSettings", "examples_from_rows"]

_BATCH_TURNS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """How rows become tokens.

    Attributes:
        classes: row classes to take.
        thinking: "auto" goes by how each answer was asked for; "on" and "off" say that the provider
            did so whatever was asked.
        max_tokens: longest example, prompt included; longer ones are refused, or cut at the end.
        special_text: letters of control tokens in a prompt's texts: "text" keeps them as letters,
            "refuse" leaves the example out, "control" makes control tokens of them, as servers do
            that encode the rendered prompt in one go. In answers they always stay letters.
        min_reasoning_share: least share of the billed reasoning tokens that must be there.
        verify: also compare with the template's own rendering of the answer, where it shows it.
        think_opener, think_closer, end_token: see `probe_template`.
        variables: further variables for the template.
    """

    classes: frozenset[str] = frozenset({"good"})
    thinking: Literal["auto", "on", "off"] = "auto"
    max_tokens: int | None = None
    too_long: Literal["refuse", "truncate"] = "refuse"
    special_text: Literal["text", "refuse", "control"] = "text"
    min_reasoning_share: float = 0.5
    verify: bool = True
    think_opener: str | None = None
    think_closer: str | None = None
    end_token: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigurationError(f"max_tokens must be at least 2, not {self.max_tokens}")
        if not 0 <= self.min_reasoning_share <= 1:
            raise ConfigurationError(
                f"min_reasoning_share must be from 0 to 1, not {self.min_reasoning_share}"
            )
        if not self.classes:
            raise ConfigurationError("classes is empty: no row would be taken")
        if "wrong_provider" in self.classes:
            raise ConfigurationError("answers of class wrong_provider are quarantined")

    def profile(self, tokenizer: TargetTokenizer) -> TemplateProfile:
        """What is known of the tokenizer's template under these settings."""
        return probe_template(
            tokenizer,
            variables=self.variables,
            think_opener=self.think_opener,
            think_closer=self.think_closer,
            end_token=self.end_token,
        )


def examples_from_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: TargetTokenizer,
    settings: TokenSettings | None = None,
    *,
    profile: TemplateProfile | None = None,
    report: TokensReport | None = None,
) -> Iterator[Example | Refusal]:
    """One example per answer of exported rows, or the reason why there is none; in order.

    Memory does not grow with the number of rows.

    Args:
        profile: of the template, if it was probed already (`settings.profile(tokenizer)`).
        report: filled along the way.
    Raises:
        ConfigurationError: the template cannot be used.
        DatasetError: not an exported row.
    """
    settings = settings or TokenSettings()
    report = TokensReport() if report is None else report
    maker = _Maker(tokenizer, settings, profile or settings.profile(tokenizer))
    turns = (turn for row in rows for turn in turns_of(row))
    while batch := list(islice(turns, _BATCH_TURNS)):
        for result in maker.make(batch):
            if isinstance(result, Example):
                report.add_example(result)
            else:
                report.add_refusal(result)
            yield result


class _Refused(Exception):
    """Why an answer becomes no example; caught where its refusal is made."""

    def __init__(self, reason: RefusalReason, problem: str) -> None:
        super().__init__(problem)
        self.reason, self.problem = reason, problem


@dataclass(frozen=True, slots=True)
class _Draft:
    """An example in text."""

    prompt: Marked
    completion: Marked
    lookalikes: bool
    default_system: bool


@dataclass(frozen=True, slots=True)
class _Maker:
    tokenizer: TargetTokenizer
    settings: TokenSettings
    profile: TemplateProfile

    def make(self, turns: list[Turn]) -> Iterator[Example | Refusal]:
        drafts = [self._draft_or_reason(turn) for turn in turns]
        kept = [draft for draft in drafts if isinstance(draft, _Draft)]
        prompts = iter(self.tokenizer.encode([draft.prompt for draft in kept]))
        completions = iter(self.tokenizer.encode_after([draft.completion for draft in kept]))
        for turn, draft in zip(turns, drafts, strict=True):
            try:
                if isinstance(draft, _Refused):
                    raise draft
                yield self._example(turn, draft, next(prompts), next(completions))
            except _Refused as refused:
                yield Refusal(
                    reason=refused.reason, problem=refused.problem, provenance=turn.provenance()
                )

    def _draft_or_reason(self, turn: Turn) -> _Draft | _Refused:
        try:
            return self._draft(turn)
        except _Refused as refused:
            return refused
        except TemplateFailure as problem:
            return _Refused(RefusalReason.TEMPLATE_FAILED, str(problem))

    # -- text ------------------------------------------------------------------------------------

    def _draft(self, turn: Turn) -> _Draft:
        _check_record(turn, self.settings)
        if turn.before is None:
            raise _Refused(
                RefusalReason.HISTORY_UNKNOWN,
                "the messages that were sent are not those of the row",
            )
        mode = self._mode(turn)
        form = self.profile.forms[mode]
        switches = {**self.settings.variables, **form.switches, **self._effort(turn)}
        before = [self._message(item) for item in turn.before]
        completion = self._completion(turn, form, mode)
        prompt = self._prompt(before, form, switches)
        if self.settings.verify:
            self._verify(turn, form, before, switches, prompt.text + completion.text)
        contents = [text for item in before for text in _texts(item)]
        contents += [turn.content, turn.reasoning or ""]
        lookalikes = any(map(self.tokenizer.has_control, contents))
        if lookalikes and self.settings.special_text == "refuse":
            raise _Refused(RefusalReason.SPECIAL_TEXT, "a text holds letters of a control token")
        own_system = any(item["role"] == "system" for item in before)
        return _Draft(
            prompt=prompt,
            completion=completion,
            lookalikes=lookalikes,
            default_system=self.profile.default_system is not None and not own_system,
        )

    def _mode(self, turn: Turn) -> str:
        match self.settings.thinking:
            case "on":
                return "thinking"
            case "off":
                return "instant"
            case _:
                mode = str(turn.record.get("mode") or "default")
                return mode if mode in self.profile.forms else "default"

    def _effort(self, turn: Turn) -> dict[str, Any]:
        reasoning = (turn.record.get("sampling") or {}).get("reasoning") or {}
        effort = reasoning.get("effort") if self.profile.has_effort else None
        return {} if effort is None else {"reasoning_effort": effort}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """With reasoning under the name that the template reads."""
        found = dict(message)
        if (reasoning := found.pop("reasoning", None)) is not None:
            found[self.profile.reasoning_field] = reasoning
        return found

    def _completion(self, turn: Turn, form: Form, mode: str) -> Marked:
        is_cut = turn.record.get("finish_reason") == "length"
        end = "" if is_cut else self.profile.end
        if not turn.reasoning:
            lead = self._plain_lead(turn, form, mode)
            return Marked.join((lead, False), (turn.content, True), (end, False))
        if form.reasoning is None:
            if self.profile.knows_reasoning:
                raise _Refused(
                    RefusalReason.MODE_MISMATCH, f"reasoning, but mode {mode} has no place for it"
                )
            raise _Refused(
                RefusalReason.NO_REASONING_FORM,
                "the template does not tell how reasoning is written; set think_closer",
            )
        return _with_reasoning(turn, form.reasoning, end)

    def _plain_lead(self, turn: Turn, form: Form, mode: str) -> str:
        """What the model wrote before an answer without reasoning."""
        if turn.record.get("reasoning_tokens"):
            raise _Refused(RefusalReason.REASONING_HIDDEN, "reasoning was billed but not shown")
        if form.plain_is_prompted and form.plain_lead is not None:
            return form.plain_lead
        if mode != "instant":
            raise _Refused(
                RefusalReason.REASONING_MISSING, "no reasoning, though the prompt asks for thinking"
            )
        opens = form.reasoning is not None and not form.reasoning.opener
        if form.plain_lead is None or opens or self.settings.thinking != "off":
            raise _Refused(
                RefusalReason.MODE_MISMATCH, "answered without thinking, but the prompt asks for it"
            )
        return form.plain_lead

    def _prompt(
        self, before: list[dict[str, Any]], form: Form, switches: Mapping[str, Any]
    ) -> Marked:
        text = self.tokenizer.render(before, prompt=True, switches=switches)
        if not text.endswith(form.tail):
            raise _Refused(
                RefusalReason.PROMPT_SHAPE, f"the prompt does not end with {form.tail[-40:]!r}"
            )
        if self.settings.special_text == "control" or not any(
            self.tokenizer.has_control(content) for item in before for content in _texts(item)
        ):
            return Marked(text)
        return self._marked_prompt(before, switches, text)

    def _marked_prompt(
        self, before: list[dict[str, Any]], switches: Mapping[str, Any], text: str
    ) -> Marked:
        """With letters of control tokens marked, found by rendering stand-ins for them."""
        mark = _unused_letter(text)
        tokens = list(self.tokenizer.control)
        stand_ins = {token: f"{mark}{place}{mark}" for place, token in enumerate(tokens)}
        replaced = [
            {
                name: value if name == "role" else self._replaced(value, stand_ins)
                for name, value in item.items()
            }
            for item in before
        ]
        rendered = self.tokenizer.render(replaced, prompt=True, switches=switches)
        found = _restored(rendered.split(mark), tokens)
        if found is None or found.text != text:
            raise _Refused(
                RefusalReason.SPECIAL_TEXT,
                "the template treats letters of control tokens in a text in a way of its own",
            )
        return found

    def _replaced(self, text: str, stand_ins: Mapping[str, str]) -> str:
        at, found = 0, ""
        for match in self.tokenizer.controls(text):
            found += text[at : match.start()] + stand_ins[match[0]]
            at = match.end()
        return found + text[at:]

    def _verify(
        self,
        turn: Turn,
        form: Form,
        before: list[dict[str, Any]],
        switches: Mapping[str, Any],
        own: str,
    ) -> None:
        """Compare with the finished rendering, where the template shows the whole answer in it."""
        is_shown = not turn.reasoning or self.profile.rerender is Rerender.KEPT
        if not (form.is_prefix and is_shown and turn.content):
            return
        answer = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            answer[self.profile.reasoning_field] = turn.reasoning
        finished = self.tokenizer.render([*before, answer], prompt=False, switches=switches)
        if self.settings.end_token is not None:  # said because the template may not write it
            own = own.removesuffix(self.profile.end)
        if not _bare(finished).startswith(_bare(own)):
            raise _Refused(
                RefusalReason.NOT_A_PREFIX,
                "prompt and answer are no beginning of the finished conversation as the template "
                "writes it",
            )

    # -- tokens ----------------------------------------------------------------------------------

    def _example(
        self,
        turn: Turn,
        draft: _Draft,
        prompt: list[int] | Unencodable,
        completion: list[int] | Unencodable,
    ) -> Example:
        if isinstance(prompt, Unencodable):
            raise _Refused(RefusalReason.UNENCODABLE, f"prompt: {prompt}")
        if isinstance(completion, Unencodable):
            raise _Refused(RefusalReason.UNENCODABLE, f"answer: {completion}")
        if not completion:
            raise _Refused(RefusalReason.NO_ANSWER, "the tokenizer makes nothing of the answer")
        self._check_shown(turn, len(completion))
        length = len(prompt) + len(completion)
        limit = self.settings.max_tokens or length
        if length > limit and (self.settings.too_long == "refuse" or len(prompt) >= limit):
            raise _Refused(RefusalReason.TOO_LONG, f"{length} tokens; the limit is {limit}")
        ids = np.array((prompt + completion)[:limit], dtype=np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
        return Example(
            input_ids=ids,
            loss_mask=mask,
            provenance=turn.provenance()
            | {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(completion),
                "truncated": length > limit,
                "lookalikes": draft.lookalikes,
                "default_system": draft.default_system,
            },
        )

    def _check_shown(self, turn: Turn, completion_tokens: int) -> None:
        """Whether the reasoning is all there: what is left of our count without the answer's."""
        billed = turn.record.get("reasoning_tokens") or 0
        answer_tokens = max(0, (turn.record.get("output_tokens") or 0) - billed)
        own_tokens = max(0, completion_tokens - answer_tokens)
        if turn.reasoning and own_tokens < self.settings.min_reasoning_share * billed:
            raise _Refused(
                RefusalReason.REASONING_SUMMARISED,
                f"{billed} tokens of reasoning were billed, the text has about {own_tokens}",
            )


def _check_record(turn: Turn, settings: TokenSettings) -> None:
    """What the row itself says against it."""
    row_class = turn.record.get("row_class")
    if row_class not in settings.classes:
        raise _Refused(RefusalReason.ROW_CLASS, f"class {row_class} was not chosen")
    finish = turn.record.get("finish_reason")
    if finish not in ("stop", "length"):
        raise _Refused(RefusalReason.FINISH_REASON, f"finish reason {finish!r}")
    if finish == "stop" and (turn.record.get("sampling") or {}).get("stop"):
        raise _Refused(RefusalReason.STOP_SEQUENCE, "a stop sequence may have ended the answer")
    if not turn.content and (finish == "stop" or not turn.reasoning):
        raise _Refused(RefusalReason.NO_ANSWER, "there is no answer")


def _with_reasoning(turn: Turn, part: ModelPart, end: str) -> Marked:
    """Opener, reasoning, closer, answer, end; an answer that was cut while thinking stops there.

    Providers give reasoning and answer with the blanks and line ends at their borders or without.
    Those that the template writes are added only where the text does not have them already.
    """
    reasoning = turn.reasoning or ""
    opener = _without_overlap(part.opener, reasoning)
    if not turn.content:
        return Marked.join((opener, False), (reasoning, True))
    lead = part.closer[: len(part.closer) - len(part.closer.lstrip())]
    closer = part.closer[len(lead) :] if lead and reasoning.endswith(lead) else part.closer
    closer = _without_overlap(closer, turn.content)
    return Marked.join(
        (opener, False), (reasoning, True), (closer, False), (turn.content, True), (end, False)
    )


def _without_overlap(frame: str, text: str) -> str:
    """The frame without the blanks at its end, if the text begins with them."""
    blanks = frame[len(frame.rstrip()) :]
    return frame[: len(frame) - len(blanks)] if blanks and text.startswith(blanks) else frame


def _texts(message: Mapping[str, Any]) -> list[str]:
    return [value for name, value in message.items() if name != "role"]


def _unused_letter(text: str) -> str:
    """A private-use letter that does not occur."""
    return next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in text)


def _restored(pieces: list[str], tokens: list[str]) -> Marked | None:
    """The text again, every second piece being the place of a token; None if one is not."""
    places = {str(place): token for place, token in enumerate(tokens)}
    if len(pieces) % 2 == 0 or any(piece not in places for piece in pieces[1::2]):
        return None
    return Marked.join(
        *(
            (places[piece], True) if number % 2 else (piece, False)
            for number, piece in enumerate(pieces)
        )
    )


def _bare(text: str) -> str:
    """Without blanks: templates trim texts, which changes no word."""
    return "".join(text.split())
