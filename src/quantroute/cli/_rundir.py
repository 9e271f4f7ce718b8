"""A run's folder: ledger and rows in one SQLite file, or one file per shard and a shared ledger."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urldefrag

from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation import RowStore, Shard, ShardedRows, run_name, run_stores
from quantroute.ledger import (
    ROOT,
    Balance,
    BudgetLedger,
    Ledger,
    SharedLedger,
    StatementLine,
    combined,
    openable_journal,
    summed,
)
from quantroute.money import NO_CAP
from quantroute.report import FACTS_FILE

__all__ = ["OpenedShards", "RunFolder"]

_STORE: Final = "run.sqlite"


@dataclass(frozen=True, slots=True)
class OpenedShards:
    """The files of a run, open for reading."""

    ledgers: tuple[BudgetLedger, ...]
    rows: RowStore | ShardedRows

    def balance(self) -> Balance:
        """What the files say; with several, the cap is the shared ledger's to know."""
        balances = [ledger.balance() for ledger in self.ledgers]
        return balances[0] if len(balances) == 1 else combined(balances, account=ROOT, cap=NO_CAP)

    async def statement(self) -> tuple[StatementLine, ...]:
        """What the files say was paid; a shared ledger's server may know of more."""
        lines = [line for ledger in self.ledgers for line in await ledger.statement()]
        return summed(lines) if len(self.ledgers) > 1 else tuple(lines)


@dataclass(frozen=True)
class RunFolder:
    """Where a run lives.

    Args:
        ledger_url: a shared ledger's server, `redis://HOST:PORT/DATABASE`, with `#NAME` for another
            ledger than the run's own. Then each shard has a file of its own; without it all shards
            use the run's one file.
    """

    path: Path
    shard: Shard | None = None
    ledger_url: str | None = None
    allow_volatile: bool = False

    @functools.cached_property  # it opens every file of the run
    def name(self) -> str:
        """The run's name: that of the run in the folder; of a new one, the folder's."""
        return run_name(self.path)

    @property
    def store(self) -> Path:
        """The file with the rows of this worker, and with the ledger if that is not shared."""
        if self.shard is None or self.ledger_url is None:
            return self.path / _STORE
        return self.path / self.shard.folder / _STORE

    @property
    def events(self) -> Path:
        """The file with this worker's events."""
        if self.shard is None or self.ledger_url is not None:
            return self.store.with_name("events.jsonl")
        return self.path / f"events-{self.shard.folder}.jsonl"

    @property
    def facts(self) -> Path:
        """The file with the verdicts and targets of the last start."""
        return self.path / FACTS_FILE

    def stores(self) -> tuple[Path, ...]:
        """Every file that holds rows of this run.

        Raises:
            DatasetError: there is no run in that folder.
        """
        existing = run_stores(self.path)
        if not existing:
            raise DatasetError(
                path=str(self.path),
                problem="no run here (run.sqlite is missing); start one with `quantroute generate`",
            )
        return existing

    def existing_store(self) -> Path:
        """The one file, which must exist.

        Raises:
            DatasetError: there is no run in that folder, or it has shards.
        """
        stores = self.stores()
        if len(stores) > 1 or stores[0].parent != self.path:
            raise DatasetError(
                path=str(self.path),
                problem=f"this run lies in {len(stores)} shards; name its shared ledger with "
                "--ledger",
            )
        return stores[0]

    def check_division(self) -> None:
        """Refuse to divide a run otherwise than it was begun: rows would be bought twice.

        Raises:
            ConfigurationError: there are files of another division in the folder.
        """
        if not self.path.exists():
            return
        alike = f"-of-{self.shard.count:03d}" if self.shard and self.ledger_url else ""
        for path in self.stores() if any(self.path.glob(f"**/{_STORE}")) else ():
            division = "" if path.parent == self.path else path.parent.name[-7:]
            if division != alike:
                raise ConfigurationError(
                    f"{path} was begun with another division of the run; use the same --shard I/N "
                    "and --ledger for all workers, or another --out"
                )

    def opening(self, cap: object) -> BudgetLedger | SharedLedger:
        """The ledger that pays, to be entered; None as `cap` keeps the one it has."""
        if self.ledger_url is None:
            return BudgetLedger.open(self.store, cap=cap)
        return self.shared(cap=cap, store=self.store, label=str(self.shard or self.name))

    def shared(
        self, *, cap: object = None, store: Path | str = ":memory:", label: str = ""
    ) -> SharedLedger:
        """The shared ledger, from the view of one file."""
        if self.ledger_url is None:
            raise ConfigurationError("a shared ledger needs --ledger redis://HOST:PORT/DATABASE")
        url, name = urldefrag(self.ledger_url)
        if "@" in name:  # not quoted: it may be half a password
            raise ConfigurationError(
                "the name behind # in the ledger's URL has an @ in it; if the # is part of a "
                "password, write it as %23"
            )
        return SharedLedger.connect(
            url,
            name=name or self.name,
            cap=cap,
            store=store,
            label=label and f"{self.name}: {label}",
            allow_volatile=self.allow_volatile,
        )

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[Ledger]:
        """The ledger, to find out what lost answers cost.

        With a shared one, outcomes that wait in the files of workers that ended are sent before,
        and what is found out is taken over into the files afterwards.
        """
        if self.ledger_url is None:
            async with BudgetLedger.open(self.existing_store()) as ledger:
                yield ledger
            return
        for store in self.stores():
            async with self.shared(store=store):
                pass
        async with self.shared() as shared:
            yield shared
        for store in self.stores():
            async with self.shared(store=store):
                pass

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[OpenedShards]:
        """All files of the run; safe while workers write to them, even if we may not."""
        async with AsyncExitStack() as stack:
            files = [stack.enter_context(openable_journal(path)) for path in self.stores()]
            ledgers = [await stack.enter_async_context(BudgetLedger.open(path)) for path in files]
            stores = [RowStore(ledger.store) for ledger in ledgers]
            yield OpenedShards(
                ledgers=tuple(ledgers),
                rows=stores[0] if len(stores) == 1 else ShardedRows(stores),
            )
