"""Is an answer one that a model should be trained on? One class per answer; pure.

Nothing is deleted for its class: every answer that was paid for is kept, and whoever exports says
which classes shall go along. By default only GOOD ones do.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from quantroute.client import Answer
from quantroute.domain import Sampling

__all__ = ["Judgement", "RowClass", "classify", "loop_score"]


class RowClass(enum.Enum):
    """What an answer is good for. The order of the members is the order of precedence."""

    __hash__ = object.__hash__  # by identity, as they are compared: enum's own is in Python

    WRONG_PROVIDER = "wrong_provider"  # served by somebody else, or another model: quarantined
    UNVERIFIED = "unverified"  # the answer does not say who served it
    ERROR = "error"  # not a whole answer: no or an odd finish reason, invalid text, a redaction
    REFUSED = "refused"  # a content filter stepped in
    LOOP = "loop"  # the model repeats itself
    TRUNCATED = "truncated"  # cut by the output limit
    EMPTY = "empty"  # nothing was written
    REASONING_ONLY = "reasoning_only"  # reasoning, but no answer
    LEAKED_THINKING = "leaked_thinking"  # think tags inside the answer
    WRONG_MODE = "wrong_mode"  # reasoning although off, or none although on
    GOOD = "good"


class Judgement(Struct, frozen=True, kw_only=True):
    """The class of an answer, why, and how repetitive it is (0 to 1, see `loop_score`)."""

    row_class: RowClass
    details: tuple[str, ...] = ()
    loop_score: float = 0.0


#: Repetition from which an answer counts as a loop. Measured 2026-11: prose 0.39 to 0.57, 477
#: source files 0.39 to 0.87 (median 0.68), tables 0.69, a phrase repeated for 600 characters 0.93,
#: for 2,000 characters 0.97.
LOOP_THRESHOLD: Final = 0.92
_LOOP_WINDOW_CHARACTERS: Final = 16_384
_LOOP_LEAST_CHARACTERS: Final = 512
_SUSPICIOUS_SCORE: Final = 0.75
_CERTAIN_SCORE: Final = 0.94
_SMALL_BYTES: Final = 4_096

#: As chat templates spell it: DeepSeek, Qwen and Kimi; Kimi-VL; Magistral; Seed-OSS; gpt-oss.
_OPENER: Final = re.compile(r"<think>|◁think▷|\[THINK\]|<seed:think>|<\|channel\|>analysis")
_CLOSER: Final = re.compile(r"</think>|◁/think▷|\[/THINK\]|</seed:think>")
#: Words that tags are made of elsewhere too: a leak only as the beginning of an answer.
_BEGINNING: Final = re.compile(r"\s*<(thinking|thought|reasoning)>.*?</\1>", re.DOTALL)
_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_INVISIBLE: Final = "\u200b\u200c\u200d\u2060\ufeff"


def classify(answer: Answer, *, sampling: Sampling, asked: Sequence[str] = ()) -> Judgement:
    """The class of one answer; where several fit, the first in the order of `RowClass`.

    Args:
        sampling: what was asked, for the thinking mode.
        asked: the texts of the prompt; think tags that are quoted from there are no leak.
    """
    findings = _findings(answer, sampling, asked)
    score = max(loop_score(answer.content), loop_score(answer.reasoning or ""))
    if score >= LOOP_THRESHOLD:
        findings[RowClass.LOOP] = f"repeats itself (score {score:.3f})"
    if not findings:
        return Judgement(row_class=RowClass.GOOD, loop_score=score)
    found = (
        list(findings) if len(findings) == 1 else [item for item in RowClass if item in findings]
    )
    details = tuple([findings[item] for item in found])
    return Judgement(row_class=found[0], details=details, loop_score=score)


def loop_score(text: str) -> float:
    """How repetitive the end of `text` is: one minus its compression ratio, 0 for short texts.

    A loop is at the end by nature: a model that has begun one does not get out. Only the last
    16,384 characters are looked at, which takes a tenth of a millisecond on prose.
    """
    tail = text[-_LOOP_WINDOW_CHARACTERS:]
    if len(tail) < _LOOP_LEAST_CHARACTERS:
        return 0.0
    raw = tail.encode("utf-8", "surrogatepass")
    # The fast level first, a fifth of the time on prose: only where it leaves the question open is
    # there a second look. (That one finds more, but for some bytes: far less than up to certainty.)
    score = 1.0 - _compressed_bytes(raw, 1) / len(raw)
    if _SUSPICIOUS_SCORE <= score < _CERTAIN_SCORE:
        score = 1.0 - _compressed_bytes(raw, 6) / len(raw)
    return max(0.0, score)


def _compressed_bytes(raw: bytes, level: int) -> int:
    if len(raw) > _SMALL_BYTES:
        return len(zlib.compress(raw, level))
    # A window that just holds the text finds the same repetitions. What takes time with short texts
    # is making the usual tables of 256 KiB: 5 microseconds instead of 40 for 2 KiB that repeat.
    small = zlib.compressobj(level, zlib.DEFLATED, wbits=12, memLevel=5)
    return len(small.compress(raw)) + len(small.flush())


def _findings(answer: Answer, sampling: Sampling, asked: Sequence[str]) -> dict[RowClass, str]:
    found: dict[RowClass, str] = {}
    if answer.flags:
        if mismatches := {"served_mismatch", "model_mismatch"} & set(answer.flags):
            found[RowClass.WRONG_PROVIDER] = ", ".join(sorted(mismatches))
        if "served_unknown" in answer.flags:
            found[RowClass.UNVERIFIED] = "the answer names no provider"
    if problem := _unwhole(answer):
        found[RowClass.ERROR] = problem
    match answer.finish_reason:
        case "length":
            found[RowClass.TRUNCATED] = "cut by the output limit"
        case "content_filter":
            found[RowClass.REFUSED] = "stopped by a content filter"
        case _:
            pass
    if not answer.content.strip().strip(_INVISIBLE):
        if (answer.reasoning or "").strip():
            found[RowClass.REASONING_ONLY] = "reasoning without an answer"
        else:
            found[RowClass.EMPTY] = "no text"
    elif _is_leaked(answer.content, asked):
        found[RowClass.LEAKED_THINKING] = "think tags in the answer"
    if problem := _wrong_mode(answer, sampling):
        found[RowClass.WRONG_MODE] = problem
    return found


def _unwhole(answer: Answer) -> str | None:
    """Why this cannot be the whole text that the model wrote, if so."""
    if answer.finish_reason is None:
        return "no finish reason: nobody knows whether it is whole"
    if answer.finish_reason not in ("stop", "length", "content_filter"):
        return f"finish reason {answer.finish_reason!r}"
    if "secret_redacted" in answer.flags:
        return "the answer quoted the API key, which was cut out"
    if "malformed_event" in answer.flags:
        return "a piece of the stream could not be read: the text may lack something"
    text = answer.content + (answer.reasoning or "")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        return "lone surrogates: not valid Unicode"
    return None


def _is_leaked(content: str, asked: Sequence[str]) -> bool:
    """Whether the answer holds thinking, and not just talk about think tags.

    A tag at the very start, or an end tag without its beginning, is a leak in any case: that is
    what a template mistake looks like. Tags elsewhere are one unless the prompt brought them up.
    Tags in code are talk.
    """
    if _BEGINNING.match(content):
        return True
    if "think" not in content and "THINK" not in content and "<|channel|>" not in content:
        return False
    if _OPENER.match(content.lstrip()):
        return True
    prose = _CODE.sub("", content)
    opener, closer = _OPENER.search(prose), _CLOSER.search(prose)
    if opener is None and closer is None:
        return False
    if closer is not None and (opener is None or closer.start() < opener.start()):
        return True
    return not any(_OPENER.search(text) or _CLOSER.search(text) for text in asked)


def _wrong_mode(answer: Answer, sampling: Sampling) -> str | None:
    """Why the answer is not of the mode that was asked for, if so; silence asks for nothing."""
    is_off = sampling.reasoning is False or sampling.reasoning_effort == "none"
    is_on = not is_off and (sampling.reasoning or sampling.reasoning_effort is not None)
    has_reasoning = bool((answer.reasoning or "").strip())
    counted = (answer.usage.reasoning_tokens or 0) if answer.usage else 0
    if is_off and has_reasoning:
        return "reasoning although it was switched off"
    if is_off and counted > 0:
        return f"{counted} reasoning tokens although reasoning was switched off"
    if is_on and not has_reasoning and answer.content.strip():
        return "no reasoning although it was asked for"
    return None
