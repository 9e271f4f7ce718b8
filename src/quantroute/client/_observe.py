"""What an onlooker is told: one value per attempt, after its money is settled.

For telemetry. Nobody is told while nobody looks, and then an attempt costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quantroute.client._classify import Classified
from quantroute.client._outcome import Answer, ChatRequest
from quantroute.client._settlement import Hold, Post, Settlement
from quantroute.domain import Endpoint
from quantroute.pricing import TokenUsage
from quantroute.routing import Candidate

__all__ = ["AttemptObserver", "SettledAttempt", "attempt_of"]

ANSWER: Final = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledAttempt:
    """One attempt of a request, at its end.

    `kind` is "answer" or what went wrong ("transient", "rate limited", "unknown", ...), `status`
    the HTTP status, 0 if there was none; `problem` is redacted and short. `answer` is None where
    there is none. `charge_pusd` was posted (pico-dollars, 0: nothing was charged), None while the
    charge is held as unknown. `began_at_s` is Unix time; `elapsed_s` lies between the slot and the
    end of the answer. `endpoint` was asked; the answer's provenance says which one served.
    """

    request: ChatRequest
    endpoint: Endpoint
    max_output_tokens: int
    attempt: int
    kind: str
    status: int
    problem: str
    answer: Answer | None
    charge_pusd: int | None
    began_at_s: float
    elapsed_s: float

    @property
    def usage(self) -> TokenUsage | None:
        """Tokens as the answer tells them."""
        return None if self.answer is None else self.answer.usage

    @property
    def is_answered(self) -> bool:
        """Whether the attempt brought an answer."""
        return self.kind == ANSWER


AttemptObserver = Callable[[SettledAttempt], None]
"""Called on the client's event loop after each settled attempt; it must be quick and not block.

One that raises is told of in the log and not called again.
"""


def attempt_of(
    request: ChatRequest,
    candidate: Candidate,
    outcome: Classified,
    settlement: Settlement,
    *,
    answer: Answer | None,
    attempt: int,
    ended_at_s: float,
    elapsed_s: float,
) -> SettledAttempt:
    """The value for one attempt."""
    charge_pusd: int | None = 0
    match settlement:
        case Post(charge):
            charge_pusd = charge.amount_pusd
        case Hold():
            charge_pusd = None
    return SettledAttempt(
        request=request,
        endpoint=candidate.endpoint if answer is None else answer.provenance.endpoint,
        max_output_tokens=candidate.max_tokens,
        attempt=attempt,
        kind=outcome.kind.value,
        status=outcome.status,
        problem=outcome.problem,
        answer=answer,
        charge_pusd=charge_pusd,
        began_at_s=ended_at_s - elapsed_s,
        elapsed_s=elapsed_s,
    )
