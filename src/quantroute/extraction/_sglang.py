"""States from an SGLang server, as JSON numbers: for probes and small jobs, never for bulk.

The server must be started to return auxiliary states of the chosen layers *and* of the last one;
models that cannot capture their last layer so can be compared with, but not extracted from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantroute._extra import need
from quantroute.clock import Clock
from quantroute.errors import SourceError
from quantroute.extraction._norm import FinalNorm, read_norm
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.extraction._server import Refused, StateServer, spread
from quantroute.extraction._source import Lost, check_layers
from quantroute.extraction._target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["SglangSource", "sglang_flags"]


class SglangSource:
    """Asks `/generate` with `return_hidden_states`. Arguments as those of `VllmSource`."""

    def __init__(
        self,
        target: Path | str,
        layers: LayerIds | None = None,
        *,
        server: str,
        dtype: str | None = None,
        in_flight: int = 4,
        retries: int = 4,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self.target = Target.read(target)
        self.layers = layers or LayerIds.default(self.target.num_layers)
        self.dtype = dtype or self.target.dtype
        check_layers(self.target, self.layers)
        self._server = StateServer(server, retries=retries, timeout_s=timeout_s)
        if clock is not None:
            self._server.clock = clock
        self.name = self._server.url
        self._limit = in_flight
        self._slots = asyncio.Semaphore(in_flight)

    def final_norm(self) -> FinalNorm:
        """Out of the target's checkpoint: a server does not tell it."""
        return read_norm(self.target.folder, self.target.config)

    async def states(self, examples: Iterable[Example]) -> AsyncIterator[States | Lost]:
        """As they come; see `StateSource.states`."""
        async for result in spread(examples, self._ask, limit=self._limit):
            yield result

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    async def _ask(self, example: Example) -> States | Lost:
        body = {
            "input_ids": example.input_ids.tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_hidden_states": True,
        }
        async with self._slots:
            try:
                answer = await self._server.post("/generate", body)
            except Refused as refusal:
                return Lost(example=example, reason="refused", detail=str(refusal))
        rows = _prefill_rows(answer)
        if rows is None:
            raise SourceError(
                source=self.name,
                problem="its answers hold no hidden states; start it with "
                f"{sglang_flags(self.target, self.layers)}",
            )
        if len(rows) != len(example):
            # Chunked prefill keeps the last chunk only, a cache hit the part behind it.
            detail = f"{len(rows)} rows for {len(example)} tokens"
            return Lost(example=example, reason="missing_rows", detail=detail)
        return States(example=example, hidden=self._shaped(rows))

    def _shaped(self, rows: list[list[float]]) -> torch.Tensor:
        torch = need("torch")
        flat = torch.tensor(rows, dtype=torch.float32).to(getattr(torch, self.dtype))
        slots, width = len(self.layers.boundary) + 1, self.target.hidden_size
        if flat.ndim != 2 or flat.shape[1] != slots * width:
            got = flat.shape[-1] / width
            raise SourceError(
                source=self.name,
                problem=f"a token has {got:g} states of width {width}, not {slots}: the layers and "
                "the last state before the norm; start it with "
                f"{sglang_flags(self.target, self.layers)}; if this model cannot capture its last "
                "layer there, take vLLM or transformers",
            )
        return flat.reshape(len(rows), slots, width)


def sglang_flags(target: Target, layers: LayerIds) -> str:
    """The flags that a server of this target needs."""
    ids = " ".join(str(layer) for layer in (*layers.boundary, target.num_layers))
    return (
        "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
        f"--return-aux-hidden-state-layer-ids {ids} --chunked-prefill-size -1 "
        "--disable-radix-cache"
    )


def _prefill_rows(answer: dict[str, Any]) -> list[list[float]] | None:
    """The prompt's block: the first element; what follows is one vector per generated token."""
    blocks = (answer.get("meta_info") or {}).get("hidden_states")
    if not isinstance(blocks, list) or not blocks or not isinstance(blocks[0], list):
        return None
    rows: list[list[float]] = blocks[0]
    return rows if rows and isinstance(rows[0], list) else None
