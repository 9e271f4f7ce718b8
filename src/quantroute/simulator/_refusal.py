"""Error answers in the service's own shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["Refusal", "html_page", "refusal_body"]

USER_ID: Final = "user_simulated"

ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request",
    401: "authentication",
    402: "payment_required",
    403: "permission_denied",
    404: "not_found",
    408: "timeout",
    413: "payload_too_large",
    429: "rate_limit_exceeded",
    502: "provider_unavailable",
    503: "provider_overloaded",
    504: "timeout",
    524: "timeout",
    529: "provider_overloaded",
}


class Refusal(Exception):
    """An answer other than the asked one; ends the handling of one request.

    `code` stands in the body, `status` on the wire; they differ once 200 is committed.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        availability: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        html: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = dict(metadata or {})
        self.availability = availability
        self.headers = dict(headers or {})
        self.html = html

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return refusal_body(
            self.code, self.message, metadata=self.metadata, availability=self.availability
        )

    def encoded(self) -> bytes:
        """The bytes of the answer."""
        return (self.html if self.html is not None else json.dumps(self.body())).encode()


def refusal_body(
    code: int | str,
    message: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    availability: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`{"error": {code, message, metadata?}, "user_id"}`."""
    error: dict[str, Any] = {"code": code, "message": message}
    if metadata:
        error["metadata"] = dict(metadata)
    if availability:
        error["availability"] = dict(availability)
    return {"error": error, "user_id": USER_ID}


def unauthorized(message: str = "No auth credentials found") -> Refusal:
    """401: no key, or a key nobody issued."""
    return Refusal(401, message)


def upstream(
    code: int,
    *,
    provider_name: str,
    model: str,
    headers: Mapping[str, str] | None = None,
    previous: Sequence[Mapping[str, Any]] = (),
) -> Refusal:
    """What reaches the caller when the last provider tried has failed."""
    if code == 500:
        # Internal errors are masked: neither provider nor reason is told.
        return Refusal(500, "Internal Server Error")
    raw = {
        400: f"This model's maximum context length is exceeded by your request to {model}",
        429: f"{model} is temporarily rate-limited upstream. Please retry shortly",
    }.get(code, f"upstream of {model} answered {code}")
    metadata: dict[str, Any] = {
        "provider_name": provider_name,
        "raw": raw,
        "error_type": "context_length_exceeded" if code == 400 else ERROR_TYPES.get(code, "server"),
    }
    if previous:
        metadata["previous_errors"] = list(previous)
    return Refusal(code, "Provider returned error", metadata=metadata, headers=headers)


def no_route(
    message: str, *, reason: str, model: str, excluded_by: Sequence[str] = (), code: int = 404
) -> Refusal:
    """404: filters left no endpoint; `excluded_by` names the ones that took the last away."""
    return Refusal(
        code,
        message,
        availability={
            "code": reason,
            "retryable": False,
            "retry_after": None,
            "requested_models": [model],
            "excluded_by": list(excluded_by),
        },
    )


def html_page(status: int) -> str:
    """The edge's own page: not JSON, and without a word from the service."""
    title = {429: "error code: 1015", 502: "502 Bad Gateway"}.get(status, f"{status} error")
    return (
        f"<!DOCTYPE html>\n<html><head><title>{title}</title></head>\n"
        f"<body><h1>{title}</h1><p>The edge could not pass your request on.</p></body></html>\n"
    )
