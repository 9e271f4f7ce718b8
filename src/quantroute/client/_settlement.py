"""What the ledger does with an attempt: post, void or hold; one rule set for every outcome.

Pure. The order of belief: the service's own `cost`, then the generation record (which settles what
is held here), then the price list, then the bound. Void needs proof that nothing was charged.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from msgspec import Struct

from quantroute.client._reply import Reply
from quantroute.ledger import Basis, Charge
from quantroute.money import to_pusd
from quantroute.pricing import Pricing, TokenUsage

__all__ = ["Hold", "Post", "Settlement", "Void", "settle"]


class Post(Struct, frozen=True):
    """The charge is known."""

    charge: Charge


class Void(Struct, frozen=True):
    """The attempt provably cost nothing."""

    reason: str


class Hold(Struct, frozen=True):
    """Nobody knows yet: the reservation stays counted until the bill is known."""

    reason: str


Settlement = Post | Void | Hold


def settle(reply: Reply, *, pricing: Pricing, when: datetime) -> Settlement:
    """The settlement of an attempt that got a reply.

    Args:
        pricing: of the endpoint the request was pinned to.
        when: moment of the answer (UTC), for prices that depend on the hour.
    """
    if reply.usage is not None and not reply.usage.is_possible:
        return Hold(f"an impossible bill: {reply.usage}")
    try:
        return _settle(reply, pricing, when)
    except ValueError as error:  # more than any journal can hold: a figure that cannot be true
        return Hold(f"an impossible bill: {error}")


def _settle(reply: Reply, pricing: Pricing, when: datetime) -> Settlement:
    if reply.is_success and reply.cost_usd is not None:
        return _settle_reported(reply, pricing, when)
    if not reply.is_success:
        return _settle_refusal(reply, pricing, when)
    if reply.error is not None and reply.usage is None and not reply.has_text:
        return Void("error before any token")
    if reply.usage is not None and reply.generation_id is None and reply.is_complete:
        return Post(_priced(reply, pricing, when, "cost_missing"))
    return Hold("no cost in the answer" if reply.is_complete else "the answer was cut")


#: Statuses of a middleman that stopped waiting, for the request or for its client.
_GAVE_UP_WAITING: Final = frozenset({408, 499})


def _settle_refusal(reply: Reply, pricing: Pricing, when: datetime) -> Settlement:
    """An error status set before the body, in the service's own JSON, precedes any charge.

    Unless it names one. HTML from the edge in front of the service that speaks of what happened
    behind it (a 5xx, a timeout) proves nothing.
    """
    if reply.cost_usd:
        return _settle_reported(reply, pricing, when)
    status = reply.http_status
    if not reply.is_json and (status >= 500 or status in _GAVE_UP_WAITING):
        return Hold(f"status {status} from the edge")
    return Void(f"status {status}")


def _settle_reported(reply: Reply, pricing: Pricing, when: datetime) -> Settlement:
    assert reply.cost_usd is not None
    usage = reply.usage
    flags = ("usage_contradiction",) if usage and usage.contradictions else ()
    if reply.cost_usd == 0 and reply.error is None and _costs_by_list(reply, pricing, when):
        # Zero is right for cache hits (usage 0 too), free endpoints (price 0) and BYOK (the
        # upstream share is in `cost_usd` by now); here it is a cost that got lost.
        if usage is None or reply.generation_id is not None:
            return Hold("a paid endpoint reported a cost of zero")
        return Post(_priced(reply, pricing, when, "zero_cost"))
    return Post(
        Charge(
            amount_pusd=to_pusd(reply.cost_usd),
            basis=Basis.REPORTED,
            usage=usage,
            generation_id=reply.generation_id,
            flags=flags,
        )
    )


def _costs_by_list(reply: Reply, pricing: Pricing, when: datetime) -> bool:
    """Whether the price list asks money for the answer; for text without counts, for any."""
    usage = reply.usage
    if usage is None and reply.has_text:
        usage = TokenUsage(input_tokens=1, output_tokens=1)
    if usage is None or not pricing.is_bounded:
        return False
    return pricing.charge_pusd(usage, when=when) > 0


def _priced(reply: Reply, pricing: Pricing, when: datetime, flag: str) -> Charge:
    assert reply.usage is not None
    return Charge(
        amount_pusd=pricing.charge_pusd(reply.usage, when=when),
        basis=Basis.PRICED,
        usage=reply.usage,
        generation_id=reply.generation_id,
        flags=(flag,),
    )
