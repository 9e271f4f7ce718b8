"""Several datasets in one run: plan, probe, and run them all over one client and one ledger."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from quantroute._shard import Shard
from quantroute.clock import Clock, SystemClock
from quantroute.domain import Sampling
from quantroute.errors import ConfigurationError
from quantroute.generation._allocation import Claim
from quantroute.generation._census import Census, known_census, note_census, take_census
from quantroute.generation._conversation import ChatClient, account_of
from quantroute.generation._deadline import Deadline
from quantroute.generation._expect import Expectation, assumed, measured
from quantroute.generation._feed import Feed, FeedProgress, Target
from quantroute.generation._measure import Accepted, Standing, read_accepted, read_standings
from quantroute.generation._plan import DatasetPlan, Demand, Plan
from quantroute.generation._planner import make_plan
from quantroute.generation._prompts import Prompt
from quantroute.generation._purse import DatasetCap, FixedPurse, SharedPurse
from quantroute.generation._quality import RowClass
from quantroute.generation._records import RowState
from quantroute.generation._report import Progress, RunReport, StopReason
from quantroute.generation._rows import RowStore
from quantroute.generation._run import DEFAULT_DRAIN_S, Run
from quantroute.generation._spec import DatasetSpec, RunSpec
from quantroute.policy import BoundPolicy

__all__ = [
    "DatasetOutcome",
    "DatasetRun",
    "DatasetsProgress",
    "DatasetsReport",
    "PlanningClient",
    "plan_run",
    "probe_run",
    "run_datasets",
]


class PlanningClient(ChatClient, Protocol):
    """What plans need beyond chatting; `quantroute.Client` is one."""

    async def verdicts(self, model: str, *, sampling: Sampling | None = None) -> BoundPolicy:
        """The policy's judgement of every endpoint, as requests would meet it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsProgress:
    """A run of several datasets in one moment."""

    run: Progress
    datasets: tuple[FeedProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOutcome:
    """How one dataset ended. `accepted_*` and money (pico-dollars) are of all starts together."""

    name: str
    accepted_rows: int
    accepted_tokens: int
    is_reached: bool
    cap_pusd: int
    spent_pusd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsReport:
    """How a run of several datasets ended."""

    plan: Plan
    run: RunReport
    datasets: tuple[DatasetOutcome, ...]

    @property
    def stop_reason(self) -> StopReason:
        """Why the run ended; DONE also when prompts were used up before a target was reached."""
        return self.run.stop_reason

    @property
    def is_complete(self) -> bool:
        """Whether every dataset has what was wanted."""
        return self.run.is_complete and all(item.is_reached for item in self.datasets)


ProgressHook = Callable[[DatasetsProgress], None]


async def plan_run(
    client: PlanningClient,
    spec: RunSpec,
    *,
    census: Sequence[Census] | None = None,
    clock: Clock | None = None,
) -> Plan:
    """The plan of `spec` with the endpoints, the prices and the answers that there are now.

    Spends nothing. What the client's ledger file holds of this run counts as done.
    Args:
        census: the counted prompts, if they are at hand. Otherwise what an earlier start counted
            in the same files with the same settings; failing that, they are counted.
    Raises:
        NoEligibleEndpoint: some dataset can be served by nobody.
        DatasetError: a prompt cannot be used.
    """
    counted = await _counted(client, spec) if census is None else census
    standings = await read_standings(client.ledger.store, spec.name)
    demands = [
        await _demand(client, spec, item, count, standings.get(item.name))
        for item, count in zip(spec.datasets, counted, strict=True)
    ]
    now_s = (clock or SystemClock()).time_s()
    whole = client.ledger.balance()
    used_pusd = whole.posted_pusd + whole.pending_pusd
    return make_plan(
        demands,
        model=spec.model,
        cap_pusd=spec.cap_pusd,
        allocation=spec.allocation,
        max_in_flight=spec.max_in_flight,
        at=datetime.fromtimestamp(now_s, UTC),
        other_spent_pusd=max(0, used_pusd - sum(demand.spent_pusd for demand in demands)),
    )


async def _counted(client: PlanningClient, spec: RunSpec) -> Sequence[Census]:
    rows, config = RowStore(client.ledger.store), spec.config()
    await rows.prepare()
    return await known_census(rows, spec.datasets, config) or take_census(spec.datasets, config)


async def _demand(
    client: PlanningClient,
    spec: RunSpec,
    dataset: DatasetSpec,
    census: Census,
    standing: Standing | None,
) -> Demand:
    standing = standing or Standing()
    whole = await client.verdicts(spec.model, sampling=dataset.sampling)
    balance = client.ledger.balance(spec.account_of(dataset.name))
    return Demand(
        spec=dataset,
        census=census,
        expectation=_expectation(dataset, standing),
        bound=_without_local(whole),
        own=tuple(endpoint for endpoint in whole.eligible if endpoint.is_local),
        ended_rows=standing.ended_rows,
        accepted=standing.accepted,
        spent_pusd=balance.posted_pusd + balance.pending_pusd,
    )


def _without_local(bound: BoundPolicy) -> BoundPolicy:
    """What a plan counts on: a server of one's own takes some rows off the bill, nobody knows how
    many, so money is planned as if it took none. Unless there is nothing else.
    """
    listed = tuple(item for item in bound.verdicts if not item.endpoint.is_local)
    return replace(bound, verdicts=listed) if any(item.eligible for item in listed) else bound


def _expectation(dataset: DatasetSpec, standing: Standing) -> Expectation:
    otherwise = assumed(
        max_output_tokens=dataset.max_output_tokens,
        output_tokens=dataset.expected_output_tokens,
        reasoning_share=dataset.expected_reasoning_share,
    )
    return measured(standing.sample, otherwise)


class DatasetRun:
    """One start of a run of several datasets; made by `prepare`, executed once.

    >>> job = await DatasetRun.prepare(client, spec)
    >>> with job.install_signal_handlers():
    ...     report = await job.execute()
    """

    def __init__(
        self,
        *,
        client: PlanningClient,
        run: Run,
        feeds: Sequence[Feed],
        plan: Plan,
        purse: SharedPurse | FixedPurse,
    ) -> None:
        self.plan = plan
        self._client = client
        self._run = run
        self._feeds = feeds
        self._purse = purse

    @classmethod
    async def prepare(
        cls,
        client: PlanningClient,
        spec: RunSpec,
        *,
        plan: Plan | None = None,
        redo: Set[RowClass] = frozenset(),
        retry_refused: bool = False,
        drain_s: float = DEFAULT_DRAIN_S,
        shard: Shard | None = None,
        clock: Clock | None = None,
    ) -> DatasetRun:
        """Plan and set up; every prompt is read once, unless a `plan` or an earlier start did it.

        Args:
            plan: a plan of this `spec`, made with this client's ledger just now.
            redo, retry_refused, drain_s: see `Run`.
            shard: only this part of the rows, and of each target. The plan, the caps and the
                money are the whole run's: caps are set once and not passed on.
        Raises:
            ConfigurationError, DatasetError, NoEligibleEndpoint: see `plan_run`.
        """
        plan = plan or await plan_run(client, spec, clock=clock)
        config = spec.config()
        rows = RowStore(client.ledger.store)
        await rows.prepare()
        counted = [item.census for item in plan.datasets]
        await note_census(rows, spec.datasets, config, counted)
        purse = _purse(client, spec, plan)
        accepted = {item.name: item.accepted for item in plan.datasets}
        fixed: FixedPurse | None = None
        if shard is not None:
            accepted = await read_accepted(client.ledger.store, spec.name, shard)
            fixed = FixedPurse(client.ledger, _caps(spec, plan), name=spec.name)
        again = await _rows_again(rows, spec.name, redo, retry_refused=retry_refused)
        hashes = {source.name: source.sha256 for source in config.sources}
        feeds = [
            Feed(
                prompts=item.spec.read(),
                dataset=item.name,
                target=_target(item, shard),
                purse=purse if fixed is None else None,
                source=hashes.get(item.name),
                accepted_rows=accepted.get(item.name, Accepted()).rows,
                accepted_tokens=accepted.get(item.name, Accepted()).output_tokens,
                planned_rows=_part(again[item.name] + (0 if redo else item.planned_rows), shard),
                is_redo=bool(redo),
            )
            for item in plan.datasets
        ]
        run = Run(
            client,
            config,
            feeds=feeds,
            redo=redo,
            retry_refused=retry_refused,
            elastic_limits=spec.elastic_limits,
            deadline=None if spec.deadline_s is None else Deadline(after_s=spec.deadline_s),
            drain_s=drain_s,
            shard=shard,
            clock=clock,
        )
        return cls(client=client, run=run, feeds=feeds, plan=plan, purse=fixed or purse)

    async def execute(self, on_progress: ProgressHook | None = None) -> DatasetsReport:
        """Run until every dataset has what it wants, or something stops all; see `Run.execute`."""
        await self._purse.open()

        def show(progress: Progress) -> None:
            if on_progress is not None:
                feeds = tuple(feed.progress() for feed in self._feeds)
                on_progress(DatasetsProgress(run=progress, datasets=feeds))

        report = await self._run.execute(show)
        return DatasetsReport(plan=self.plan, run=report, datasets=tuple(self._outcomes()))

    def request_stop(self) -> None:
        """Admit nothing more and drain what is in flight; call it on the run's event loop."""
        self._run.request_stop()

    @contextlib.contextmanager
    def install_signal_handlers(
        self,
        signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
        *,
        on_stopping: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """As `Run.install_signal_handlers`: the first signal drains, the second leaves."""
        with self._run.install_signal_handlers(signals, on_stopping=on_stopping):
            yield

    def _outcomes(self) -> Iterator[DatasetOutcome]:
        caps_pusd = self._purse.caps_pusd
        for feed, item in zip(self._feeds, self.plan.datasets, strict=True):
            account = account_of(self._run.config, item.name)
            yield DatasetOutcome(
                name=item.name,
                accepted_rows=feed.accepted_rows,
                accepted_tokens=feed.accepted_tokens,
                is_reached=feed.is_reached if feed.target else feed.has_all,
                cap_pusd=caps_pusd[item.name],
                spent_pusd=self._client.ledger.balance(account).posted_pusd,
            )


async def run_datasets(
    client: PlanningClient,
    spec: RunSpec,
    on_progress: ProgressHook | None = None,
) -> DatasetsReport:
    """Plan and run all datasets of `spec` at the same time; running it again resumes.

    Raises:
        ConfigurationError: the run was begun with other settings.
        DatasetError: a prompt cannot be used.
        NoEligibleEndpoint: some dataset can be served by nobody.
    """
    job = await DatasetRun.prepare(client, spec)
    return await job.execute(on_progress)


async def probe_run(
    client: PlanningClient,
    spec: RunSpec,
    *,
    rows: int,
    plan: Plan | None = None,
    clock: Clock | None = None,
) -> RunReport:
    """Buy `rows` rows, spread over the datasets and over each file, to plan with what they show.

    They are ordinary rows of the run, which later starts find done; the same probe twice buys
    nothing twice. One rollout per prompt, since rollouts of one prompt resemble each other.
    Raises:
        ConfigurationError: no row is asked for.
    """
    if rows < 1:
        raise ConfigurationError(f"a probe needs at least one row, not {rows}")
    plan = plan or await plan_run(client, spec, clock=clock)
    await _purse(client, spec, plan).open()
    each, rest = divmod(rows, len(plan.datasets))
    feeds = [
        Feed(prompts=_spread(item, each + (number < rest)), dataset=item.name, rollouts=1)
        for number, item in enumerate(plan.datasets)
    ]
    run = Run(client, spec.config(), feeds=feeds, elastic_limits=spec.elastic_limits, clock=clock)
    return await run.execute()


def _spread(item: DatasetPlan, count: int) -> Iterator[Prompt]:
    """`count` prompts at even distances: files are often sorted by subject."""
    total = item.census.prompts
    chosen = {number * total // count for number in range(min(count, total))} if count else set()
    return (prompt for number, prompt in enumerate(item.spec.read()) if number in chosen)


async def _rows_again(
    rows: RowStore, run: str, redo: Set[RowClass], *, retry_refused: bool
) -> Counter[str]:
    """Rows per dataset that count as done, and are to be had anew."""
    found = Counter[str]()
    stored = next((item for item in await rows.runs() if item.name == run), None)
    if stored is None or not (redo or retry_refused):
        return found
    for count in await rows.counts(stored.run_id):
        is_refused = count.state is RowState.REFUSED
        if retry_refused if is_refused else count.row_class in redo:
            found[count.dataset] += count.rows
    return found


def _part(rows: int, shard: Shard | None) -> int:
    """A shard's part of so many rows."""
    return rows if shard is None or not rows else shard.share(rows)


def _target(item: DatasetPlan, shard: Shard | None = None) -> Target | None:
    spec = item.spec
    tokens, rows = spec.target_output_tokens, spec.target_rows
    if tokens is None and rows is None:
        return None
    if shard is not None:
        tokens = None if tokens is None else shard.share(tokens)
        rows = None if rows is None else shard.share(rows)
    per_row = item.accepted_tokens / item.planned_rows if item.planned_rows else 0.0
    return Target(output_tokens=tokens, rows=rows, expected_tokens=per_row)


def _purse(client: PlanningClient, spec: RunSpec, plan: Plan) -> SharedPurse:
    return SharedPurse(client.ledger, _caps(spec, plan), rule=spec.allocation)


def _caps(spec: RunSpec, plan: Plan) -> list[DatasetCap]:
    return [
        DatasetCap(
            account=spec.account_of(item.name),
            cap_pusd=item.cap_pusd,
            claim=Claim(
                name=item.name,
                need_pusd=item.cost_low_pusd,
                limit_pusd=item.spec.cap_pusd,
                weight=item.spec.weight,
                priority=item.spec.priority,
            ),
        )
        for item in plan.datasets
    ]
