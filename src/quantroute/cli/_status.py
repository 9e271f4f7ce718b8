"""`quantroute status` and `quantroute reconcile`: how a run stands, and what it really cost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quantroute._http import OPENROUTER_URL, Service
from quantroute.cli import _options as options
from quantroute.cli._exit import ExitCode
from quantroute.cli._rundir import RunFolder
from quantroute.client import Client, Reconciliation
from quantroute.generation import RowCounts, RowStore
from quantroute.ledger import Balance, BudgetLedger, StatementLine
from quantroute.money import NO_CAP, format_usd
from quantroute.report import balance_line, ledger_table


def status(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Also replay the journal and compare every sum.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show a run's rows by class, its ledger by endpoint, and what is still unknown."""
    folder = RunFolder(run)

    async def look() -> tuple[Balance, tuple[StatementLine, ...], tuple[RowCounts, ...]]:
        async with BudgetLedger.open(folder.existing_store()) as ledger:
            if verify:
                await ledger.verify()
            rows = RowStore(ledger.store)
            await rows.prepare()
            stored = await rows.run(folder.name)
            return (
                ledger.balance(),
                await ledger.statement(),
                await rows.counts(stored.run_id),
            )

    balance, statement, counts = asyncio.run(look())
    if as_json:
        typer.echo(json.dumps(_as_data(balance, statement, counts), indent=2))
        return
    console = Console()
    console.print(ledger_table(statement, title=str(folder.path)))
    console.print(balance_line(balance))
    for count in counts:
        what = count.row_class.value if count.row_class else count.state.value
        console.print(f"{count.dataset}: {count.rows:,} {what}")
    if balance.held_entries:
        console.print(
            f"{balance.held_entries} charges are unknown "
            f"({format_usd(balance.held_pusd, places=6)} reserved); run `quantroute reconcile`"
        )
    if verify:
        console.print("the journal, replayed, agrees with every sum")


def _as_data(
    balance: Balance, statement: tuple[StatementLine, ...], counts: tuple[RowCounts, ...]
) -> dict[str, object]:
    return {
        "cap_pusd": None if balance.cap is NO_CAP else balance.cap,
        "posted_pusd": balance.posted_pusd,
        "pending_pusd": balance.pending_pusd,
        "held_entries": balance.held_entries,
        "input_tokens": balance.input_tokens,
        "output_tokens": balance.output_tokens,
        "reasoning_tokens": balance.reasoning_tokens,
        "by_endpoint": [
            {
                "account": line.account,
                "endpoint": line.endpoint,
                "attempts": line.entries,
                "output_tokens": line.output_tokens,
                "posted_pusd": line.posted_pusd,
            }
            for line in statement
        ],
        "rows": [
            {
                "dataset": count.dataset,
                "state": count.state.value,
                "class": count.row_class.value if count.row_class else None,
                "rows": count.rows,
            }
            for count in counts
        ],
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
            help="Least age in seconds of requests without an id, before the key's usage "
            "settles them (default: the total timeout)."
        ),
    ] = None,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
) -> None:
    """Find out what lost answers cost: generation records first, then the key's own usage.

    Exit code 4 if some charges are still unknown.
    """
    folder = RunFolder(run)

    async def settle() -> tuple[Reconciliation, Balance]:
        async with (
            BudgetLedger.open(folder.existing_store()) as ledger,
            Client(ledger=ledger, service=Service(base_url=base_url, ca_file=ca_file)) as client,
        ):
            done = await client.reconcile(quiet_s=quiet_s, charge_bound=charge_bound)
            return done, ledger.balance()

    done, balance = asyncio.run(settle())
    typer.echo(
        f"settled {done.settled_by_record} by record, {done.settled_by_key_usage} by the key's "
        f"usage, {done.settled_at_bound} at the bound; {done.still_held} still unknown"
    )
    if done.key_difference_pusd:
        typer.echo(
            "the key's usage exceeds the ledger by "
            f"{format_usd(done.key_difference_pusd, places=6)}: other use of the same key, "
            "or charges that are still unknown"
        )
    typer.echo(balance_line(balance))
    if done.still_held:
        raise typer.Exit(ExitCode.INCOMPLETE)
