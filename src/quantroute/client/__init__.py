"""One request end to end: reserve, send, classify, retry, settle."""

from quantroute.client._accounts import KeyComparison, KeyUsage
from quantroute.client._body import input_bound_tokens
from quantroute.client._client import DEFAULT_MAX_IN_FLIGHT, Client
from quantroute.client._delegated import DELEGATED
from quantroute.client._descriptors import ensure_descriptors
from quantroute.client._keycheck import KeyStatus, check_key
from quantroute.client._local import LocalEndpoint
from quantroute.client._observe import AttemptObserver, SettledAttempt
from quantroute.client._outcome import (
    Answer,
    Answered,
    AnswerSink,
    ChatRequest,
    Completion,
    GaveUp,
    Provenance,
    RowRefused,
)
from quantroute.client._reconcile import Reconciliation
from quantroute.client._retry import RetryPolicy
from quantroute.client._settling import Attendance, SettlingSettings
from quantroute.client._transport import Timeouts

__all__ = [
    "DELEGATED",
    "DEFAULT_MAX_IN_FLIGHT",
    "Answer",
    "AnswerSink",
    "Answered",
    "AttemptObserver",
    "Attendance",
    "ChatRequest",
    "Client",
    "Completion",
    "GaveUp",
    "KeyComparison",
    "KeyStatus",
    "KeyUsage",
    "LocalEndpoint",
    "Provenance",
    "Reconciliation",
    "RetryPolicy",
    "RowRefused",
    "SettledAttempt",
    "SettlingSettings",
    "Timeouts",
    "check_key",
    "ensure_descriptors",
    "input_bound_tokens",
]
