"""quantroute: cost-aware, precision-aware routing of LLM requests under a hard budget.

>>> from quantroute import Client
>>> async with Client(cap_usd="5.00", exclude=["Fireworks"]) as client:
...     answer = await client.chat("moonshotai/kimi-k2.5", "Why is the sky blue?")

The public names below are loaded when first used, so that `import quantroute` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quantroute._version import __version__

if TYPE_CHECKING:
    from quantroute._http import Service
    from quantroute.client import (
        Answer,
        Answered,
        ChatRequest,
        Client,
        Completion,
        GaveUp,
        LocalEndpoint,
        RetryPolicy,
        RowRefused,
        Timeouts,
    )
    from quantroute.domain import Endpoint, Quantization, Sampling
    from quantroute.errors import (
        AccountError,
        BudgetExceeded,
        ConfigurationError,
        NoEligibleEndpoint,
        QuantrouteError,
        RequestError,
    )
    from quantroute.ledger import Account, BudgetLedger
    from quantroute.money import NO_CAP
    from quantroute.policy import EvidenceTable, ExclusionPolicy, Verdict
    from quantroute.pricing import Pricing, TokenUsage
    from quantroute.registry import ProviderRegistry
    from quantroute.secrets import EnvKey

__all__ = [
    "NO_CAP",
    "Account",
    "AccountError",
    "Answer",
    "Answered",
    "BudgetExceeded",
    "BudgetLedger",
    "ChatRequest",
    "Client",
    "Completion",
    "ConfigurationError",
    "Endpoint",
    "EnvKey",
    "EvidenceTable",
    "ExclusionPolicy",
    "GaveUp",
    "LocalEndpoint",
    "NoEligibleEndpoint",
    "Pricing",
    "ProviderRegistry",
    "Quantization",
    "QuantrouteError",
    "RequestError",
    "RetryPolicy",
    "RowRefused",
    "Sampling",
    "Service",
    "Timeouts",
    "TokenUsage",
    "Verdict",
    "__version__",
]

_HOME = {
    "client": (
        "Answer",
        "Answered",
        "ChatRequest",
        "Client",
        "Completion",
        "GaveUp",
        "LocalEndpoint",
        "RetryPolicy",
        "RowRefused",
        "Timeouts",
    ),
    "domain": ("Endpoint", "Quantization", "Sampling"),
    "errors": (
        "AccountError",
        "BudgetExceeded",
        "ConfigurationError",
        "NoEligibleEndpoint",
        "QuantrouteError",
        "RequestError",
    ),
    "ledger": ("Account", "BudgetLedger"),
    "money": ("NO_CAP",),
    "policy": ("EvidenceTable", "ExclusionPolicy", "Verdict"),
    "pricing": ("Pricing", "TokenUsage"),
    "registry": ("ProviderRegistry",),
    "secrets": ("EnvKey",),
    "_http": ("Service",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'quantroute' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quantroute.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
