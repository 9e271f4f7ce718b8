"""`Client`: requests in, paid-for answers out, under a policy and a hard cap."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import random
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from quantroute._http import Service, SessionPool
from quantroute.client._accounts import KeyUsage
from quantroute.client._catalogue import Catalogue
from quantroute.client._descriptors import ensure_descriptors
from quantroute.client._dispatch import Dispatcher
from quantroute.client._engine import Engine
from quantroute.client._local import LocalEndpoint, LocalRoute
from quantroute.client._observe import AttemptObserver
from quantroute.client._outcome import (
    Answer,
    Answered,
    AnswerSink,
    ChatRequest,
    Completion,
    GaveUp,
    RowRefused,
)
from quantroute.client._reconcile import Reconciler, Reconciliation
from quantroute.client._retry import RetryPolicy
from quantroute.client._row import RowRun
from quantroute.client._settling import Attendance, Settler, SettlingSettings
from quantroute.client._transport import Timeouts, Transport
from quantroute.clock import Clock, SystemClock
from quantroute.domain import EndpointKey, Message, Sampling
from quantroute.errors import (
    ConfigurationError,
    InvalidResponse,
    ProviderDown,
    QuantrouteError,
    RateLimited,
    RequestRefused,
    TransportError,
)
from quantroute.ledger import ROOT, Account, BudgetLedger, Ledger
from quantroute.policy import BoundPolicy, ExclusionPolicy
from quantroute.pricing import Quote
from quantroute.registry import ProviderRegistry
from quantroute.routing import (
    BreakerSettings,
    EndpointCost,
    EndpointReport,
    LimitSettings,
    Mix,
    Router,
    RoutingMode,
    cheapest_mix,
)
from quantroute.secrets import EnvKey

__all__ = ["DEFAULT_MAX_IN_FLIGHT", "Client"]

DEFAULT_MAX_IN_FLIGHT: Final = 2_000


class _State(enum.Enum):
    UNOPENED = "not open yet: use `async with client:`"
    OPEN = "open"
    CLOSED = "closed: open it again with `async with client:`"


class Client:
    """Routes chat requests to eligible endpoints, each paid from a ledger with a hard cap.

    >>> async with Client(cap_usd="5.00", exclude=["Fireworks"]) as client:
    ...     answer = await client.chat("moonshotai/kimi-k2.5", "Why is the sky blue?")

    One client serves any number of concurrent tasks of one event loop. It may be opened again after
    it was closed, also on another loop. What it makes itself (a ledger from a path, a registry) it
    closes itself; what is handed in stays the caller's.

    Args:
        cap_usd: the hard cap in US dollars ("5.00"), or `NO_CAP`. Needed unless `ledger` is an
            open ledger or the path of one that has a cap already.
        ledger: an open `BudgetLedger` or `SharedLedger`, or the path of an SQLite file; None keeps
            it in memory.
        policy: which endpoints may serve; `exclude` and `only` are short-hands that add to it.
        service: base URL, CA file and proxy use; OpenRouter by default.
        key: names the environment variable that holds the API key, read at each request.
        registry: the catalogue; by default one of `service` that reads its lists every minute.
        max_in_flight: requests on the wire at once, all endpoints together.
        local: servers of your own that take part as further endpoints; see `LocalEndpoint`.
        routing: "pinned" (we choose the endpoint of each request) or "delegated" (the service
            balances among all that the policy allows); see docs/design/0008-routing.md.
        observer: told of each attempt once it is settled; `quantroute.telemetry` has one.
        timeouts, retry, limits, breakers, settling: see their classes.
        clock, rng: seams for tests.
    """

    def __init__(
        self,
        *,
        cap_usd: object = None,
        ledger: Ledger | str | Path | None = None,
        policy: ExclusionPolicy | None = None,
        exclude: Sequence[str] = (),
        only: Sequence[str] = (),
        service: Service | None = None,
        key: EnvKey | None = None,
        registry: ProviderRegistry | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        local: Sequence[LocalEndpoint] = (),
        routing: RoutingMode | str = RoutingMode.PINNED,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        limits: LimitSettings | None = None,
        breakers: BreakerSettings | None = None,
        settling: SettlingSettings | None = None,
        observer: AttemptObserver | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise ConfigurationError(f"max_in_flight must be at least 1, not {max_in_flight}")
        if not isinstance(ledger, str | Path | None) and cap_usd is not None:
            raise ConfigurationError("an open ledger has its own cap: leave cap_usd out")
        if ledger is None and cap_usd is None:
            raise ConfigurationError(
                "a hard cap is required: cap_usd='5.00', or cap_usd=NO_CAP to spend without limit"
            )
        _check_kinds(policy=policy, service=service, key=key)
        self.max_in_flight = max_in_flight
        self.routing = _mode(routing)
        self.local = _without_twins(local)
        self.policy = _with_names(policy or ExclusionPolicy(), exclude=exclude, only=only)
        self.service = service or Service()
        self.key = key or EnvKey()
        self._cap_usd = cap_usd
        self._given_ledger = ledger
        self._given_registry = registry
        self._timeouts = timeouts or Timeouts()
        self._retry = retry or RetryPolicy()
        self._limits = limits or LimitSettings()
        self._breakers = breakers or BreakerSettings()
        self._settling = settling or SettlingSettings()
        self._observer = observer
        self._clock: Clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._state = _State.UNOPENED
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions = SessionPool(self.service)
        self._local_routes: tuple[LocalRoute, ...] = ()
        self._engine: Engine | None = None
        self._reconciler: Reconciler | None = None
        self._registry: ProviderRegistry | None = None

    def __repr__(self) -> str:
        return (
            f"Client({self.service.route()}, key from ${self.key.variable}, "
            f"max_in_flight={self.max_in_flight}, {self._state.name.lower()})"
        )

    def __del__(self) -> None:
        if getattr(self, "_state", None) is _State.OPEN:
            warnings.warn(
                f"unclosed {self!r}; use `async with`", ResourceWarning, stacklevel=2, source=self
            )

    # -- opening and closing ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._state is _State.OPEN:
            raise ConfigurationError("this client is open already; make a second one")
        ledger = await self._open_ledger()
        try:
            await self._open_on(ledger)
        except BaseException:
            await self._close_resources(ledger)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close what this client opened; idempotent.

        Requests that are still in flight end with a `ConfigurationError`.
        """
        if self._state is not _State.OPEN or self._engine is None:
            return
        self._state = _State.CLOSED
        engine, self._engine = self._engine, None
        if engine.live_rows:
            engine.stop_admitting(_closed_too_early())  # else they would open connections anew
        engine.dispatcher.close()
        await self._close_resources(engine.ledger)

    async def _open_ledger(self) -> Ledger:
        given = self._given_ledger
        if given is None:
            return await BudgetLedger.in_memory(cap=self._cap_usd, clock=self._clock).__aenter__()
        if not isinstance(given, str | Path):
            return given
        ledger = BudgetLedger.open(given, cap=self._cap_usd, clock=self._clock)
        return await ledger.__aenter__()

    async def _open_on(self, ledger: Ledger) -> None:
        self._registry = (
            self._given_registry
            or await ProviderRegistry(
                service=self.service, key=self.key, clock=self._clock
            ).__aenter__()
        )
        transport = Transport(
            service=self.service,
            sessions=self._sessions,
            timeouts=self._timeouts,
            clock=self._clock,
            key=self.key,
        )
        self._local_routes = tuple(
            LocalRoute.to(item, timeouts=self._timeouts, clock=self._clock, key=self.key)
            for item in self.local
        )
        router = Router(
            self.max_in_flight,
            limits=self._limits,
            breakers=self._breakers,
            own_limits={route.key: route.limits for route in self._local_routes},
        )
        self._reconciler = Reconciler(
            ledger=ledger, transport=transport, key=self.key, clock=self._clock
        )
        self._engine = Engine(
            ledger=ledger,
            catalogue=Catalogue(
                registry=self._registry,
                policy=self.policy,
                clock=self._clock,
                mode=self.routing,
                local=tuple(item.endpoint for item in self.local),
            ),
            dispatcher=Dispatcher(router, self._clock),
            transport=transport,
            retry=self._retry,
            key=self.key,
            clock=self._clock,
            rng=self._rng,
            note_baseline=self._reconciler.note_baseline,
            locals={route.key: route for route in self._local_routes},
            observer=self._observer,
        )
        self._loop = asyncio.get_running_loop()
        self._state = _State.OPEN

    async def _close_resources(self, ledger: Ledger) -> None:
        # One that fails, or a cancellation, must not leave the others open.
        async with AsyncExitStack() as stack:
            if ledger is not self._given_ledger:
                stack.push_async_callback(ledger.aclose)
            if self._registry is not None and self._registry is not self._given_registry:
                stack.push_async_callback(self._registry.aclose)
            stack.push_async_callback(self._sessions.close)
            for route in self._local_routes:
                stack.push_async_callback(route.sessions.close)

    # -- requests ---------------------------------------------------------------------------------

    async def chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        max_output_tokens: int = 4_096,
        sampling: Sampling | None = None,
        account: Account = ROOT,
        stream: bool = False,
    ) -> Answer:
        """One answer, or an error that says why there is none.

        Args:
            messages: a user message as text, or the whole conversation.
            max_output_tokens: reasoning included; an answer that needs more ends with finish
                reason "length".
            stream: how the answer travels; the outcome is the same.
        Raises:
            BudgetExceeded: the worst case of this request does not fit under the cap.
            NoEligibleEndpoint: the policy excludes every endpoint; the error lists the reasons.
            RequestRefused: the service refuses this request for good.
            RateLimited, ProviderDown, InvalidResponse, TransportError: attempts or waiting time
                used up; the class tells what came of the last one.
            AccountError: no funds, or the key is not accepted.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif isinstance(messages, bytes | Mapping) or not isinstance(messages, Iterable):
            raise ConfigurationError(
                f"messages must be text, or a list of messages, not {type(messages).__name__}"
            )
        return await self.answer(
            ChatRequest(
                model=model,
                messages=tuple(messages),
                max_output_tokens=max_output_tokens,
                sampling=sampling or Sampling(),
                account=account,
                is_streamed=stream,
            )
        )

    async def answer(self, request: ChatRequest) -> Answer:
        """`chat` for a request that is made already; raises the same errors, with its id."""
        completion = await self.complete(request)
        if isinstance(completion, Answered):
            return completion.answer
        raise _failure(completion, request.request_id)

    async def complete(self, request: ChatRequest, *, sink: AnswerSink | None = None) -> Completion:
        """The whole life of one request; row-level failures are returned, not raised.

        `sink(answer, entry_id)` is called once per answer before it is settled; the work it returns
        commits in the same transaction as the charge, so that no crash can part text and money.
        Raises:
            BudgetExceeded, NoEligibleEndpoint, AccountError, ConfigurationError: nothing of a run
            with these settings can go on.
        """
        engine = self._opened()
        if engine.stopped_by is not None and engine.live_rows == 0:
            engine.admit_again()  # nobody is left who should hear of it; try afresh
        engine.live_rows += 1
        try:
            return await RowRun(engine, request, sink).run()
        except QuantrouteError as error:
            if self._engine is engine:
                raise
            raise _closed_too_early() from error
        finally:
            engine.live_rows -= 1

    async def slot(self) -> None:
        """Wait until another request could be sent at once; for whoever feeds requests in.

        Raises:
            QuantrouteError: whatever `stop_admitting` was given.
        """
        engine = self._opened()
        engine.check_admission()
        await engine.dispatcher.slot()

    def stop_admitting(self, reason: QuantrouteError) -> None:
        """Send nothing new; rows without a request in flight raise `reason` where they wait.

        Requests on the wire go on to their end. Undone by `admit_again`, or by the next request
        once no row is left.
        """
        self._opened().stop_admitting(reason)

    def admit_again(self) -> None:
        """Take back `stop_admitting`."""
        self._opened().admit_again()

    # -- looking and settling ---------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The ledger that pays."""
        return self._opened().ledger

    @property
    def registry(self) -> ProviderRegistry:
        """The catalogue in use."""
        self._opened()
        assert self._registry is not None
        return self._registry

    async def verdicts(self, model: str, *, sampling: Sampling | None = None) -> BoundPolicy:
        """The policy's judgement of every endpoint of `model`, as requests would meet it now."""
        offers = await self._opened().catalogue.offers(model, sampling or Sampling())
        return offers.bound

    async def quote(self, model: str, sampling: Sampling | None = None) -> Quote | None:
        """Price ceilings of the cheapest endpoint that may serve; None if there is none."""
        offers = await self._opened().catalogue.offers(model, sampling or Sampling())
        return offers.cheapest

    def judged(self, endpoint: EndpointKey, *, accepted: bool, account: Account = ROOT) -> None:
        """Tell what became of an answer from `endpoint`: whether it is one that was wanted.

        Routing then prefers endpoints by the cost of an accepted row, not of an attempt. Optional:
        without it only bills are compared. `account` is that of the request: answers are compared
        with others to the same account, as those to another may be harder. About a microsecond.
        """
        self._opened().catalogue.economy.judged(endpoint, account=account, accepted=accepted)

    def endpoint_costs(self) -> tuple[EndpointCost, ...]:
        """What routing has learnt of each endpoint that answered: spend and acceptance."""
        return self._opened().catalogue.economy.costs()

    async def pace(
        self, model: str, sampling: Sampling, *, needed_per_s: float | None, answer_s: float
    ) -> Mix | None:
        """Use only the cheapest endpoints that together give so many answers a second.

        Call it again every few seconds, as rates become known and change. None lifts it.
        Args:
            answer_s: seconds an answer takes, for as long as none has come.
        Raises:
            ConfigurationError: routing is delegated: the service chooses.
            NoEligibleEndpoint, RegistryError: nobody can be asked.
        """
        engine = self._opened()
        if needed_per_s is None:
            engine.dispatcher.set_quotas(None)
            return None
        if self.routing is RoutingMode.DELEGATED:
            raise ConfigurationError("a deadline needs pinned routing: delegated, others choose")
        offers = await engine.catalogue.offers(model, sampling)
        router = engine.dispatcher.router
        costs = engine.catalogue.relative_costs(offers)
        mix = cheapest_mix(
            router.supplies(costs, self._clock.now_s(), answer_s=answer_s),
            needed_per_s=needed_per_s,
            max_in_flight=self.max_in_flight,
        )
        engine.dispatcher.set_quotas(mix.quotas if mix.is_enough else None)
        return mix

    def endpoint_reports(self) -> tuple[EndpointReport, ...]:
        """State of each endpoint that had requests: limit, breaker, counts."""
        return self._opened().dispatcher.router.reports(self._clock.now_s())

    def error_counts(self) -> dict[str, int]:
        """Attempts that failed since the client was opened, by kind, most frequent first."""
        return dict(self._opened().errors.most_common())

    async def key_usage(self) -> KeyUsage | None:
        """What the service says the key has spent and may spend; None if it does not say."""
        self._opened()
        assert self._reconciler is not None
        return await self._reconciler.key_usage()

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Attendance]:
        """Watch over the money of a run: settle held charges meanwhile, compare before and after.

        While in the block, charges of unknown outcome are settled by their generation records in
        the background, and requests wait for money that those may free. See `SettlingSettings`.

        Raises:
            ConfigurationError: the system gives this process too few sockets for `max_in_flight`.
        """
        engine = self._opened()
        ensure_descriptors(self.max_in_flight)
        assert self._reconciler is not None
        attendance = Attendance(at_start=await self._reconciler.compare(moment="start"))
        if attendance.at_start is not None:
            engine.has_baseline = True
        settler = Settler(
            ledger=engine.ledger,
            look=self._reconciler.look,
            clock=self._clock,
            settings=self._settling,
            attendance=attendance,
        )
        async with settler.running():
            yield attendance
        attendance.at_end = await self._reconciler.compare(moment="end")

    async def note_baseline(self, *, renew: bool = False) -> None:
        """Record the key's usage before the ledger's first request, for later reconciliation.

        The first request does it by itself. `renew` takes it anew, for a service whose own count
        has started again.
        """
        engine = self._opened()
        assert self._reconciler is not None
        await self._reconciler.note_baseline(renew=renew)
        engine.has_baseline = True

    async def reconcile(
        self, *, quiet_s: float | None = None, charge_bound: bool = False, patience_s: float = 45.0
    ) -> Reconciliation:
        """Settle what the ledger holds as unknown; see docs/design/0004-unknown-outcomes.md.

        Args:
            quiet_s: minimum age of entries settled by the key's usage; by default the total
                timeout, after which the service has finished with whatever was lost.
            charge_bound: charge what is still unknown at its full reservation.
            patience_s: how long to wait for generation records to appear.
        """
        self._opened()
        assert self._reconciler is not None
        if quiet_s is None:
            quiet_s = self._timeouts.total_s or 3_600.0
        return await self._reconciler.run(
            quiet_s=quiet_s, charge_bound=charge_bound, patience_s=patience_s
        )

    def _opened(self) -> Engine:
        if self._state is not _State.OPEN or self._engine is None:
            raise ConfigurationError(f"this client is {self._state.value}")
        if asyncio.get_running_loop() is not self._loop:
            assert self._loop is not None
            raise ConfigurationError(
                "the event loop on which this client was opened has ended; open and use it "
                "within one asyncio.run(...)"
                if self._loop.is_closed()
                else "this client is open on another event loop; close it there first, "
                "or make one for each loop"
            )
        return self._engine


def _closed_too_early() -> ConfigurationError:
    return ConfigurationError(
        "this client was closed while the request was under way: leave its `async with` when all "
        "answers are in; what it may cost stays reserved"
    )


def _with_names(
    policy: ExclusionPolicy, *, exclude: Sequence[str], only: Sequence[str]
) -> ExclusionPolicy:
    for name, given in (("exclude", exclude), ("only", only)):
        if isinstance(given, str):
            raise ConfigurationError(f"{name} takes a list of names: [{given!r}]")
    return dataclasses.replace(
        policy, exclude=(*policy.exclude, *exclude), only=(*policy.only, *only)
    )


def _without_twins(local: Sequence[LocalEndpoint]) -> tuple[LocalEndpoint, ...]:
    names = [item.name for item in local]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"two local endpoints are called {', '.join(twice)}")
    return tuple(local)


def _check_kinds(*, policy: object, service: object, key: object) -> None:
    """Refuse what is easily given in place of an object; never repeat it, it may be a key."""
    wanted = {
        "policy": (policy, ExclusionPolicy, "ExclusionPolicy(...)"),
        "service": (service, Service, "Service(base_url=...)"),
        "key": (key, EnvKey, "EnvKey(VARIABLE), the name of the variable that holds the key"),
    }
    for name, (given, kind, example) in wanted.items():
        if not isinstance(given, kind | None):
            raise ConfigurationError(f"{name} takes {example}, not {type(given).__name__}")


def _mode(given: RoutingMode | str) -> RoutingMode:
    try:
        return RoutingMode(given)
    except ValueError:
        known = ", ".join(repr(item.value) for item in RoutingMode)
        raise ConfigurationError(f"routing must be one of {known}, not {given!r}") from None


def _failure(failed: RowRefused | GaveUp, request_id: str) -> QuantrouteError:
    facts: dict[str, Any] = {
        "problem": failed.problem,
        "attempt": failed.attempts,
        "request_id": request_id,
    }
    if isinstance(failed, RowRefused):
        return RequestRefused(status=failed.status, **facts)
    status, kind = int(failed.detail.get("status", 0)), failed.detail.get("kind")
    if kind in ("rate limited", "account limited"):
        return RateLimited(status=status, **facts)
    if status == 0:
        return TransportError(maybe_billed=kind == "unknown", **facts)
    if status >= 400:
        return ProviderDown(status=status, **facts)
    return InvalidResponse(**facts)
