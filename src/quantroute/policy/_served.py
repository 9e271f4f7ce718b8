"""After the answer: did the endpoint that was asked really serve it?"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

from quantroute.domain import Endpoint, slugify

__all__ = ["served_among", "served_by"]

_DATE_SUFFIX: Final = re.compile(r"-(\d{4}|\d{6}|\d{8}|\d{4}-\d{2}-\d{2})$")
"""How a dated name ends: `moonshotai/kimi-k2.5-0127`."""


def served_by(
    endpoint: Endpoint,
    *,
    provider_name: str | None,
    model: str | None,
    canonical_slug: str | None = None,
) -> tuple[str, ...]:
    """Flags of what does not fit; empty when the answer names the endpoint that was asked.

    The answer tells the company, never the tag: which of a company's endpoints served can only be
    fixed beforehand, by pinning.

    Args:
        provider_name: the answer's `provider`, a display name; None if it does not say.
        model: the answer's `model`, usually a dated name; None is no contradiction.
        canonical_slug: the model's dated name from the catalogue, if at hand.
    Returns:
        Any of "served_unknown" (no provider named), "served_mismatch" (another company) and
        "model_mismatch" (another model).
    """
    flags: list[str] = []
    if not provider_name:
        flags.append("served_unknown")
    elif slugify(provider_name) not in _companies(endpoint.provider_name, endpoint.provider_slug):
        flags.append("served_mismatch")
    if model and not _is_model(model, endpoint, canonical_slug):
        flags.append("model_mismatch")
    return tuple(flags)


def served_among(
    endpoints: Sequence[Endpoint], *, provider_name: str | None, model: str | None
) -> tuple[tuple[Endpoint, ...], tuple[str, ...]]:
    """Which of several allowed endpoints may have served, and flags of what does not fit.

    Flags are those of `served_by`, and "served_ambiguous" if the company has several of them.
    """
    fitting = []
    flags: dict[str, None] = {}
    for endpoint in endpoints:
        found = served_by(endpoint, provider_name=provider_name, model=model)
        if "served_mismatch" not in found and "served_unknown" not in found:
            fitting.append(endpoint)
            flags.update(dict.fromkeys(found))
    if len(fitting) > 1:
        flags["served_ambiguous"] = None
    elif not fitting:
        flags["served_mismatch" if provider_name else "served_unknown"] = None
        if model and not any(_is_model(model, item, None) for item in endpoints):
            flags["model_mismatch"] = None
    return tuple(fitting), tuple(flags)


# Both are asked with every answer, for the few endpoints of a model.
@functools.lru_cache(maxsize=256)
def _companies(provider_name: str, provider_slug: str) -> frozenset[str]:
    return frozenset({slugify(provider_name), slugify(provider_slug)})


def _is_model(model: str, endpoint: Endpoint, canonical_slug: str | None) -> bool:
    return _names(model, endpoint.model, endpoint.served_name, canonical_slug)


@functools.lru_cache(maxsize=256)
def _names(model: str, listed: str, served_name: str | None, canonical_slug: str | None) -> bool:
    """Whether an answer's `model` names the listed one."""
    answered = _base(model)
    dated = [_base(name) for name in (served_name, canonical_slug) if name]
    asked = _base(listed)
    if answered == asked or answered in dated:
        return True
    # Only where no dated name is known may a date be stripped: kimi-k2-0905 is not kimi-k2-0711.
    return not dated and _DATE_SUFFIX.sub("", answered) == asked


def _base(model: str) -> str:
    """Without the variant (`:free`), which answers may or may not repeat."""
    return model.casefold().partition(":")[0]
