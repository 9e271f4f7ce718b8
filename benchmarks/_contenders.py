"""The scripts that quantroute is compared with: short, as people write them, and not careless.

One plain script, two ways to ask. `provider=None` leaves the choice to the service, which balances
by the inverse square of the price; `{"sort": "price"}` asks for the cheapest first. Both let the
service fall back to other endpoints. The script holds a semaphore, checks its budget before each
call, and retries what deserves it with growing pauses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_ATTEMPTS = 8


@dataclass(slots=True, kw_only=True)
class PlainScript:
    """Prompts in, answers out; `rows` holds (dataset, body) of every answer it took."""

    url: str
    key: str
    model: str
    cap_usd: float
    slots: int
    max_tokens: int
    target_tokens: int  # per dataset
    first_pause_s: float
    provider: dict[str, Any] | None = None
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    spent_usd: float = 0.0
    _tokens: dict[str, int] = field(default_factory=dict)

    async def run(self, prompts: Sequence[tuple[str, str]]) -> None:
        """Ask every prompt, (dataset, text), while there is money and the dataset wants more."""
        room = asyncio.Semaphore(self.slots)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def one(dataset: str, text: str) -> None:
                async with room:
                    if self.spent_usd < self.cap_usd and self._wants(dataset):
                        await self._ask(session, dataset, text)

            await asyncio.gather(*(one(*prompt) for prompt in prompts))

    def _wants(self, dataset: str) -> bool:
        return self._tokens.get(dataset, 0) < self.target_tokens

    async def _ask(self, session: aiohttp.ClientSession, dataset: str, text: str) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
        }
        if self.provider is not None:
            body["provider"] = self.provider
        for attempt in range(_ATTEMPTS):
            try:
                async with session.post(f"{self.url}/chat/completions", json=body) as response:
                    if response.status == 429 or response.status >= 500:
                        raise ValueError(f"status {response.status}")
                    response.raise_for_status()
                    answer = await response.json()
                    _ = answer["choices"][0]["message"]["content"]
            except (aiohttp.ClientError, ValueError, LookupError, TypeError, TimeoutError):
                await asyncio.sleep(self.first_pause_s * 2**attempt * random.uniform(0.5, 1.5))
                continue
            self.spent_usd += answer["usage"]["cost"]
            done = self._tokens.get(dataset, 0)
            self._tokens[dataset] = done + answer["usage"]["completion_tokens"]
            self.rows.append((dataset, answer))
            return
