"""An exchange as an answer: who served it, what it cost, and what is odd about it."""

from __future__ import annotations

from typing import Final

from quantroute.client._catalogue import Offers
from quantroute.client._delegated import Served, served_of
from quantroute.client._engine import Engine
from quantroute.client._outcome import Answer, Provenance
from quantroute.client._settlement import Post, Settlement
from quantroute.client._transport import Exchange
from quantroute.domain import Quantization
from quantroute.policy import Precision, served_by
from quantroute.routing import Candidate

__all__ = ["answer_of", "who_served"]

_NO_PRECISION: Final = Precision(quantization=Quantization.UNKNOWN, source="none")


def who_served(engine: Engine, candidate: Candidate, exchange: Exchange, offers: Offers) -> Served:
    """Who served, checked against who was asked; of an error nobody asks."""
    reply, endpoint = exchange.reply, candidate.endpoint
    is_answer = reply.error is None and reply.has_choice
    if candidate.members and is_answer:
        served = served_of(
            offers.pools[candidate.members],
            offers.precisions,
            provider_name=reply.provider,
            model=reply.model,
        )
        engine.catalogue.pauses.answered(served.endpoint)
        return served
    flags: tuple[str, ...] = ()
    if is_answer and endpoint.is_local:
        flags = engine.locals[endpoint.key].spec.served_flags(reply)
    elif is_answer:
        flags = served_by(endpoint, provider_name=reply.provider, model=reply.model)
    precision = offers.precisions.get(endpoint.key, _NO_PRECISION)
    return Served(endpoint=endpoint, precision=precision, pricing=endpoint.pricing, flags=flags)


def answer_of(
    exchange: Exchange,
    settlement: Settlement,
    served: Served,
    *,
    worst_pusd: int,
    listed_at_s: float,
    attempt: int,
) -> Answer:
    """The answer with its provenance.

    Args:
        worst_pusd: what was reserved for it; a bill above that is flagged.
        listed_at_s: when the endpoint's prices were read, Unix seconds.
    """
    reply = exchange.reply
    cost_pusd = settlement.charge.amount_pusd if isinstance(settlement, Post) else None
    more = [*served.flags, *reply.flags, *_flags_of_bill(exchange, settlement, worst_pusd)]
    return Answer(
        content=reply.content,
        reasoning=reply.reasoning,
        finish_reason=reply.finish_reason,
        native_finish_reason=reply.native_finish_reason,
        usage=reply.usage,
        cost_pusd=cost_pusd,
        provenance=Provenance(
            endpoint=served.endpoint,
            precision=served.precision,
            generation_id=reply.generation_id,
            served_provider=reply.provider,
            served_model=reply.model,
            listed_at_s=listed_at_s,
        ),
        flags=tuple(dict.fromkeys(more)),
        attempt=attempt,
        first_byte_s=exchange.first_byte_s,
        total_s=exchange.total_s,
    )


def _flags_of_bill(exchange: Exchange, settlement: Settlement, worst_pusd: int) -> list[str]:
    reply, more = exchange.reply, list[str]()
    if reply.usage is None:
        more.append("usage_missing")
    elif reply.usage.contradictions:
        more.append("usage_contradiction")
    if isinstance(settlement, Post):
        more.extend(settlement.charge.flags)
        if settlement.charge.amount_pusd > worst_pusd:
            more.append("overrun")
    elif reply.cost_usd is None:
        more.append("cost_missing")
    else:
        more.append("zero_cost")
    return more
