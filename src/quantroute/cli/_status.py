"""`quantroute status` and `quantroute reconcile`: how a run stands, and what it really cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantroute._http import OPENROUTER_URL, Service
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._log import EVENTS
from quantroute.cli._output import (
    balance_data,
    comparison_data,
    counts_data,
    failure_lines,
    failures_data,
    print_json,
    print_quality,
    print_reconciliation,
    quality_data,
    rows_lines,
    say,
    show,
    statement_data,
)
from quantroute.cli._rundir import RunFolder
from quantroute.cli._wording import as_word
from quantroute.client import Client, Reconciliation
from quantroute.generation import (
    EndpointQuality,
    RowCounts,
    RowFailures,
    ShardedRows,
    merged_qualities,
    quality_alarms,
    read_failures,
    read_qualities,
)
from quantroute.ledger import Balance, StatementLine
from quantroute.money import format_usd
from quantroute.report import balance_line, ledger_table


def status(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Also replay the journal and compare every sum.")
    ] = False,
    ledger: options.Ledger = None,
    as_json: options.Json = False,
) -> None:
    """Show a run's ledger and answers by endpoint, its rows by class, and what is still unknown.

    Safe while the run is under way. Of a run in shards it shows the rows of all of them, and the
    money as their files know it, or with --ledger as the server does.
    """
    folder = RunFolder(run, ledger_url=ledger, allow_volatile=True)

    async def look() -> tuple[
        Balance,
        tuple[StatementLine, ...],
        tuple[RowCounts, ...],
        tuple[EndpointQuality, ...],
        tuple[RowFailures, ...],
    ]:
        async with folder.reading() as shards:
            await shards.rows.prepare()
            stored = await shards.rows.run(folder.name)
            counts = await shards.rows.counts(stored.run_id)
            qualities = merged_qualities(
                [
                    await read_qualities(file, run=folder.name, run_id=run_id)
                    for file, run_id in zip(shards.ledgers, shards.rows.run_ids, strict=True)
                ]
                if isinstance(shards.rows, ShardedRows)
                else [
                    await read_qualities(shards.ledgers[0], run=folder.name, run_id=stored.run_id)
                ]
            )
            failures = tuple(
                [item for f in shards.ledgers for item in await read_failures(f, run=folder.name)]
            )
            if ledger is not None:
                async with folder.shared() as shared:
                    if verify:
                        await shared.verify()
                    return shared.balance(), await shared.statement(), counts, qualities, failures
            if verify:
                for file in shards.ledgers:
                    await file.verify()
            return shards.balance(), await shards.statement(), counts, qualities, failures

    balance, statement, counts, qualities, failures = _loop.run(look())
    alarms = quality_alarms(qualities)
    if as_json:
        print_json(
            _as_data(balance, statement, counts)
            | {"failures": failures_data(failures)}
            | quality_data(qualities, alarms)
        )
        return
    if statement:
        show(ledger_table(statement, title="ledger"))
    say(balance_line(balance))
    if balance.held_entries:
        say(
            f"{balance.held_entries:,} charges are unknown "
            f"({format_usd(balance.held_pusd, places=6)} reserved); "
            f"`quantroute reconcile {as_word(run)}` finds out"
        )
    for line in (*rows_lines(counts), *failure_lines(failures)):
        say(line)
    print_quality(qualities, alarms)
    if verify:
        say("the journal, replayed, agrees with every sum")


def _as_data(
    balance: Balance, statement: tuple[StatementLine, ...], counts: tuple[RowCounts, ...]
) -> dict[str, Any]:
    return {
        **balance_data(balance),
        "by_endpoint": statement_data(statement),
        "rows": counts_data(counts),
    }


def reconcile(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    charge_bound: Annotated[
        bool,
        typer.Option(
            "--charge-bound", help="Charge what stays unknown at its full reservation, for good."
        ),
    ] = False,
    quiet_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Least age in seconds of requests without an id, before the key's usage "
            "settles them (default: the total timeout).",
        ),
    ] = None,
    ledger: options.Ledger = None,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Find out what lost answers cost: generation records first, then the key's own usage.

    Needs the key that paid. Exit code 4 if some charges are still unknown: try again later, or
    charge them at their full reservation with --charge-bound.
    """
    folder = RunFolder(run, ledger_url=ledger, allow_volatile=True)

    async def settle() -> tuple[Reconciliation, Balance]:
        async with (
            folder.settling() as paying,
            Client(ledger=paying, service=Service(base_url=base_url, ca_file=ca_file)) as client,
        ):
            client.key.read()  # said at once if it is missing, whatever there is to settle
            with EVENTS.written_to(folder.events, key=client.key):
                done = await client.reconcile(quiet_s=quiet_s, charge_bound=charge_bound)
                return done, paying.balance()

    done, balance = _loop.run(settle())
    if as_json:
        print_json(_reconciled_data(done, balance))
    else:
        print_reconciliation(done)
        say(balance_line(balance))
    if done.still_held:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _reconciled_data(done: Reconciliation, balance: Balance) -> dict[str, Any]:
    return {
        "exit_code": int(ExitCode.INCOMPLETE if done.still_held else ExitCode.DONE),
        "settled_by_record": done.settled_by_record,
        "settled_by_key_usage": done.settled_by_key_usage,
        "settled_at_bound": done.settled_at_bound,
        "still_held": done.still_held,
        "key_usage": comparison_data(done.key),
        **balance_data(balance),
    }
