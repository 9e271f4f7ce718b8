"""A client on a simulated service, with short pauses; for tests of several folders."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from quantroute import Client, Service
from quantroute.client import RetryPolicy, Timeouts
from quantroute.routing import BreakerSettings, LimitSettings
from quantroute.simulator import Scenario, Simulator, kimi_mission_scenario

MODEL = "moonshotai/kimi-k2.5"


def fast(**changes: Any) -> dict[str, Any]:
    """Client settings under which a test never waits long."""
    return {
        "cap_usd": "10",
        "retry": RetryPolicy(base_s=0.001, cap_s=0.01, max_attempts=8, max_paid_attempts=8),
        "limits": LimitSettings(pause_s=0.005, max_pause_s=0.02),
        "breakers": BreakerSettings(failures=8, pause_s=0.01, max_pause_s=0.05),
        "timeouts": Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=10.0),
        "rng": random.Random(7),
    } | changes


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that another task brings about and tells nobody; the test's own timeout
    bounds it.
    """
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(
    scenario: Scenario | None = None, *, seed: int = 1, **settings: Any
) -> AsyncIterator[tuple[Client, Simulator]]:
    """An open client and the simulator it talks to."""
    async with AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(
            Simulator(scenario or kimi_mission_scenario(), seed=seed)
        )
        client = Client(service=Service(base_url=simulator.base_url), **fast(**settings))
        await stack.enter_async_context(client)
        yield client, simulator
