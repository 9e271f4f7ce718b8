"""An extraction: plan, check the disk, fill and commit shard by shard, seal with a manifest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Any, Final, TypeVar

from quantroute._shard import Shard
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction._filler import ShardFiller, Taken, first_of
from quantroute.extraction._inputs import ExampleFiles
from quantroute.extraction._manifest import (
    Folder,
    ShardRecord,
    describe,
    differing_names,
    manifest_of,
    read_json,
    write_json,
)
from quantroute.extraction._norm import FinalNorm
from quantroute.extraction._plan import (
    DiskNeed,
    ExampleStream,
    Plan,
    Selection,
    ShardSpan,
    StateLayout,
    plan_shards,
)
from quantroute.extraction._records import Example, LayerIds
from quantroute.extraction._source import StateSource, probe_examples
from quantroute.extraction._target import Target
from quantroute.storage import FileLock, is_locked

__all__ = ["Extraction", "ExtractionProgress", "ExtractionReport", "StoreSettings"]

_GB: Final = 10**9

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a store is written.

    Attributes:
        shard_bytes: aimed at; a shard is held in memory, and one more while it is written.
        margin_bytes: of disk to leave free besides what is needed.
        shards_at_once: how many are filled at a time: more than one keeps a server busy.
        source: what else the manifest says of the source (kind, batch size): part of the identity.
    """

    dtype: str
    fp8: bool = False
    shard_bytes: int = _GB
    margin_bytes: int = 2 * _GB
    shards_at_once: int = 1
    selection: Selection = field(default_factory=Selection)
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shard_bytes < 1 or self.margin_bytes < 0 or self.shards_at_once < 1:
            raise ConfigurationError(
                "shard_bytes and shards_at_once must be positive, margin_bytes not negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionProgress:
    """Counts are of this worker's part; `resumed_tokens` stood before this start."""

    tokens: int
    total_tokens: int
    resumed_tokens: int
    written_bytes: int
    shards: int
    total_shards: int
    lost: int
    is_stopping: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionReport:
    """How one start ended: what it committed, `lost` examples being left out.

    `missing_shards` of the whole plan; none: the manifest stands.
    """

    folder: Path
    shards: int
    resumed_shards: int
    missing_shards: int
    examples: int
    tokens: int
    written_bytes: int
    lost: Mapping[str, int]
    was_stopped: bool

    @property
    def is_complete(self) -> bool:
        """Whether the store can be read."""
        return not self.missing_shards


class Extraction:
    """One worker's share of a store. `prepare` first: it needs no model; then `run`.

    Shards are cut by the plan alone, so a run that was killed and resumed, or split over many
    machines, gives the same files as one that was not, as far as the source is deterministic.

    Args:
        examples: a function that starts a new reading of the same examples.
        shard: this worker's share of the shards.
        plan: of the same examples and settings, made elsewhere: then nothing is read to make one.
        free_bytes: free space of the disk that holds a folder.
    """

    def __init__(
        self,
        *,
        target: Target,
        layers: LayerIds,
        examples: ExampleStream,
        out: Path | str,
        settings: StoreSettings,
        shard: Shard | None = None,
        plan: Plan | None = None,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.target, self.layers, self.settings = target, layers, settings
        self.shard = shard or Shard(0, 1)
        self.folder = Folder(Path(out))
        self.layout = StateLayout(
            slots=len(layers.boundary) + 1,
            hidden_size=target.hidden_size,
            dtype=settings.dtype,
            fp8=settings.fp8,
        )
        self._examples = examples
        self._free_bytes = free_bytes or _free_bytes
        self._plan = plan
        self._described: dict[str, Any] | None = None
        self._is_stopping = False

    @property
    def plan(self) -> Plan:
        """The split into shards; reads the examples at the first call."""
        if self._plan is None:
            shard_tokens = max(1, self.settings.shard_bytes // self.layout.bytes_per_token)
            self._plan = plan_shards(
                self._examples, shard_tokens=shard_tokens, selection=self.settings.selection
            )
        return self._plan

    def need(self) -> DiskNeed:
        """What this worker's missing shards take, against what is free now."""
        missing = self.missing()
        return self._need(sum(span.tokens for span in missing), len(missing))

    def prepare(self) -> DiskNeed:
        """Plan and look at the disk; nothing is written.

        Raises:
            DatasetError: no example is left, the disk is too small, or the folder holds something
                else.
        """
        if not self.plan.shards:
            reasons = [f"{count:,} {why}" for why, count in self.plan.left_out.items()]
            if isinstance(self._examples, ExampleFiles):
                reasons += self._examples.report.refusals()
            why = "; ".join(reasons) or "no rows"
            raise DatasetError(path="examples", problem=f"none to extract ({why})")
        self._check_identity()
        need = self.need()
        need.check(str(self.folder.path))
        return need

    def missing_tokens(self) -> int:
        """Tokens of this part that are not committed yet."""
        return sum(span.tokens for span in self.missing())

    def probe_examples(self) -> list[Example]:
        """A few beginnings of the job's own examples; see `probe_examples`."""
        return probe_examples(compress(self._examples(), self.plan.taken))

    async def measure(self, source: StateSource, *, examples: int) -> float:
        """Tokens per second of the source on the first examples; nothing is written."""
        first = list(islice(compress(self._examples(), self.plan.taken), examples))
        began_s = time.perf_counter()
        async for _ in source.states(first):
            pass
        return sum(map(len, first)) / (time.perf_counter() - began_s)

    def request_stop(self) -> None:
        """Begin no further shard; those in work are finished. Call it on the event loop."""
        self._is_stopping = True

    async def run(
        self,
        source: StateSource,
        on_progress: Callable[[ExtractionProgress], None] | None = None,
    ) -> ExtractionReport:
        """Extract what is missing of this part; if nothing is missing of the whole, seal it.

        Raises:
            DatasetError: the disk ran short, or the folder holds another extraction.
            JournalError: another process writes the same part.
            SourceError: the source gave up. What is committed stays, in every case.
        """
        self.require(source)
        with self.opened():
            self.keep_norm(source)
            work = _Work(self, source, on_progress)
            await work.execute()
            missing = self.seal()
        return work.report(missing)

    def require(self, source: StateSource) -> None:
        """Refuse a source that gives other states than the store is to hold.

        Raises:
            ConfigurationError: other layers or another dtype.
        """
        if (source.layers, source.dtype) != (self.layers, self.settings.dtype):
            raise ConfigurationError(
                f"the source gives {source.dtype} of layers {list(source.layers.boundary)}, "
                f"the store wants {self.settings.dtype} of {list(self.layers.boundary)}"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, prepared and locked for this part. Raises as `run`."""
        self.prepare()
        with self._locked():
            if not self.folder.plan.exists():
                write_json(self.folder.plan, self._description())
            self.sweep()
            yield

    def keep_norm(self, source: StateSource) -> None:
        """Store the target's final norm, or see that it is the one that was stored.

        Raises:
            DatasetError: the target's weights have changed.
        """
        norm = source.final_norm()
        if not self.folder.norm.exists():
            norm.save(self.folder.norm)
        elif not norm.equals(FinalNorm.load(self.folder.norm)):
            raise DatasetError(
                path=str(self.folder.norm),
                problem="is not the final norm of this target: its weights have changed since the "
                "extraction began; choose another folder",
            )

    def seal(self) -> int:
        """Write the manifest if every shard stands; the number of those that do not."""
        records = [self._committed(span) for span in self.plan.shards]
        whole = [record for record in records if record is not None]
        if len(whole) == len(records):
            norm = FinalNorm.load(self.folder.norm)
            manifest = manifest_of(self._description(), self.plan, whole, norm, self.folder)
            write_json(self.folder.manifest, manifest)
        return len(records) - len(whole)

    def missing(self) -> list[ShardSpan]:
        """Shards of this part that are not committed yet."""
        return [span for span in self._own() if self._committed(span) is None]

    # -- the folder -------------------------------------------------------------------------------

    def _own(self) -> Iterator[ShardSpan]:
        return (span for span in self.plan.shards if self.shard.has(span.index))

    def filler(self, source: StateSource, *, on_example: Callable[[Example], None]) -> ShardFiller:
        """What fills and commits this job's shards, whichever they are."""
        return ShardFiller(
            folder=self.folder,
            layout=self.layout,
            description=self._description(),
            source=source,
            at_once=self.settings.shards_at_once,
            check_disk=lambda tokens: self._need(tokens, 1).check(str(self.folder.path)),
            on_example=on_example,
        )

    def _committed(self, span: ShardSpan) -> ShardRecord | None:
        return self.folder.committed(span.index, span.keys_sha256)

    def _need(self, tokens: int, shards: int) -> DiskNeed:
        return DiskNeed(
            tokens=tokens,
            shards=shards,
            layout=self.layout,
            free_bytes=self._free_bytes(self.folder.path),
            margin_bytes=self.settings.margin_bytes,
        )

    def _description(self) -> dict[str, Any]:
        if self._described is None:
            described = describe(self.target, self.layers, self.layout, source=self.settings.source)
            described["selection"] = self.settings.selection.as_dict()
            described["plan"] = {
                "sha256": self.plan.sha256,
                "examples": self.plan.examples,
                "tokens": self.plan.tokens,
                "shards": len(self.plan.shards),
            }
            # As it reads back from a file: tuples become lists.
            self._described = json.loads(json.dumps(described))
        return self._described

    def _check_identity(self) -> None:
        if not self.folder.plan.exists():
            if self.folder.path.exists() and any(self.folder.path.glob("shards/*.safetensors")):
                raise DatasetError(
                    path=str(self.folder.path),
                    problem="holds shards without a plan; choose another",
                )
            return
        stored, ours = read_json(self.folder.plan), self._description()
        if "weights_sample_sha256" not in (stored.get("source") or {}):
            # A folder of before weights were looked at is still known again.
            rest = {k: v for k, v in ours["source"].items() if k != "weights_sample_sha256"}
            ours = {**ours, "source": rest}
        if differing := list(differing_names(stored, ours)):
            raise DatasetError(
                path=str(self.folder.path),
                problem=f"holds another extraction ({', '.join(differing)} differ); choose another "
                "folder, or put settings, rows and target back as they were",
            )

    def sweep(self) -> None:
        """Take away what a killed worker of this part was writing."""
        for leftover in self.folder.path.glob("shards/.*.tmp"):
            index = leftover.name.split(".")[1]
            if index.isdecimal() and self.shard.has(int(index)):
                leftover.unlink(missing_ok=True)

    def _locked(self) -> FileLock:
        """Refuses a second worker for this part, and workers that count parts otherwise."""
        locks = self.folder.path / "locks"
        for other in locks.glob("*.lock"):
            of = other.stem.rpartition("-of-")[2]
            if of != str(self.shard.count) and is_locked(other):
                raise DatasetError(
                    path=str(other), problem=f"a worker is writing one of {of} parts; let it end"
                )
        return FileLock(locks / f"{self.shard.index}-of-{self.shard.count}.lock")


class _Work:
    """One `run`: some shards are filled while one is written."""

    def __init__(
        self,
        job: Extraction,
        source: StateSource,
        on_progress: Callable[[ExtractionProgress], None] | None,
    ) -> None:
        self._job, self._on_progress = job, on_progress
        own = list(job._own())
        done = {span.index for span in own if job._committed(span) is not None}
        self._missing = {span.index for span in own} - done
        self._resumed_shards = len(done)
        self._resumed_tokens = sum(span.tokens for span in own if span.index in done)
        self._total_tokens = sum(span.tokens for span in own)
        self._total_shards = len(own)
        self._tokens = self._resumed_tokens  # asked for; `_kept_tokens` have states
        self._examples = self._kept_tokens = self._written_bytes = self._shards = 0
        self._lost: Counter[str] = Counter()
        self._todo = job.plan.members(job._examples, self._missing)
        self._taking = asyncio.Lock()
        self._filler = job.filler(source, on_example=self._count)

    async def execute(self) -> None:
        """Until nothing is missing, or the job is to stop."""
        # One task more than shards being filled: the one that writes.
        workers = self._job.settings.shards_at_once + 1
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(workers, len(self._missing))):
                    group.create_task(self._work())
        except BaseExceptionGroup as group_error:
            raise first_of(group_error) from None

    async def _work(self) -> None:
        while (record := await self._filler.fill(self._take)) is not None:
            self._shards += 1
            self._examples += record.examples
            self._kept_tokens += record.tokens
            self._written_bytes += record.size_bytes
            self._lost.update(item["reason"] for item in record.lost)
            self._tell()

    async def _take(self) -> Taken | None:
        async with self._taking:
            if self._job._is_stopping:
                return None
            # Reading rows and rendering them is work: not on the event loop.
            return await asyncio.to_thread(next, self._todo, None)

    def _count(self, example: Example) -> None:
        self._tokens += len(example)
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                ExtractionProgress(
                    tokens=self._tokens,
                    total_tokens=self._total_tokens,
                    resumed_tokens=self._resumed_tokens,
                    written_bytes=self._written_bytes,
                    shards=self._resumed_shards + self._shards,
                    total_shards=self._total_shards,
                    lost=sum(self._lost.values()),
                    is_stopping=self._job._is_stopping,
                )
            )

    def report(self, missing_shards: int) -> ExtractionReport:
        """How it ended."""
        return ExtractionReport(
            folder=self._job.folder.path,
            shards=self._shards,
            resumed_shards=self._resumed_shards,
            missing_shards=missing_shards,
            examples=self._examples,
            tokens=self._kept_tokens,
            written_bytes=self._written_bytes,
            lost=dict(self._lost),
            was_stopped=self._job._is_stopping,
        )


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
