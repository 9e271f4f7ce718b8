"""A policy applied to one listing: verdicts, the `provider` object, and how they print."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from quantroute._html import notebook_table
from quantroute.domain import Endpoint, EndpointKey
from quantroute.errors import NoEligibleEndpoint
from quantroute.money import price_text
from quantroute.policy._preferences import delegated_preferences
from quantroute.policy._twins import answers_to, unwanted_among
from quantroute.policy._verdict import Verdict

if TYPE_CHECKING:
    from quantroute.policy._policy import ExclusionPolicy

__all__ = ["BoundPolicy"]

_HEADINGS = ("", "endpoint", "provider", "precision", "$/M in", "$/M out", "reasons")
_DECIDED_BY = {"evidence": " (evidence)", "user": " (your choice)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPolicy:
    """One verdict per listed endpoint, in the order of the list.

    `ignore` is the deny list in the service's spelling. `unmatched` names list entries that mean no
    endpoint of this listing ("exclude: Fireworks").
    """

    policy: ExclusionPolicy
    verdicts: tuple[Verdict, ...]
    at: datetime
    ignore: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def eligible(self) -> tuple[Endpoint, ...]:
        """The endpoints that may serve."""
        return tuple(verdict.endpoint for verdict in self.verdicts if verdict.eligible)

    @property
    def delegable(self) -> tuple[Endpoint, ...]:
        """Those among the eligible that can be asked for without letting in an unwanted one.

        A tag may be shared with an unwanted endpoint, and a bare slug means all endpoints of its
        company: alone the filters of a pinned request keep the unwanted one out, those of several
        endpoints together may not.
        """
        unwanted = unwanted_among(self.verdicts)
        return tuple(
            item
            for item in self.eligible
            if not any(answers_to(item.tag, other) for other in unwanted)
        )

    def reasons(self) -> list[str]:
        """One line per excluded endpoint."""
        return [str(verdict) for verdict in self.verdicts if not verdict.eligible]

    def preferences(self, *, among: Container[EndpointKey] | None = None) -> dict[str, Any]:
        """OpenRouter's `provider` object for delegated routing among the eligible endpoints.

        Args:
            among: only these; all of them by default.
        Raises:
            NoEligibleEndpoint: nothing is left; an empty `only` would mean no restriction.
        """
        endpoints = [item for item in self.delegable if among is None or item.key in among]
        if not endpoints:
            model = self.verdicts[0].endpoint.model if self.verdicts else "this model"
            raise NoEligibleEndpoint(model=model, reasons=self.reasons())
        return delegated_preferences(endpoints, self.policy, ignore=self.ignore)

    def __str__(self) -> str:
        rows = [_HEADINGS, *map(_cells, self.ranked)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        """The same table for notebooks; self-contained, every text escaped."""
        ranked = self.ranked
        return notebook_table(
            _HEADINGS,
            map(_cells, ranked),
            numeric={4, 5},
            dimmed={place for place, verdict in enumerate(ranked) if not verdict.eligible},
        )

    @property
    def ranked(self) -> list[Verdict]:
        """The verdicts as people read them: eligible ones first, each group by output price."""
        return sorted(self.verdicts, key=_by_eligibility_and_price)


def _cells(verdict: Verdict) -> tuple[str, ...]:
    endpoint, precision = verdict.endpoint, verdict.precision
    return (
        "yes" if verdict.eligible else "no",
        str(endpoint.key),
        endpoint.provider_name,
        precision.quantization.value + _DECIDED_BY.get(precision.source, ""),
        price_text(endpoint.pricing.input_usd_per_token),
        price_text(endpoint.pricing.output_usd_per_token),
        "; ".join(reason.text for reason in verdict.reasons) or "-",
    )


def _by_eligibility_and_price(verdict: Verdict) -> tuple[bool, Decimal, str]:
    price = verdict.endpoint.pricing.output_usd_per_token
    return (
        not verdict.eligible,
        Decimal("Infinity") if price is None else price,
        str(verdict.endpoint.key),
    )
