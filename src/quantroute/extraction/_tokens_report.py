"""What became of the answers of a set of rows: examples, refusals, and counts against the bill."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantroute.extraction._records import Example

__all__ = ["CountComparison", "Refusal", "RefusalReason", "TokensReport"]


class RefusalReason(enum.Enum):
    """Why an answer became no example."""

    ROW_CLASS = "row_class"  # not of a class that was chosen
    FINISH_REASON = "finish_reason"  # neither ended by the model nor by the limit
    STOP_SEQUENCE = "stop_sequence"  # a stop sequence may have cut text away
    NO_ANSWER = "no_answer"  # ended, but without an answer
    REASONING_HIDDEN = "reasoning_hidden"  # reasoning was billed, but not shown
    REASONING_SUMMARISED = "reasoning_summarised"  # what was shown is much less than was billed
    REASONING_MISSING = "reasoning_missing"  # the prompt asks for thinking, the answer has none
    MODE_MISMATCH = "mode_mismatch"  # the template in this mode has no place for what was written
    NO_REASONING_FORM = "no_reasoning_form"  # the template does not say how reasoning is written
    HISTORY_UNKNOWN = "history_unknown"  # what was sent cannot be told from the row
    TEMPLATE_FAILED = "template_failed"  # the template refused the messages
    PROMPT_SHAPE = "prompt_shape"  # the prompt does not end as this template's prompts do
    NOT_A_PREFIX = "not_a_prefix"  # the template writes this very answer in another way
    SPECIAL_TEXT = "special_text"  # letters of control tokens in texts
    UNENCODABLE = "unencodable"  # the tokenizer cannot take the text
    TOO_LONG = "too_long"  # over the length limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that became no example, and why."""

    reason: RefusalReason
    problem: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class CountComparison:
    """Own token counts minus those that an endpoint billed; how often each difference came up."""

    output: Counter[int] = field(default_factory=Counter)
    input: Counter[int] = field(default_factory=Counter)
    unbilled: int = 0

    def as_dict(self) -> dict[str, Any]:
        """`output` and `input` as `{examples, exact_share, least, p05, median, p95, most}`."""
        return {
            "output": _spread(self.output),
            "input": _spread(self.input),
            "without_billed_count": self.unbilled,
        }


@dataclass(slots=True)
class TokensReport:
    """Filled while examples are made; JSON by `as_dict`.

    Attributes:
        lookalikes: examples with letters of control tokens in a text.
        default_system: examples whose prompt has a system text that the template supplied.
        refused: answers by reason; `problems` has what the first of each was about.
        endpoints: own counts against billed ones. A median off zero hints at another template,
            another mode, or reasoning that was not shown in full.
    """

    examples: int = 0
    prompt_tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    lookalikes: int = 0
    default_system: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, CountComparison] = field(default_factory=dict)

    def add_example(self, example: Example) -> None:
        """Count an example, by what its provenance says."""
        found = example.provenance
        self.examples += 1
        self.prompt_tokens += found["prompt_tokens"]
        self.supervised_tokens += int(example.loss_mask.sum())
        self.truncated += found["truncated"]
        self.lookalikes += found["lookalikes"]
        self.default_system += found["default_system"]
        counts = self.endpoints.setdefault(str(found["endpoint"]), CountComparison())
        if found["output_tokens"] is None:
            counts.unbilled += 1
        else:
            counts.output[found["completion_tokens"] - found["output_tokens"]] += 1
        if found["input_tokens"] is not None:
            counts.input[found["prompt_tokens"] - found["input_tokens"]] += 1

    def add_refusal(self, refusal: Refusal) -> None:
        """Count an answer that was left out."""
        self.refused[refusal.reason.value] += 1
        self.problems.setdefault(refusal.reason.value, refusal.problem)

    def refusals(self) -> list[str]:
        """In words: how many for which reason, and what the first of them was about."""
        return [
            f"{count:,} {reason.replace('_', ' ')}, such as: {self.problems[reason]}"
            for reason, count in sorted(self.refused.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "examples": self.examples,
            "prompt_tokens": self.prompt_tokens,
            "supervised_tokens": self.supervised_tokens,
            "truncated": self.truncated,
            "lookalikes": self.lookalikes,
            "default_system": self.default_system,
            "refused": dict(sorted(self.refused.items())),
            "problems": dict(sorted(self.problems.items())),
            "counts_by_endpoint": {
                name: counts.as_dict() for name, counts in sorted(self.endpoints.items())
            },
        }


def _spread(differences: Counter[int]) -> dict[str, Any] | None:
    total = differences.total()
    if not total:
        return None
    ordered = sorted(differences.items())
    return {
        "examples": total,
        "exact_share": differences[0] / total,
        "least": ordered[0][0],
        "p05": _quantile(ordered, total, 0.05),
        "median": _quantile(ordered, total, 0.5),
        "p95": _quantile(ordered, total, 0.95),
        "most": ordered[-1][0],
    }


def _quantile(ordered: list[tuple[int, int]], total: int, share: float) -> int:
    """The least value that at least `share` of all do not exceed."""
    seen = 0
    for value, number in ordered:
        seen += number
        if seen >= share * total:
            return value
    return ordered[-1][0]
