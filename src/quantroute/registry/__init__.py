"""The provider registry: fetch, cache, snapshot and compare. Wire names stop here."""

from __future__ import annotations

from quantroute.registry._changes import Change, ChangeKind, compare
from quantroute.registry._endpoints import EndpointList
from quantroute.registry._models import ModelList, ModelQuery, ModelSummary
from quantroute.registry._providers import ProviderDirectory
from quantroute.registry._registry import ProviderRegistry
from quantroute.registry._source import ModelNotListed

__all__ = [
    "ProviderRegistry",
    "EndpointList",
    "ModelList",
    "ModelSummary",
    "ModelQuery",
    "ProviderDirectory",
    "Change",
    "ChangeKind",
    "compare",
    "ModelNotListed",
]
