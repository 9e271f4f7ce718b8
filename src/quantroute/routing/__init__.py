"""Which allowed endpoint takes the next request: price, room, health. Pure."""

from quantroute.routing._breaker import Breaker, BreakerSettings, BreakerState
from quantroute.routing._economy import EndpointCost, EndpointEconomy
from quantroute.routing._limit import AdaptiveLimit, LimitSettings
from quantroute.routing._mix import Mix, Supply, cheapest_mix
from quantroute.routing._router import (
    Candidate,
    EndpointReport,
    Feedback,
    Lease,
    Router,
    RoutingMode,
    in_order,
)

__all__ = [
    "AdaptiveLimit",
    "Breaker",
    "BreakerSettings",
    "BreakerState",
    "Candidate",
    "EndpointCost",
    "EndpointEconomy",
    "EndpointReport",
    "Feedback",
    "Lease",
    "LimitSettings",
    "Mix",
    "Router",
    "RoutingMode",
    "Supply",
    "cheapest_mix",
    "in_order",
]
