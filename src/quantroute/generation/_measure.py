"""What a run's store says about the answers it has: for plans and for targets."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quantroute._shard import Shard
from quantroute.generation._expect import NO_ANSWERS, Sample
from quantroute.generation._qualities import (
    EndpointQuality,
    Stratum,
    stratum_of,
    with_spending,
)
from quantroute.generation._quality import RowClass
from quantroute.generation._rows import RowStore
from quantroute.ledger import Ledger, StatementLine
from quantroute.storage import SqliteStore

__all__ = [
    "NOTHING_ACCEPTED",
    "Accepted",
    "Standing",
    "accepted_of",
    "qualities_of",
    "read_accepted",
    "read_qualities",
    "read_standings",
]

# CROSS JOIN keeps the order: turns are read as they lie, and rows are looked up. The other way
# round jumps to and fro in a file of half a gigabyte: 5.5 s instead of 1.8 s for 206,000 answers.
# Of a turn that was redone the last answer counts as accepted, but each one was paid for.
_STANDINGS: Final = """
    SELECT r.dataset,
        count(t.output_tokens), sum(t.output_tokens), sum(t.output_tokens * t.output_tokens),
        sum(t.reasoning_tokens), sum(t.input_tokens),
        sum(CASE WHEN t.row_class = 'good' AND coalesce(r.row_class, 'good') = 'good'
            THEN t.output_tokens END),
        sum(t.row_class = 'truncated'), sum(t.row_class = 'good'),
        sum(CASE WHEN t.total_s IS NOT NULL THEN t.output_tokens END),
        sum(t.total_s)
    FROM generation_turns t CROSS JOIN generation_rows r ON r.row_id = t.row_id
    WHERE r.run_id = ? AND t.output_tokens IS NOT NULL
    GROUP BY r.dataset
"""
_ACCEPTED: Final = """
    SELECT r.dataset, count(DISTINCT r.row_id), coalesce(sum(t.output_tokens), 0)
    FROM generation_turns t CROSS JOIN generation_rows r ON r.row_id = t.row_id
    WHERE r.run_id = ? AND r.state = 'finished' AND r.row_class = 'good' AND t.revision =
        (SELECT max(revision) FROM generation_turns WHERE row_id = t.row_id AND turn = t.turn)
    GROUP BY r.dataset
"""
_ACCEPTED_ROWS: Final = _ACCEPTED.replace("count(DISTINCT r.row_id)", "r.key").replace(
    "GROUP BY r.dataset", "GROUP BY r.dataset, r.row_id"
)
_ENDED: Final = """
    SELECT dataset, count(*) FROM generation_rows
    WHERE run_id = ? AND state IN ('finished', 'refused') GROUP BY dataset
"""
# Truncated answers that were asked for again were cut by a limit of ours, or the user said so:
# they are no sign of how the endpoint serves.
_QUALITIES: Final = """
    SELECT t.endpoint, t.row_class, r.dataset, t.turn > 0, t.revision > 0, t.max_output_tokens,
        count(*), coalesce(sum(t.output_tokens), 0), coalesce(sum(t.cost_pusd), 0)
    FROM generation_turns t CROSS JOIN generation_rows r ON r.row_id = t.row_id
    WHERE r.run_id = ? AND NOT (t.row_class = 'truncated' AND t.revision <
        (SELECT max(revision) FROM generation_turns WHERE row_id = t.row_id AND turn = t.turn))
    GROUP BY 1, 2, 3, 4, 5, 6
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Rows that are whole and good, and their output tokens."""

    rows: int = 0
    output_tokens: int = 0


NOTHING_ACCEPTED: Final = Accepted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far one dataset has come: rows that will not be asked again, and what is accepted.

    `sample` is of all answers that were bought, those that were redone later included.
    """

    ended_rows: int = 0
    accepted: Accepted = NOTHING_ACCEPTED
    sample: Sample = NO_ANSWERS


async def read_standings(store: SqliteStore, run: str) -> dict[str, Standing]:
    """The standing of each dataset that has rows in the run of this name; empty for a new run."""
    await RowStore(store).prepare()
    return await store.aread(lambda connection: _read(connection, run))


async def read_accepted(store: SqliteStore, run: str, shard: Shard) -> dict[str, Accepted]:
    """What one shard's own rows have brought, by dataset; the file may hold those of others."""
    await RowStore(store).prepare()
    return await store.aread(lambda connection: _read_accepted(connection, run, shard))


def _read_accepted(connection: sqlite3.Connection, run: str, shard: Shard) -> dict[str, Accepted]:
    found: dict[str, Accepted] = {}
    run_id = connection.execute("SELECT run_id FROM generation_runs WHERE name = ?", (run,))
    for dataset, key, tokens in connection.execute(_ACCEPTED_ROWS, run_id.fetchone() or (-1,)):
        if shard.owns(key):
            sofar = found.get(dataset, NOTHING_ACCEPTED)
            found[dataset] = Accepted(
                rows=sofar.rows + 1, output_tokens=sofar.output_tokens + tokens
            )
    return found


def _read(connection: sqlite3.Connection, run: str) -> dict[str, Standing]:
    found = connection.execute(
        "SELECT run_id FROM generation_runs WHERE name = ?", (run,)
    ).fetchone()
    if found is None:
        return {}
    samples = {
        dataset: _sample(*(value or 0 for value in sums))
        for dataset, *sums in connection.execute(_STANDINGS, found)
    }
    accepted = accepted_of(connection, found[0])
    ended = dict(connection.execute(_ENDED, found).fetchall())
    return {
        dataset: Standing(
            ended_rows=ended.get(dataset, 0),
            accepted=accepted.get(dataset, NOTHING_ACCEPTED),
            sample=samples.get(dataset, NO_ANSWERS),
        )
        for dataset in samples.keys() | ended.keys()
    }


def accepted_of(connection: sqlite3.Connection, run_id: int) -> dict[str, Accepted]:
    """What is accepted of each dataset of a run; datasets without anything are absent."""
    return {
        dataset: Accepted(rows=rows, output_tokens=tokens)
        for dataset, rows, tokens in connection.execute(_ACCEPTED, (run_id,))
    }


def _sample(
    answers: int,
    output: int,
    squared: int,
    reasoning: int,
    inputs: int,
    accepted: int,
    truncated: int,
    good: int,
    timed_tokens: int,
    total_s: float,
) -> Sample:
    return Sample(
        answers=answers,
        output_tokens=output,
        output_tokens_squared=squared,
        reasoning_tokens=reasoning,
        input_tokens=inputs,
        accepted_tokens=accepted,
        truncated=truncated,
        good=good,
        timed_tokens=timed_tokens,
        total_s=total_s,
    )


async def read_qualities(ledger: Ledger, *, run: str, run_id: int) -> tuple[EndpointQuality, ...]:
    """Answers by class, and all money that was paid, per endpoint of one run, all starts."""
    statement = await ledger.statement()
    return await ledger.store.aread(
        lambda c: qualities_of(c, run=run, run_id=run_id, statement=statement)
    )


def qualities_of(
    connection: sqlite3.Connection, *, run: str, run_id: int, statement: Iterable[StatementLine]
) -> tuple[EndpointQuality, ...]:
    """The same over an open connection and the ledger's statement."""
    rows = connection.execute(_QUALITIES, (run_id,))
    kinds: defaultdict[str, defaultdict[Stratum, Counter[RowClass]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    tokens, accepted, answered = Counter[str](), Counter[str](), Counter[str]()
    for endpoint, name, dataset, turn, revision, limit, count, output_tokens, cost_pusd in rows:
        row_class = RowClass(name)
        stratum = stratum_of(dataset, turn=turn, revision=revision, max_output_tokens=limit)
        kinds[endpoint][stratum][row_class] += count
        tokens[endpoint] += output_tokens
        answered[endpoint] += cost_pusd
        if row_class is RowClass.GOOD:
            accepted[endpoint] += output_tokens
    spent = Counter[str]()
    for line in statement:
        if line.account == run or line.account.startswith(f"{run}/"):
            spent[line.endpoint] += line.posted_pusd
    return with_spending(
        (
            EndpointQuality(
                endpoint=endpoint,
                by_stratum=found,
                output_tokens=tokens[endpoint],
                accepted_tokens=accepted[endpoint],
                answered_pusd=answered[endpoint],
            )
            for endpoint, found in kinds.items()
        ),
        spent,
    )
