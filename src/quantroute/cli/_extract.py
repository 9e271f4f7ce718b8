"""`quantroute extract`: hidden states of a run's rows, from your own copy of the target."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quantroute._signals import on_stop_signals
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say
from quantroute.errors import ConfigurationError

if TYPE_CHECKING:
    from quantroute.extraction import (
        DiskNeed,
        Extraction,
        ExtractionProgress,
        ExtractionReport,
        ExtractSpec,
        PoolEvent,
        ProbeReport,
        RayExtraction,
        TokensReport,
    )

__all__ = ["extract"]

_PLAIN_LINE_S: Final = 5.0
_REDRAW_S: Final = 0.1
_TIMED_EXAMPLES: Final = 32


def extract(
    spec: Annotated[Path, typer.Argument(help="The run's file, with an [extract] table.")],
    shard: options.Shard = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan, probe and time the source; write nothing.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Try the source on a few examples first.")
    ] = True,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Do it by Ray actors, each with the source of the file.")
    ] = False,
    actors: Annotated[int, typer.Option(min=1, help="With --ray: how many.")] = 2,
    gpus_per_actor: Annotated[
        float, typer.Option(min=0, help="With --ray: GPUs reserved for each.")
    ] = 0.0,
    ray_address: Annotated[
        str | None,
        typer.Option(help='With --ray: a running cluster, or "auto". Default: this machine.'),
    ] = None,
    drop_failed_audit: options.DropFailedAudit = None,
    as_json: options.Json = False,
) -> None:
    """Extract the target's hidden states for the rows of a run, into a folder of shards.

    Says first what it will take on the disk, and refuses what does not fit. Interrupted or killed,
    the same command goes on with the first shard that is missing. With --shard, workers on many
    machines fill one folder; whoever finishes last writes the manifest.

    quantroute extract run.toml --dry-run

    quantroute extract run.toml --shard 2/8

    quantroute extract run.toml --ray --actors 4 --gpus-per-actor 2 --ray-address auto
    """
    _require_extra()
    if on_ray and (dry_run or shard is not None):
        raise ConfigurationError("--ray does all shards: leave --shard and --dry-run out")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the target is a folder; nothing is fetched
    from quantroute.extraction import Shard, load_extract_spec

    described = load_extract_spec(spec, drop_failed_audit=drop_failed_audit)
    job = described.job(None if shard is None else Shard.parse(shard))
    need = job.prepare()
    tokens = described.examples.report
    if not as_json:
        _show_plan(job, need, tokens)
        for text in described.examples.notes:
            say(f"note: {text}")
    if on_ray:
        from quantroute.extraction import ActorPool, RayExtraction

        pool = ActorPool(actors=actors, gpus_per_actor=gpus_per_actor, address=ray_address)
        work = RayExtraction(spec, job, pool, probing=probe)
        facts = asyncio.run(_perform_on_ray(work, total=len(job.plan.shards), silent=as_json))
    else:
        performing = _perform(described, job, dry_run=dry_run, probing=probe, silent=as_json)
        facts = asyncio.run(performing)
    if as_json:
        plan = _plan_data(job, need, tokens) | {"notes": list(described.examples.notes)}
        print_json({"plan": plan, **facts})
    if facts.get("was_stopped"):
        raise typer.Exit(ExitCode.INTERRUPTED)
    if facts.get("lost"):
        raise typer.Exit(ExitCode.INCOMPLETE)


def _require_extra() -> None:
    missing = [
        name
        for name in ("numpy", "safetensors", "torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not installed; hidden states need: "
            "pip install 'quantroute[extract]'"
        )


async def _perform(
    spec: ExtractSpec, job: Extraction, *, dry_run: bool, probing: bool, silent: bool
) -> dict[str, Any]:
    """Probe and run; what there is to tell as JSON values."""
    from quantroute.extraction import probe

    if not dry_run and not job.missing_tokens():
        probing = False  # nothing but the manifest can be left to do
    source = await asyncio.to_thread(spec.open_source)
    facts: dict[str, Any] = {}
    try:
        if probing:
            report = await probe(source, job.probe_examples())
            facts["probe"] = dataclasses.asdict(report)
            if not silent:
                _show_probe(report)
        if dry_run:
            rate = await job.measure(source, examples=_TIMED_EXAMPLES)
            facts["tokens_per_s"] = rate
            if not silent:
                hours = job.missing_tokens() / rate / 3_600
                say(f"{rate:,.0f} tokens/s here: {hours:,.2f} hours for this part")
            return facts
        reporter = _Reporter(is_silent=silent)
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            reporter.note_stopping()
            job.request_stop()

        with reporter, on_stop_signals(stop, task.cancel):
            done = await job.run(source, reporter.on_progress)
        if not silent:
            _show_report(done)
        return facts | _report_data(done)
    finally:
        await source.close()


async def _perform_on_ray(work: RayExtraction, *, total: int, silent: bool) -> dict[str, Any]:
    """A line per shard and per dead actor; what there is to tell as JSON values."""
    task = asyncio.current_task()
    assert task is not None

    def tell(event: PoolEvent) -> None:
        if silent:
            return
        if event.record is None:
            say(f"{event.worker} died: shard {event.index} is done again", err=True)
        else:
            tokens = event.record.tokens
            say(f"shard {event.index} of {total}: {tokens:,} tokens, {event.worker}", err=True)

    with on_stop_signals(work.request_stop, task.cancel):
        done = await work.run(tell)
    if not silent:
        _show_report(done)
    return _report_data(done)


class _Reporter:
    """Tokens, rates and time to go: a live line on terminals, a plain line now and then else."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._is_live = self._console.is_terminal and not is_silent
        self._began_s = self._shown_s = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.fields[facts]}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=5,
            transient=True,
        )
        self._task = self._bar.add_task("tokens", total=None, facts="starting")

    def __enter__(self) -> _Reporter:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bar.stop()

    def on_progress(self, progress: ExtractionProgress) -> None:
        """Called after every example; draws at most ten times a second."""
        now_s = time.monotonic()
        if self._is_silent or now_s - self._shown_s < (
            _REDRAW_S if self._is_live else _PLAIN_LINE_S
        ):
            return
        self._shown_s = now_s
        facts = ", ".join(self._facts(progress, now_s - self._began_s))
        if self._is_live:
            self._bar.update(
                self._task, completed=progress.tokens, total=progress.total_tokens, facts=facts
            )
        else:
            self._console.print(facts, soft_wrap=True)

    def note_stopping(self) -> None:
        """Say at once that the first Ctrl+C was heard, and what a second one does."""
        if not self._is_silent:
            self._console.print(
                "stopping: finishing the shards in work; Ctrl+C again leaves at once",
                soft_wrap=True,
            )

    def _facts(self, progress: ExtractionProgress, elapsed_s: float) -> list[str]:
        tokens_per_s = (progress.tokens - progress.resumed_tokens) / elapsed_s
        facts = [
            f"{progress.tokens:,}/{progress.total_tokens:,} tokens",
            f"{tokens_per_s:,.0f} tokens/s",
            f"{progress.written_bytes / elapsed_s / 1e9:.2f} GB/s",
            f"shard {progress.shards:,}/{progress.total_shards:,}",
        ]
        if not self._is_live and tokens_per_s:
            facts.append(f"{(progress.total_tokens - progress.tokens) / tokens_per_s:,.0f} s to go")
        if progress.lost:
            facts.append(f"{progress.lost:,} lost")
        return facts


def _show_plan(job: Extraction, need: DiskNeed, tokens: TokensReport) -> None:
    plan, layout = job.plan, job.layout
    say(
        f"{plan.examples:,} examples, {plan.tokens:,} tokens ({plan.loss_tokens:,} learnt) in "
        f"{len(plan.shards):,} shards"
    )
    for reason, count in sorted(plan.left_out.items()):
        say(f"left out: {count:,} {reason.replace('_', ' ')}")
    for text in tokens.refusals():
        say(f"refused: {text}")
    say(
        f"layers {list(job.layers.boundary)} (boundary) and the last before the norm, stored as "
        f"{layout.stored_as}: {layout.state_bytes_per_token:,} bytes a token"
    )
    say(
        f"disk: {_gigabytes(need.need_bytes)} for {need.tokens:,} tokens to do, "
        f"{_gigabytes(need.free_bytes)} free"
    )


def _show_probe(report: ProbeReport) -> None:
    say(
        f"probe: {report.examples} examples, {report.tokens} tokens; a batch agrees with single "
        f"requests (mean cosine {min(report.cosine):.5f}, least {report.min_cosine:.5f})"
    )


def _show_report(report: ExtractionReport) -> None:
    say(
        f"{report.tokens:,} tokens of {report.examples:,} examples in {report.shards:,} shards "
        f"({report.resumed_shards:,} stood before), {_gigabytes(report.written_bytes)} written"
    )
    for reason, count in sorted(report.lost.items()):
        say(f"lost: {count:,} {reason.replace('_', ' ')}")
    if report.is_complete:
        say(f"complete: {report.folder}/manifest.json")
    else:
        say(f"{report.missing_shards:,} shards are missing; the same command goes on")


def _plan_data(job: Extraction, need: DiskNeed, tokens: TokensReport) -> dict[str, Any]:
    return {
        "examples": job.plan.examples,
        "tokens": job.plan.tokens,
        "loss_tokens": job.plan.loss_tokens,
        "shards": len(job.plan.shards),
        "left_out": dict(job.plan.left_out),
        "refused": dict(tokens.refused),
        "bytes_per_token": job.layout.state_bytes_per_token,
        "need_bytes": need.need_bytes,
        "free_bytes": need.free_bytes,
    }


def _report_data(report: ExtractionReport) -> dict[str, Any]:
    facts = dataclasses.asdict(report)
    return facts | {"folder": str(report.folder), "is_complete": report.is_complete}


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB"
