"""What an answer may be expected to be: assumed before there are any, measured afterwards. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["NO_ANSWERS", "Expectation", "Sample", "assumed", "measured", "t_quantile"]

#: Share of the output limit that an answer is assumed to use; what routing assumes, too.
ASSUMED_SHARE_OF_LIMIT: Final = 0.25
#: Spread of the logarithm of answer lengths, for the share that the limit is expected to cut.
#: Chat and thinking answers are roughly log-normal; 0.7 to 1.0 is what generated sets show.
ASSUMED_LOG_SPREAD: Final = 0.8
ASSUMED_REASONING_SHARE: Final = 0.0
#: Speeds of hosted open-weight models of this size lie between 30 and 120 tokens/s when idle and
#: are lower under load; one long queue is assumed rather than a good day.
ASSUMED_TOKENS_PER_S: Final = 35.0
ASSUMED_FIRST_TOKEN_S: Final = 1.5
#: With fewer answers a mean says less than the assumption.
LEAST_ANSWERS: Final = 5
_MOST_LOST: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sums over the answers that a dataset has so far. Units: tokens, seconds."""

    answers: int = 0
    output_tokens: int = 0
    output_tokens_squared: int = 0
    reasoning_tokens: int = 0
    input_tokens: int = 0
    accepted_tokens: int = 0
    truncated: int = 0
    good: int = 0
    timed_tokens: int = 0
    total_s: float = 0.0


NO_ANSWERS: Final = Sample()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One answer, in the mean, and how sure that is.

    Attributes: `output_tokens` per answer, reasoning included; `low`, `high` its 95 % interval
    (equal when assumed: nobody knows). `reasoning_share` is of the output tokens, `truncated_share`
    and `good_share` of the answers. `accepted_share`: output tokens in rows that are whole and
    good, of all that are bought. `input_tokens` per request, None to estimate them from bytes.
    `answer_s` seconds an answer takes. `answers` that this rests on, 0 if it is assumed.
    """

    output_tokens: float
    low: float
    high: float
    reasoning_share: float
    truncated_share: float
    accepted_share: float
    good_share: float
    answer_s: float
    input_tokens: float | None = None
    answers: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether answers of this dataset stand behind it."""
        return self.answers > 0

    @property
    def sureness(self) -> str:
        """How sure it is, in words."""
        if not self.is_measured:
            return "assumed"
        return (
            f"measured on {self.answers:,} answers: {self.output_tokens:,.0f} tokens each "
            f"(95 %: {self.low:,.0f} to {self.high:,.0f})"
        )


def assumed(
    *,
    max_output_tokens: int,
    output_tokens: int | None = None,
    reasoning_share: float | None = None,
    tokens_per_s: float = ASSUMED_TOKENS_PER_S,
    first_token_s: float = ASSUMED_FIRST_TOKEN_S,
) -> Expectation:
    """The expectation before any answer: a quarter of the limit unless `output_tokens` is said.

    Lengths are taken as log-normal; what lies beyond the limit is cut, paid for and not accepted.
    """
    mean = float(output_tokens or max(1.0, ASSUMED_SHARE_OF_LIMIT * max_output_tokens))
    cut = _share_beyond(max_output_tokens, mean)
    return Expectation(
        output_tokens=mean,
        low=mean,
        high=mean,
        reasoning_share=ASSUMED_REASONING_SHARE if reasoning_share is None else reasoning_share,
        truncated_share=cut,
        accepted_share=1.0 - min(_MOST_LOST, cut * max_output_tokens / mean),
        good_share=1.0 - min(_MOST_LOST, cut),
        answer_s=first_token_s + mean / tokens_per_s,
    )


def measured(sample: Sample, otherwise: Expectation) -> Expectation:
    """The expectation from answers; `otherwise` where they are too few to say."""
    if sample.answers < LEAST_ANSWERS or not sample.output_tokens:
        return otherwise
    count = sample.answers
    mean = sample.output_tokens / count
    spread = max(0.0, sample.output_tokens_squared - count * mean * mean) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(spread / count)
    # A sample without one accepted answer would make every plan infinite.
    accepted = max(1.0 - _MOST_LOST, sample.accepted_tokens / sample.output_tokens)
    answer_s = otherwise.answer_s
    if sample.timed_tokens and sample.total_s > 0:
        answer_s = mean * sample.total_s / sample.timed_tokens
    return Expectation(
        output_tokens=mean,
        low=max(1.0, mean - half),
        high=mean + half,
        reasoning_share=min(1.0, sample.reasoning_tokens / sample.output_tokens),
        truncated_share=sample.truncated / count,
        accepted_share=min(1.0, accepted),
        good_share=max(1.0 - _MOST_LOST, sample.good / count),
        answer_s=answer_s,
        input_tokens=sample.input_tokens / count,
        answers=count,
    )


def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t, within 0.3 %.

    Source: the asymptotic expansion around the normal quantile (Abramowitz and Stegun 26.7.5);
    below four degrees of freedom, where it does not hold, the values themselves.
    """
    if degrees < 4:
        return {1: 12.706, 2: 4.303, 3: 3.182}.get(degrees, math.inf)
    z: float = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + terms[0] / degrees + terms[1] / degrees**2 + terms[2] / degrees**3


def _share_beyond(limit: float, mean: float) -> float:
    """Share of a log-normal with this mean that lies beyond `limit`."""
    centre = math.log(mean) - ASSUMED_LOG_SPREAD**2 / 2
    return 0.5 * math.erfc((math.log(limit) - centre) / (ASSUMED_LOG_SPREAD * math.sqrt(2)))
