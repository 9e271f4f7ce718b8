"""`quantroute generate`: the main job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NoReturn
from urllib.parse import urldefrag

import typer

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._datasets import (
    DatasetsJob,
    DatasetsOutcome,
    datasets_data,
    datasets_exit_code,
    perform_datasets,
    print_datasets,
)
from quantroute.cli._job import Job, Outcome, count_rows, perform
from quantroute.cli._output import print_json
from quantroute.cli._plan import read_spec
from quantroute.cli._policy_options import PolicyOptions, takes_policy
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target, opened_target, source_class
from quantroute.cli._summary import exit_code, outcome_data, print_outcome
from quantroute.client import DEFAULT_MAX_IN_FLIGHT
from quantroute.errors import ConfigurationError
from quantroute.generation import (
    DatasetSource,
    RunConfig,
    Shard,
    builtin_prompts,
    dataset_name,
    deadline_s,
    policy_class,
)
from quantroute.money import cap_pusd
from quantroute.routing import RoutingMode
from quantroute.telemetry import OpenTelemetryObserver

Opening = Callable[[], AbstractAsyncContextManager[Target]]

_BESIDE_A_RUN_FILE: Final = frozenset(
    {
        "prompts",
        "redo",
        "retry_refused",
        "simulate",
        "scenario",
        "simulator_seed",
        "base_url",
        "ca_file",
        "as_json",
        "log_json",
        "metrics_port",
        "otel",
        "shard",
        "ledger",
        "allow_volatile_ledger",
    }
)


@takes_policy
def generate(
    ctx: typer.Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Prompt files (JSONL or .txt), the embedded set if none is given; or one run file "
            "(.toml) that says everything."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run's folder; an existing run is resumed.")
    ] = Path("runs/default"),
    cap: Annotated[
        str | None,
        typer.Option(
            metavar="USD",
            help="Hard cap for the whole run, e.g. 5.00; kept from last time if left out.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model id.")] = options.DEFAULT_MODEL,
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of one answer, reasoning included.")
    ] = 4_096,
    rollouts: Annotated[int, typer.Option(min=1, help="Answers per prompt, each a row.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed sent to the model.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--instant", help="Reasoning on or off; default: the model's."),
    ] = None,
    *,
    policy_options: PolicyOptions,
    redo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            help="Have rows of this class again, and begin no others, e.g. truncated with a "
            "higher --max-output-tokens; repeatable.",
        ),
    ] = None,
    retry_refused: Annotated[
        bool, typer.Option("--retry-refused", help="Ask again for rows the service refused.")
    ] = False,
    elastic_limits: Annotated[
        bool,
        typer.Option(
            "--elastic-limits/--fixed-limits",
            help="While money is short for the asked concurrency, reserve less per request by "
            "asking with lower output limits; answers they cut are asked for again. Fixed limits "
            "spend the last part of the cap slowly, but keep the longest answers' share exact.",
        ),
    ] = True,
    statistical_reserve: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Not a hard cap: reserve what the answers in flight will cost together with "
            "probability P (0.999), by what answers cost so far, instead of each one's worst "
            "case. Keeps output limits whole to the end; needs --accept-overrun-usd.",
        ),
    ] = None,
    accept_overrun_usd: Annotated[
        str | None,
        typer.Option(
            "--accept-overrun-usd",
            metavar="USD",
            help="What may be spent beyond --cap with --statistical-reserve; together they are the "
            "hard cap. At least the worst case, which is printed if it is more.",
        ),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Requests on the wire at once.")
    ] = DEFAULT_MAX_IN_FLIGHT,
    routing: Annotated[
        RoutingMode,
        typer.Option(
            help="Who chooses the endpoint of a request among those allowed: quantroute, pinned "
            "and by the cost of an accepted row, or the service, delegated."
        ),
    ] = RoutingMode.PINNED,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When to be done, e.g. 45m or 1h30m: only the cheapest endpoints that make it are "
            "used. Without it, as many as the requests in flight keep busy.",
        ),
    ] = None,
    shard: options.Shard = None,
    ledger: options.Ledger = None,
    allow_volatile_ledger: options.AllowVolatileLedger = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Rehearse against the embedded simulator: no key, no cost."
        ),
    ] = False,
    scenario: options.ScenarioFile = None,
    simulator_seed: Annotated[int, typer.Option(help="Seed for --simulate.")] = 0,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
    log_json: options.LogJson = None,
    metrics_port: options.MetricsPort = None,
    otel: options.Otel = False,
) -> None:
    """Generate answers to PROMPTS from eligible endpoints, within a hard cap.

    Running the same command again goes on where the last one stopped: every row exists once,
    every answer that was paid for is kept. Exit code 3: the cap was reached; raise it and rerun.

    quantroute generate --simulate --cap 1.00 --out runs/first

    quantroute generate b3.jsonl --cap 5 --exclude Fireworks --thinking --out runs/b3

    quantroute generate b3.jsonl --redo truncated --max-output-tokens 16384 --out runs/b3

    quantroute generate run.toml

    quantroute generate run.toml --shard 3/8 --ledger redis://10.0.0.5:6379/0
    """
    files = tuple(prompts or ())
    part = None if shard is None else Shard.parse(shard)
    if part is not None and statistical_reserve is not None:
        raise ConfigurationError(
            "--statistical-reserve knows only this worker's own requests: leave out either it (the "
            "workers then share --cap as a hard cap) or --shard (one worker then does all rows)"
        )
    if ledger is not None and simulate:
        is_run_file = any(path.suffix == ".toml" for path in files)
        # A run file's rehearsal has a folder, and so a ledger, of its own already.
        ledger = _rehearsal_ledger(ledger, run="" if is_run_file else RunFolder(out).name)
    observer = OpenTelemetryObserver() if otel else None
    classes = frozenset(options.row_class(name, option="--redo") for name in redo or ())
    opening = partial(
        opened_target,
        base_url=base_url,
        ca_file=ca_file,
        simulate=simulate,
        scenario=scenario,
        seed=simulator_seed,
    )
    if any(path.suffix == ".toml" for path in files):
        _check_run_file(ctx, files)
        spec = read_spec(files[0], base_url=base_url, simulate=simulate)
        _generate_datasets(
            DatasetsJob(
                spec=spec,
                folder=RunFolder(
                    spec.out,
                    shard=part,
                    ledger_url=ledger or spec.ledger,
                    allow_volatile=allow_volatile_ledger,
                ),
                redo=classes,
                retry_refused=retry_refused,
                as_json=as_json,
                log_json=log_json,
                metrics_port=metrics_port,
                observer=observer,
            ),
            opening,
        )
    if deadline is not None and routing is RoutingMode.DELEGATED:
        raise ConfigurationError("--deadline needs --routing pinned: delegated, others choose")
    policy = policy_options.policy()
    folder = RunFolder(out, shard=part, ledger_url=ledger, allow_volatile=allow_volatile_ledger)
    if cap is None and ledger is None and not folder.store.exists():
        raise ConfigurationError("--cap is needed for a new run: a hard limit in USD such as 5.00")
    if cap is not None:
        cap_pusd(cap)  # refuse an impossible one before anything is read
    overrun = options.build_overrun(
        cap=cap, probability=statistical_reserve, accepted=accept_overrun_usd
    )
    config = RunConfig(
        name=folder.name,
        model=model,
        max_output_tokens=max_output_tokens,
        sampling=options.build_sampling(
            temperature=temperature, top_p=top_p, seed=seed, thinking=thinking
        ),
        rollouts=rollouts,
        datasets=tuple(dict.fromkeys(_dataset_names(files))),
        policy_class=source_class(base_url, is_simulated=simulate) + policy_class(policy),
        sources=tuple(DatasetSource.of(path) for path in files),
    )
    job = Job(
        folder=folder,
        config=config,
        files=files,
        total_rows=count_rows(folder, config, files, is_redo=bool(classes) or retry_refused),
        policy=policy,
        cap=cap,
        max_in_flight=max_in_flight,
        routing=routing,
        deadline_s=None if deadline is None else deadline_s(deadline),
        redo=classes,
        retry_refused=retry_refused,
        elastic_limits=elastic_limits,
        overrun=overrun,
        as_json=as_json,
        log_json=log_json,
        metrics_port=metrics_port,
        observer=observer,
    )

    async def main() -> Outcome:
        async with opening() as target:
            return await perform(job, target)

    outcome = _loop.run(main())
    if as_json:
        print_json(outcome_data(outcome))
    else:
        print_outcome(job, outcome)
    raise typer.Exit(exit_code(outcome.report))


def _rehearsal_ledger(url: str, *, run: str) -> str:
    """A ledger of its own for made-up money, on the same server; without `run` it has one."""
    address, name = urldefrag(url)
    name = name or run
    return f"{address}#{name}-simulated" if name else url


def _check_run_file(ctx: typer.Context, files: Sequence[Path]) -> None:
    """A run file stands alone: two sources for one setting would need a rule nobody remembers."""
    if len(files) > 1:
        raise ConfigurationError("a run file stands alone; name its prompt files in it")
    given = [
        name
        for name in ctx.params
        if name not in _BESIDE_A_RUN_FILE
        and (source := ctx.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if {"statistical_reserve", "accept_overrun_usd"} & set(given):
        raise ConfigurationError(
            "--statistical-reserve is for one account of money, and the datasets of a run file "
            "have caps of their own: leave it and --accept-overrun-usd out, or give the prompt "
            "files themselves instead of the run file"
        )
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise ConfigurationError(f"{names}: set that in {files[0]} instead")


def _generate_datasets(job: DatasetsJob, opening: Opening) -> NoReturn:
    async def main() -> DatasetsOutcome:
        async with opening() as target:
            return await perform_datasets(job, target)

    outcome = _loop.run(main())
    if job.as_json:
        print_json(datasets_data(outcome))
    else:
        print_datasets(job, outcome)
    raise typer.Exit(datasets_exit_code(outcome.report))


def _dataset_names(files: Iterable[Path]) -> list[str]:
    names = [dataset_name(path.stem) for path in files]
    return names or sorted({prompt.dataset for prompt in builtin_prompts()})
