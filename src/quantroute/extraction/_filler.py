"""Shards being filled from a source while another is written: what every way to extract shares."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quantroute.errors import DatasetError
from quantroute.extraction._manifest import Folder, ShardRecord, write_json
from quantroute.extraction._plan import ShardSpan, StateLayout
from quantroute.extraction._records import Example
from quantroute.extraction._safetensors import write_tensors
from quantroute.extraction._shard import ShardBuffer
from quantroute.extraction._source import StateSource
from quantroute.storage import atomic_write

__all__ = ["ShardFiller", "Taken", "first_of"]

Result = TypeVar("Result")
Taken = tuple[ShardSpan, list[Example]]


@dataclass(slots=True, kw_only=True)
class ShardFiller:
    """Fills and commits shards, some at a time; one is written while others are filled.

    Attributes:
        description: what the folder holds; its target, layers and states go into each file.
        at_once: shards being filled at a time; memory is that of one more.
        check_disk: called with the tokens taken and not yet written; raises if they do not fit.
        on_example: called for each result, lost ones too.
    """

    folder: Folder
    layout: StateLayout
    description: Mapping[str, Any]
    source: StateSource
    at_once: int
    check_disk: Callable[[int], None]
    on_example: Callable[[Example], None]
    _unwritten_tokens: int = field(default=0, init=False)
    _filling: asyncio.Semaphore = field(init=False, repr=False)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._filling = asyncio.Semaphore(self.at_once)

    async def fill(self, take: Callable[[], Awaitable[Taken | None]]) -> ShardRecord | None:
        """One shard from taking it to its marker; None if there was none to take.

        Raises:
            DatasetError: the disk ran short.
            SourceError: the source gave up.
        """
        async with self._filling:
            taken = await take()
            if taken is None:
                return None
            span, members = taken
            self._unwritten_tokens += span.tokens
            self.check_disk(self._unwritten_tokens)
            buffer = await self._filled(members)
        async with self._writing:
            record = await self._commit(span, buffer)
        self._unwritten_tokens -= span.tokens
        return record

    async def _filled(self, members: list[Example]) -> ShardBuffer:
        layout = self.layout
        buffer = ShardBuffer(
            members, slots=layout.slots, hidden_size=layout.hidden_size, dtype=layout.dtype
        )
        async for result in self.source.states(members):
            buffer.add(result)
            self.on_example(result.example)
        buffer.finish()
        return buffer

    async def _commit(self, span: ShardSpan, buffer: ShardBuffer) -> ShardRecord:
        try:
            return await _to_the_end(
                asyncio.to_thread(_write, self.folder, span, buffer, self.layout, self.description)
            )
        except OSError as error:
            raise DatasetError(
                path=str(self.folder.shard(span.index)),
                problem=f"{error.strerror or error}; make room and run again: what is committed "
                "stays",
            ) from error


def _write(
    folder: Folder,
    span: ShardSpan,
    buffer: ShardBuffer,
    layout: StateLayout,
    description: Mapping[str, Any],
) -> ShardRecord:
    """Shard, then its rows, then the marker that makes both count."""
    metadata = {
        name: json.dumps(description[name], sort_keys=True)
        for name in ("format", "version", "target", "layers", "last_state", "states")
    }
    written = write_tensors(folder.shard(span.index), buffer.tensors(fp8=layout.fp8), metadata)
    kept = buffer.kept
    rows = b"".join(_row_line(example) for example in kept)
    atomic_write(folder.rows(span.index), rows)
    record = ShardRecord(
        index=span.index,
        keys_sha256=span.keys_sha256,
        sha256=written.sha256,
        size_bytes=written.size_bytes,
        rows_sha256=hashlib.sha256(rows).hexdigest(),
        examples=len(kept),
        tokens=sum(map(len, kept)),
        loss_tokens=sum(int(example.loss_mask.sum()) for example in kept),
        lost=tuple(
            {"key": key, "reason": lost.reason, "detail": lost.detail}
            for key, lost in sorted(buffer.lost.items())
        ),
    )
    write_json(
        folder.marker(span.index),
        {name: getattr(record, name) for name in ShardRecord.__slots__},
    )
    return record


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await a thread's work. A cancelled wait ends only when the thread has: it holds our lock."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at: the cancellation is what there is to tell
        raise


def _row_line(example: Example) -> bytes:
    facts = {
        "key": example.key,
        "tokens": len(example),
        "loss_tokens": int(example.loss_mask.sum()),
        "provenance": dict(example.provenance),
    }
    return json.dumps(facts, ensure_ascii=False, sort_keys=True).encode() + b"\n"


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that stopped the others; a task group wraps even a single one."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
