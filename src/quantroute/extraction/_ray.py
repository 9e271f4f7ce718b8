"""Extraction by a pool of Ray actors. Needs the extra `quantroute[ray]`; imported only then.

Ray places the actors and tells when one died. What is committed is known from the folder alone,
never from Ray: a cluster that vanishes loses the shards in work and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError, SourceError
from quantroute.extraction._job import Extraction, ExtractionReport
from quantroute.extraction._manifest import ShardRecord
from quantroute.extraction._plan import Plan, ShardCursor
from quantroute.extraction._pool import PoolEvent, ShardQueue, WorkerLost, work_off
from quantroute.extraction._source import probe
from quantroute.extraction._spec import load_extract_spec

__all__ = ["ActorPool", "RayExtraction"]

_STARTS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPool:
    """Where and how many.

    Attributes:
        actors: each loads the target, or asks the server of the run's file.
        gpus_per_actor: reserved for each; with several, `device = "auto"` spreads the target.
        cpus_per_actor: reserved for each.
        address: of a running cluster, "auto" for the one of this machine; None starts one here,
            that ends with this process.
    """

    actors: int = 2
    gpus_per_actor: float = 0.0
    cpus_per_actor: float = 1.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.actors < 1 or self.gpus_per_actor < 0 or self.cpus_per_actor < 0:
            raise ConfigurationError("actors must be positive; GPUs and CPUs of each not negative")


class RayExtraction:
    """All missing shards of a job, by a pool. The folder and the run's file are seen by all hosts.

    Args:
        spec: the run's file; each actor reads it under the same path.
        job: made from it, the whole of it (not a part).
        probing: every actor tries its source first.
    """

    def __init__(
        self, spec: Path, job: Extraction, pool: ActorPool, *, probing: bool = True
    ) -> None:
        self._spec, self._job, self._pool, self._probing = spec.resolve(), job, pool, probing
        self._queue: ShardQueue | None = None
        self._is_stopping = False
        self._records: list[ShardRecord] = []

    async def run(self, on_event: Callable[[PoolEvent], None] | None = None) -> ExtractionReport:
        """Until nothing is missing, or the job is to stop.

        Raises:
            As `Extraction.run`; ConfigurationError: the cluster cannot hold such actors.
        """
        ray = need("ray", extra="ray")
        told = on_event or (lambda _: None)

        def note(event: PoolEvent) -> None:
            if event.record is not None:
                self._records.append(event.record)
            told(event)

        with self._job.opened():
            missing = [span.index for span in self._job.missing()]
            if missing:
                with _cluster(ray, self._pool):
                    await self._work_off(ray, missing, note)
                self._job.sweep()  # what dead actors were writing
            left = self._job.seal()
        return self._report(left, done_before=len(self._job.plan.shards) - len(missing))

    def request_stop(self) -> None:
        """Begin no further shard; those in work are finished. Call it on the event loop."""
        self._is_stopping = True
        if self._queue is not None:
            self._queue.close()

    async def _work_off(
        self, ray: Any, missing: list[int], note: Callable[[PoolEvent], None]
    ) -> None:
        queue = self._queue = ShardQueue(missing)
        if self._is_stopping:
            queue.close()
        pool, lanes = self._pool, self._job.settings.shards_at_once + 1
        plan = ray.put(self._job.plan)
        kind = ray.remote(
            num_gpus=pool.gpus_per_actor,
            num_cpus=pool.cpus_per_actor,
            max_concurrency=lanes + 1,
            max_restarts=0,  # the pool starts a new one: it has to load the target again
        )(ShardActor)

        async def start(number: int) -> _RayWorker:
            worker = _RayWorker(ray, kind.remote(str(self._spec), plan), number)
            await worker.open(probing=self._probing)
            return worker

        workers = min(pool.actors, len(missing))
        await work_off(queue, start, workers=workers, lanes=lanes, on_event=note)

    def _report(self, left: int, *, done_before: int) -> ExtractionReport:
        records = self._records
        return ExtractionReport(
            folder=self._job.folder.path,
            shards=len(records),
            resumed_shards=done_before,
            missing_shards=left,
            examples=sum(record.examples for record in records),
            tokens=sum(record.tokens for record in records),
            written_bytes=sum(record.size_bytes for record in records),
            lost=dict(Counter(item["reason"] for record in records for item in record.lost)),
            was_stopped=self._is_stopping,
        )


class ShardActor:
    """Runs in an actor's process: one source, shards one after the other, committed by itself."""

    def __init__(self, spec: str, plan: Plan) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._spec = load_extract_spec(Path(spec))
        self._job = self._spec.job(plan=plan)
        self._cursor = ShardCursor(plan, self._spec.examples)
        self._reading = asyncio.Lock()

    async def open(self, *, probing: bool) -> int:
        """Load the target; the process id."""
        self._source = await asyncio.to_thread(self._spec.open_source)
        self._job.require(self._source)
        if probing:
            await probe(self._source, self._job.probe_examples())
        self._job.keep_norm(self._source)
        self._filler = self._job.filler(self._source, on_example=lambda _: None)
        return os.getpid()

    async def extract(self, index: int) -> ShardRecord:
        """One shard, committed."""

        async def take() -> Any:
            async with self._reading:
                return await asyncio.to_thread(self._cursor.at, index)

        record = await self._filler.fill(take)
        assert record is not None  # there was one to take
        return record


class _RayWorker:
    """An actor as the pool sees it."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self._ray, self._actor, self.name = ray, actor, f"actor {number}"

    async def open(self, *, probing: bool) -> None:
        try:
            pid = await self._call(self._actor.open, probing=probing)
        except WorkerLost as error:
            raise SourceError(
                source=self.name, problem=f"it died while it loaded the target: {error}"
            ) from error
        self.name += f" (process {pid})"

    async def extract(self, index: int) -> ShardRecord:
        record: ShardRecord = await self._call(self._actor.extract, index)
        return record

    def close(self) -> None:
        self._ray.kill(self._actor)

    async def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await method.remote(*arguments, **named)
        except errors.RayTaskError as error:
            raise error.cause from error  # ours, as it was raised there
        except (errors.RayActorError, errors.RaySystemError) as error:
            raise WorkerLost(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def _cluster(ray: Any, pool: ActorPool) -> Iterator[None]:
    """Connected, or started here on loopback and ended after; one that is there already is used."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if pool.address is not None:
        try:
            ray.init(address=pool.address, **quiet)
        except ConnectionError as error:
            raise ConfigurationError(
                f"no Ray cluster at {pool.address!r}: {error}; start one with `ray start --head`, "
                "or leave the address out"
            ) from error
    else:
        _start_here(ray, math.ceil(pool.actors * pool.cpus_per_actor), quiet)
    try:
        if pool.address is None:
            _require_gpus(ray, pool)
        yield
    finally:
        ray.shutdown()


def _start_here(ray: Any, cpus: int, quiet: Mapping[str, Any]) -> None:
    """On loopback. Ray gives its own processes half a minute: a busy machine needs another try."""
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        except Exception as error:  # it raises no narrower one
            ray.shutdown()
            if "timed out" not in str(error) or attempt == _STARTS:
                raise SourceError(
                    source="ray", problem=f"it did not start on this machine: {error}"
                ) from error
        else:
            return


def _require_gpus(ray: Any, pool: ActorPool) -> None:
    """A cluster may grow, this machine does not: an actor without its GPUs would wait for ever."""
    wanted, found = pool.actors * pool.gpus_per_actor, ray.cluster_resources().get("GPU", 0)
    if wanted > found:
        raise ConfigurationError(
            f"{pool.actors} actors with {pool.gpus_per_actor:g} GPUs each want {wanted:g}, this "
            f"machine has {found:g}; take fewer, or give the address of a cluster"
        )
