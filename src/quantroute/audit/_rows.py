"""Rows to what is scored: one value per answer, and what had to be left out.

An answer is known by its text; its tokens are those the tokenizer makes of that text. Where their
number is not the one that the endpoint billed, the tokens were others, and the answer says nothing
about precision. Every class of answers counts that carries text: to take only good ones would be to
choose by their end, and the tokens before it would no longer be a fair sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quantroute.audit._claim import SamplingClaim
from quantroute.errors import ConfigurationError
from quantroute.extraction import Example, TargetTokenizer, TokenSettings, examples_from_rows

__all__ = ["AuditRow", "Intake", "audit_rows_of", "example_row", "with_system"]

#: Classes whose answers are all there, good or not; chosen before the text was seen.
CLASSES: Final = frozenset({"good", "truncated", "loop", "leaked_thinking", "wrong_mode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One answer, ready to be scored.

    Attributes:
        key: of the row, and the turn within it.
        input_ids: int64 [S], prompt and answer; the answer begins at `start`.
        count_gap, prompt_gap: own tokens minus billed ones, None where nothing was billed.
        has_end: whether the model ended it, so that its last token is the end token.
    """

    key: tuple[str, int]
    endpoint: str
    input_ids: NDArray[np.int64]
    start: int
    claim: SamplingClaim
    count_gap: int | None = None
    prompt_gap: int | None = None
    has_end: bool = True

    @property
    def answer_tokens(self) -> int:
        """Tokens to score."""
        return int(self.input_ids.shape[0]) - self.start


@dataclass(slots=True)
class Intake:
    """The rows of one endpoint, and why others are not among them."""

    rows: list[AuditRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def settle(self) -> None:
        """Leave out answers whose tokens are others than those that were billed.

        Services count the end token or do not: the difference that most answers show, of none and
        one, is the endpoint's way of counting. An answer that was cut has no end token to count.
        """
        usual = Counter(row.count_gap for row in self.rows if row.has_end)
        own_way = max((0, 1), key=lambda gap: usual[gap])
        kept = [row for row in self.rows if row.count_gap in (None, own_way * row.has_end)]
        if gone := len(self.rows) - len(kept):
            self.left_out["token_count_differs"] += gone
        self.rows = kept
        self.tokens = sum(row.answer_tokens for row in kept)


def audit_rows_of(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: TargetTokenizer,
    *,
    settings: TokenSettings | None = None,
    most_tokens: int | None = None,
) -> dict[str, Intake]:
    """Exported rows by endpoint; at most `most_tokens` tokens of each, the first that come."""
    settings = settings or TokenSettings(classes=CLASSES)
    found: dict[str, Intake] = {}
    for example in examples_from_rows(rows, tokenizer, settings):
        intake = found.setdefault(str(example.provenance.get("endpoint")), Intake())
        if most_tokens is not None and intake.tokens >= most_tokens:
            continue
        if not isinstance(example, Example):
            intake.left_out[example.reason.value] += 1
            continue
        try:
            row = example_row(example)
        except ConfigurationError:
            intake.left_out["sampling_not_testable"] += 1
            continue
        intake.rows.append(row)
        intake.tokens += row.answer_tokens
    for intake in found.values():
        intake.settle()
    return found


def example_row(example: Example) -> AuditRow:
    """From tokens whose provenance is known.

    Raises:
        ConfigurationError: the sampling says too little about the tokens (greedy, penalties).
    """
    known = example.provenance
    start = int(example.loss_mask.argmax())
    return AuditRow(
        key=(str(known.get("row_key")), int(known.get("turn") or 0)),
        endpoint=str(known.get("endpoint")),
        input_ids=example.input_ids,
        start=start,
        claim=SamplingClaim.of(known.get("sampling") or {}),
        count_gap=_gap(len(example) - start, known.get("output_tokens")),
        prompt_gap=_gap(start, known.get("input_tokens")),
        has_end=known.get("finish_reason") != "length",
    )


def with_system(rows: Iterable[Mapping[str, Any]], text: str) -> Iterator[dict[str, Any]]:
    """The rows as they would be if the endpoint put `text` before each conversation."""
    for row in rows:
        messages = list(row["messages"])
        if messages and messages[0]["role"] == "system":
            own = messages.pop(0)["content"]
            messages.insert(0, {"role": "system", "content": f"{text}\n\n{own}"})
        else:
            messages.insert(0, {"role": "system", "content": text})
        # The hash is of what was sent by us, which is no longer what is supposed to be served.
        turns = [{**turn, "messages_sha256": None} for turn in row["turns"]]
        yield {**row, "messages": messages, "turns": turns}


def _gap(own: int, billed: object) -> int | None:
    return own - billed if isinstance(billed, int) else None
