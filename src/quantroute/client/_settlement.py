"""What the ledger does with an attempt: post, void or hold; one rule set for every outcome.

Pure. The order of belief: the service's own `cost`, then the generation record (which settles what
is held here), then the price list, then the bound. Void needs proof that nothing was charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from quantroute.client._reply import Reply
from quantroute.domain import Pricing
from quantroute.ledger import Basis, Charge
from quantroute.money import to_pusd

__all__ = ["Hold", "Post", "Settlement", "Void", "settle"]


@dataclass(frozen=True, slots=True)
class Post:
    """The charge is known."""

    charge: Charge


@dataclass(frozen=True, slots=True)
class Void:
    """The attempt provably cost nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Nobody knows yet: the reservation stays counted until the bill is known."""

    reason: str


Settlement = Post | Void | Hold


def settle(reply: Reply, *, pricing: Pricing, when: datetime) -> Settlement:
    """The settlement of an attempt that got a reply.

    Args:
        pricing: of the endpoint the request was pinned to.
        when: moment of the answer (UTC), for prices that depend on the hour.
    """
    if reply.http_status != 200:
        # An error status set before the body, in the service's own JSON, precedes any charge. HTML
        # from the edge in front of it (a 5xx) proves nothing about what happened behind.
        if reply.http_status >= 500 and not reply.is_json:
            return Hold(f"status {reply.http_status} from the edge")
        return Void(f"status {reply.http_status}")
    if reply.cost_usd is not None:
        return _settle_reported(reply, pricing, when)
    if reply.error is not None and reply.usage is None and not reply.has_text:
        return Void("error before any token")
    if reply.usage is not None and reply.generation_id is None and reply.is_complete:
        return Post(_priced(reply, pricing, when, "cost_missing"))
    return Hold("no cost in the answer" if reply.is_complete else "the answer was cut")


def _settle_reported(reply: Reply, pricing: Pricing, when: datetime) -> Settlement:
    assert reply.cost_usd is not None
    usage = reply.usage
    flags = ("usage_contradiction",) if usage and usage.contradictions else ()
    if reply.cost_usd == 0 and usage is not None and reply.error is None:
        listed_pusd = pricing.charge_pusd(usage, when=when) if pricing.is_bounded else 0
        if listed_pusd > 0:
            # Zero is right for cache hits (usage 0 too), free endpoints (price 0) and BYOK (the
            # upstream share is in `cost_usd` by now); here it is a cost that got lost.
            if reply.generation_id is not None:
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


def _priced(reply: Reply, pricing: Pricing, when: datetime, flag: str) -> Charge:
    assert reply.usage is not None
    return Charge(
        amount_pusd=pricing.charge_pusd(reply.usage, when=when),
        basis=Basis.PRICED,
        usage=reply.usage,
        generation_id=reply.generation_id,
        flags=(flag,),
    )
