"""What came of an attempt: one kind per reply, by status, type and shape.

Pure. A 200 proves nothing: the service commits it before the model runs, so an error inside the
body is judged exactly as if it had been the status.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from msgspec import Struct

from quantroute.client._reply import Reply, ServiceError
from quantroute.routing import Feedback

__all__ = ["Classified", "Kind", "classify"]


class Kind(enum.Enum):
    """The closed set of outcomes of one attempt."""

    ANSWER = "answer"
    REFUSED = "refused"  # the row can never succeed as it is
    TRANSIENT = "transient"  # somebody else's fault, worth another attempt
    RATE_LIMITED = "rate limited"  # by the endpoint
    ACCOUNT_LIMITED = "account limited"  # by the service
    NO_ENDPOINT = "no endpoint"  # what we pinned is not there (any more)
    OUT_OF_FUNDS = "out of funds"
    KEY_REJECTED = "key rejected"
    MISDIRECTED = "misdirected"  # not the service: a redirect, or a proxy that wants credentials
    UNKNOWN = "unknown"  # the wire failed after sending: nobody knows


class Classified(Struct, frozen=True, kw_only=True):
    """The kind, with the facts a retry decision needs. `problem` is redacted and short."""

    kind: Kind
    status: int = 200
    problem: str = ""
    retry_after_s: float | None = None
    is_endpoint_fault: bool = True

    @property
    def feedback(self) -> Feedback:
        """What the router should learn from it."""
        match self.kind:
            case Kind.ANSWER:
                return Feedback.SUCCESS
            case Kind.RATE_LIMITED:
                return Feedback.RATE_LIMITED
            case Kind.ACCOUNT_LIMITED:
                return Feedback.ACCOUNT_LIMITED
            case Kind.TRANSIENT | Kind.UNKNOWN | Kind.NO_ENDPOINT if self.is_endpoint_fault:
                return Feedback.FAULT
            case _:
                return Feedback.NEUTRAL


#: Statuses that an `error_type` or `availability.code` stands for when no number is given, or when
#: a permanent fault is dressed as a server error. Source: OpenRouter's published error types.
_STATUS_BY_TYPE: Final = {
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "invalid_request_error": 400,
    "max_tokens_exceeded": 400,
    "content_policy_violation": 403,
    "authentication": 401,
    "payment_required": 402,
    "insufficient_quota": 402,
    "insufficient_credits": 402,
    "no_endpoints": 404,
    "constraint_filtered": 404,
    "privacy_restricted": 404,
    "model_deprecated": 404,
    "model_not_found": 404,
    "free_variant_ended": 404,
    "rate_limit_exceeded": 429,
    "capacity_exhausted": 429,
    "server_error": 500,
    "provider_unavailable": 502,
    "temporarily_unavailable": 503,
    "provider_overloaded": 503,
}
_PERMANENT_TYPES: Final = frozenset({"context_length_exceeded", "max_tokens_exceeded"})
# The one place where words are read: a prompt that is too long, reported as a server error without
# a type. A miss costs a few retries, never money or data.
_TOO_LONG: Final = re.compile(
    r"maximum context length|context[_ ]length[_ ]exceeded", re.IGNORECASE
)
_EDGE_STATUSES: Final = range(520, 528)


def classify(reply: Reply) -> Classified:
    """The one kind of a reply, streamed or not."""
    if reply.error is None and reply.is_success:
        return _classify_answer(reply)
    error = reply.error or ServiceError(status=None, message="(no message)")
    return _classify_error(reply, error)


def _classify_answer(reply: Reply) -> Classified:
    problem = ""
    if not reply.is_complete:
        problem = "the answer was cut" if reply.is_json or reply.has_text else "not an answer"
    elif not reply.has_choice:
        problem = "an answer without choices"
    elif reply.finish_reason == "error":
        problem = "finish reason 'error' without an error"
    elif not reply.has_text and (reply.usage is None or reply.usage.output_tokens == 0):
        problem = "an empty answer of zero tokens"
    if problem:
        return Classified(kind=Kind.TRANSIENT, problem=problem)
    return Classified(kind=Kind.ANSWER)


def _classify_error(reply: Reply, error: ServiceError) -> Classified:
    status = _effective_status(reply, error)
    wait_s = error.retry_after_s if error.retry_after_s is not None else reply.retry_after_s

    def outcome(kind: Kind, *, is_endpoint_fault: bool = True) -> Classified:
        return Classified(
            kind=kind,
            status=status,
            problem=error.message,
            retry_after_s=wait_s,
            is_endpoint_fault=is_endpoint_fault,
        )

    is_upstream = error.provider_name is not None
    match status:
        case 407 if not reply.is_success:
            return outcome(Kind.MISDIRECTED)
        case _ if 300 <= status < 400:
            return outcome(Kind.MISDIRECTED)
        case 401 | 402 if is_upstream:  # the provider's own trouble with the service
            return outcome(Kind.TRANSIENT)
        case 401:
            return outcome(Kind.KEY_REJECTED)
        case 402:
            return outcome(Kind.OUT_OF_FUNDS)
        case 404:
            return outcome(Kind.NO_ENDPOINT)
        case 429:
            return outcome(Kind.RATE_LIMITED if is_upstream else Kind.ACCOUNT_LIMITED)
        case 403 if not reply.is_json:  # the edge guard, in HTML: too many requests, in effect
            return outcome(Kind.ACCOUNT_LIMITED)
        case 408 | 409 | 425 | 499:  # 499: something in between took us for gone
            return outcome(Kind.TRANSIENT)
        case _ if 400 <= status < 500:
            if error.is_retryable:
                return outcome(Kind.TRANSIENT, is_endpoint_fault=False)
            return outcome(Kind.REFUSED)
        case _ if status in _EDGE_STATUSES:
            return outcome(Kind.TRANSIENT, is_endpoint_fault=False)
        case _:
            return outcome(Kind.TRANSIENT)


def _effective_status(reply: Reply, error: ServiceError) -> int:
    """The status to act on: the body's code under a 200, else the HTTP status; types break ties."""
    typed = _STATUS_BY_TYPE.get(error.error_type or "")
    stated = error.status if reply.is_success else reply.http_status
    status = stated or typed or 500
    if reply.is_success and status < 400:
        status = 500  # an error that calls itself 200, or anything else that is none
    is_server_error = status >= 500
    if is_server_error and (
        error.error_type in _PERMANENT_TYPES or _TOO_LONG.search(error.message)
    ):
        return 400
    if status == 429 and typed == 402:  # "insufficient_quota" arrives as 429
        return 402
    if status == 400 and typed == 404:  # "model_not_found" arrives as 400
        return 404
    return status
