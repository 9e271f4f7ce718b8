"""`quantroute plan`: what a run will cost, and what the cap affords, before money is spent."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._job import worker_settings
from quantroute.cli._output import print_json, say, show
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target, opened_target, source_class
from quantroute.client import Client
from quantroute.domain import Endpoint
from quantroute.errors import ConfigurationError
from quantroute.generation import (
    DatasetPlan,
    Plan,
    RunReport,
    RunSpec,
    Way,
    compare_ways,
    load_run_spec,
    plan_run,
    probe_run,
    take_census,
)
from quantroute.ledger import BudgetLedger, SharedLedger
from quantroute.money import to_usd, usd_per_million
from quantroute.registry import ProviderRegistry
from quantroute.report import plan_lines, plan_tables, ways_table

__all__ = ["as_run_settings", "opened_client", "plan", "read_spec", "show_plan"]

#: Advice in the words of arguments, `only=('Novita',)`, as it stands in a run's file.
_ARGUMENT: Final = re.compile(r"\b(\w+)=\('([^']*)',?\)")


def plan(
    spec: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="The run's file; see examples/run.toml.")
    ],
    probe: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Buy N rows of the run first, spread over the datasets, and plan with what "
            "they show.",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Take endpoints and prices from a snapshot instead of the network.",
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Ask the embedded simulator: no key, no cost.")
    ] = False,
    scenario: options.ScenarioFile = None,
    simulator_seed: Annotated[int, typer.Option(help="Seed for --simulate.")] = 0,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Count prompts and duplicates, judge endpoints, and share the cap, before spending.

    Spends nothing without --probe; rows that a probe buys belong to the run, and what earlier
    starts have done counts. Exit codes are those that `generate` would end with: 0: it fits; 3: the
    cap does not reach the targets, and the plan says which cap would; 4: the prompts do not, and
    the plan says how many rollouts would; 5: no endpoint is eligible.

    quantroute plan run.toml --simulate

    quantroute plan run.toml --probe 20
    """
    if snapshot is not None and (probe is not None or simulate):
        raise ConfigurationError("--snapshot answers no request: leave --probe and --simulate out")
    run = read_spec(spec, base_url=base_url, simulate=simulate)

    async def main() -> tuple[Plan, RunReport | None]:
        if snapshot is not None:
            async with opened_client(run, ProviderRegistry.from_snapshot(snapshot)) as client:
                return await plan_run(client, run), None
        async with opened_target(
            base_url=base_url,
            ca_file=ca_file,
            simulate=simulate,
            scenario=scenario,
            seed=simulator_seed,
        ) as target:
            if probe is not None and not run.local:
                target.key.read()  # before a file is made
            async with (
                ProviderRegistry(service=target.service, key=target.key) as registry,
                opened_client(
                    run, registry, spends=probe is not None, service=target.service, key=target.key
                ) as client,
            ):
                return await _look(client, run, probe, target)

    made, bought = _loop.run(main())
    if as_json:
        print_json(_as_data(made, bought, _ways(made, run)))
    else:
        _print(made, bought, run)
    if (code := _exit_code(made)) is not ExitCode.DONE:
        raise typer.Exit(code)


def _exit_code(made: Plan) -> ExitCode:
    """What `quantroute generate` would end with, as far as it can be foreseen."""
    if not made.fits:
        return ExitCode.CAP_REACHED
    return ExitCode.DONE if made.is_supplied else ExitCode.INCOMPLETE


def read_spec(path: Path, *, base_url: str, simulate: bool) -> RunSpec:
    """The run of the file; a rehearsal gets a folder of its own beside the real one's."""
    spec = load_run_spec(path)
    if simulate:
        return spec.rehearsal()
    return replace(spec, source_class=source_class(base_url, is_simulated=False))


@asynccontextmanager
async def opened_client(
    run: RunSpec,
    registry: ProviderRegistry,
    *,
    spends: bool = False,
    folder: RunFolder | None = None,
    **service: Any,
) -> AsyncIterator[Client]:
    """A client on the run's own ledger if there is one or has to be, else on none."""
    folder = folder or RunFolder(run.out)
    cap = to_usd(run.cap_pusd)
    async with AsyncExitStack() as stack:
        ledger: BudgetLedger | SharedLedger = BudgetLedger.in_memory(cap=cap)
        if spends:
            folder.check_division()
            ledger = folder.opening(cap)
        elif folder.store.exists():
            ledger = BudgetLedger.open(folder.store)
        client = Client(
            ledger=await stack.enter_async_context(ledger),
            policy=run.policy,
            registry=registry,
            **worker_settings(folder.shard, run.max_in_flight),
            routing=run.routing,
            local=run.local,
            **service,
        )
        yield await stack.enter_async_context(client)


async def _look(
    client: Client, run: RunSpec, probe: int | None, target: Target
) -> tuple[Plan, RunReport | None]:
    census = take_census(run.datasets, run.config())
    first = await plan_run(client, run, census=census)
    if probe is None:
        return first, None
    target.check_key(serving(first))
    await client.note_baseline(renew=target.simulator is not None)
    bought = await probe_run(client, run, rows=probe, plan=first)
    return await plan_run(client, run, census=census), bought


def serving(made: Plan) -> list[Endpoint]:
    """Endpoints that may be asked."""
    return [item.endpoint for item in made.endpoints if item.serves]


def _print(made: Plan, bought: RunReport | None, run: RunSpec) -> None:
    show_plan(made)
    if ways := _ways(made, run):
        show(ways_table(ways))
    if line := deadline_line(made, run):
        say(line)
    if bought is not None:
        say(f"the probe bought {bought.finished:,} rows; they are part of the run")
        if bought.error is not None:
            say(f"the probe was stopped: {bought.error}")


def _ways(made: Plan, run: RunSpec) -> tuple[Way, ...]:
    return compare_ways(made, run.local, deadline_s=run.deadline_s)


def show_plan(made: Plan) -> None:
    """Tables, then what to know before spending, wrapped to the terminal."""
    show(plan_tables(made, wording=as_run_settings))
    for line in plan_lines(made):
        show(Text(line))


def deadline_line(made: Plan, run: RunSpec) -> str | None:
    """Whether a deadline is likely to hold, by the time that the plan expects."""
    if run.deadline_s is None or not made.time_s:
        return None
    if made.time_s <= run.deadline_s:
        slots = max(1, round(made.in_flight * made.time_s / run.deadline_s))
        return (
            f"the deadline needs some {slots:,} of {made.in_flight:,} requests in flight: the "
            "cheapest endpoints that take so many will serve"
        )
    return (
        f"the deadline ({run.deadline_s:,.0f} s) is likely missed: {made.time_s:,.0f} s with "
        f"{made.in_flight:,} requests in flight, every endpoint in use"
    )


def as_run_settings(text: str) -> str:
    """A reason in the words of a run file."""
    return _ARGUMENT.sub(r'\1 = ["\2"]', text)


def _as_data(made: Plan, bought: RunReport | None, ways: Sequence[Way]) -> dict[str, Any]:
    return {
        "model": made.model,
        "allocation": made.allocation.value,
        "cap_pusd": made.cap_pusd,
        "spent_pusd": made.spent_pusd,
        "fits": made.fits,
        "prompts_suffice": made.is_supplied,
        "exit_code": int(_exit_code(made)),
        "floor_pusd": made.floor_pusd,
        "cost_low_pusd": made.cost_low_pusd,
        "cost_high_pusd": made.cost_high_pusd,
        "target_tokens": made.target_tokens,
        "affordable_tokens": made.affordable_tokens,
        "max_in_flight": made.max_in_flight,
        "in_flight": made.in_flight,
        "time_s": None if made.time_s is None else round(made.time_s, 3),
        "probe_rows": None if bought is None else bought.finished,
        "endpoints": [
            {
                "endpoint": str(item.endpoint.key),
                "serves": list(item.serves),
                "reasons": list(item.reasons),
            }
            for item in made.endpoints
        ],
        "ways": [
            {
                "way": way.name,
                "own_share": round(float(way.own_share), 6),
                "time_s": round(way.time_s, 3),
                "cost_pusd": way.cost_pusd,
                "in_time": way.in_time,
                "own_speed": "declared" if way.is_declared else "guessed",
            }
            for way in ways
        ],
        "datasets": [_dataset_data(item) for item in made.datasets],
    }


def _dataset_data(item: DatasetPlan) -> dict[str, Any]:
    expected = item.expectation
    return {
        "dataset": item.name,
        "prompts": item.census.prompts,
        "rows": item.census.rows,
        "duplicates_within": item.census.duplicates_within,
        "duplicates_across": item.census.duplicates_across,
        "ended_rows": item.ended_rows,
        "accepted_rows": item.accepted.rows,
        "accepted_tokens_so_far": item.accepted.output_tokens,
        "target_output_tokens": item.spec.target_output_tokens,
        "target_rows": item.spec.target_rows,
        "needed_rows": item.needed_rows,
        "planned_rows": item.planned_rows,
        "prompts_suffice": item.is_supplied,
        "rollouts_needed": item.rollouts_needed,
        "input_tokens": item.input_tokens,
        "input_bound_tokens": item.input_bound_tokens,
        "output_tokens": item.output_tokens,
        "accepted_tokens": item.accepted_tokens,
        "cheapest": str(item.cheapest),
        "dearest": str(item.dearest),
        "lowest_output_usd_per_million": f"{usd_per_million(item.lowest_output_usd_per_token):f}",
        "floor_pusd": item.floor_pusd,
        "cost_low_pusd": item.cost_low_pusd,
        "cost_high_pusd": item.cost_high_pusd,
        "share_pusd": item.share_pusd,
        "cap_pusd": item.cap_pusd,
        "affordable_tokens": item.affordable_tokens,
        "affordable_tokens_at_dearest": item.affordable_tokens_at_dearest,
        "affordable_rows": item.affordable_rows,
        "reached": round(item.reached, 6),
        "hold_pusd": item.hold_pusd,
        "admitted": item.admitted,
        "expectation": {
            "answers": expected.answers,
            "output_tokens": round(expected.output_tokens, 3),
            "low": round(expected.low, 3),
            "high": round(expected.high, 3),
            "reasoning_share": round(expected.reasoning_share, 6),
            "truncated_share": round(expected.truncated_share, 6),
            "accepted_share": round(expected.accepted_share, 6),
            "answer_s": round(expected.answer_s, 6),
        },
    }
