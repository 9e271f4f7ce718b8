"""Everything a running simulated service remembers, and how changes reach it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from typing import Final

from quantroute.clock import Clock
from quantroute.simulator._backend import Backend, SyntheticBackend
from quantroute.simulator._bill import Account, Bill, GenerationRecord, Stats
from quantroute.simulator._catalogue import Catalogue
from quantroute.simulator._faults import Faults, FaultTables
from quantroute.simulator._routing import Gate
from quantroute.simulator._scenario import Change, Event, Scenario, TrafficSpec

__all__ = ["ServiceState"]

_NEVER: Final = float("inf")


class ServiceState:
    """One service: catalogue, account, bill, counters, and the knobs that events can turn.

    Synchronous on purpose: no await between check and change, so no lock is needed.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        clock: Clock,
        backend: Backend | None,
        api_key: str,
        management_key: str,
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.clock = clock
        self.api_key = api_key
        self.management_key = management_key
        self.catalogue = Catalogue(scenario)
        self.account = Account(scenario.account)
        self.bill = Bill()
        self.stats = Stats()
        self.has_own_backend = backend is not None
        self.backend: Backend = backend or SyntheticBackend(scenario.answers)
        self.answers = scenario.answers
        self.time_scale = scenario.time_scale
        self.generation_delay_s = scenario.generation_delay_s
        self.generation_misses = scenario.generation_misses
        self.traffic = scenario.traffic
        self.provider_traffic = dict(scenario.provider_traffic)
        self.gates: defaultdict[str, Gate] = defaultdict(Gate)
        rate = scenario.platform_requests_per_s
        self.platform_traffic = None if rate is None else TrafficSpec(requests_per_s=rate)
        self.platform_gate = Gate()
        self._faults = scenario.faults
        self._provider_faults = dict(scenario.provider_faults)
        self._tables: dict[str, FaultTables] = {}
        self.edge_tables = FaultTables(scenario.faults)
        self._samples: Counter[str] = Counter()
        self._generations = 0
        self._started_at_s = clock.now_s()
        self._events = list(scenario.events)
        self._next_event_s, self._next_event_request = self._next_triggers()

    # -- randomness ------------------------------------------------------------------------------

    def next_sample(self, prompt_id: str) -> tuple[int, random.Random]:
        """The number of this request among its prompt's, and its own source of randomness.

        Seeded by prompt and number, not by arrival, so that concurrency does not change outcomes.
        """
        sample = self._samples[prompt_id]
        self._samples[prompt_id] = sample + 1
        return sample, self.rng(prompt_id, sample)

    def rng(self, *parts: object) -> random.Random:
        """A source of randomness that depends on the seed and on `parts` only."""
        text = ":".join(map(str, (self.seed, *parts)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

    def new_generation_id(self, rng: random.Random) -> str:
        """`gen-<unix seconds>-<20 letters and digits>`, unique within this service."""
        self._generations += 1
        return f"gen-{int(self.clock.time_s())}-{self._generations:08x}{rng.getrandbits(48):012x}"

    # -- faults and traffic ----------------------------------------------------------------------

    def tables(self, slug: str) -> FaultTables:
        """The faults of one provider, ready for drawing."""
        tables = self._tables.get(slug)
        if tables is None:
            own = self._provider_faults.get(slug)
            tables = self._tables[slug] = FaultTables(self._faults.overlaid(own))
        return tables

    def traffic_of(self, slug: str) -> TrafficSpec:
        """How fast one provider is and how much it takes."""
        return self.provider_traffic.get(slug, self.traffic)

    # -- money -----------------------------------------------------------------------------------

    def enter(self, record: GenerationRecord) -> None:
        """Bill one generation: the book, the account and the counters at once."""
        self.bill.add(record)
        self.account.take(record)
        self.stats.by_provider[record.provider_name] += 1
        self.stats.by_shape[record.shape or "plain"] += 1
        if record.spend_usd > 0:
            self.stats.answers_by_prompt[record.prompt_id] += 1

    # -- changes ---------------------------------------------------------------------------------

    def run_due_events(self, *, arriving: int) -> None:
        """Apply every event whose moment has come; cheap when there is none.

        `arriving` requests are counted already but belong to the time after the event.
        """
        finished = self.stats.requests - arriving
        if self._next_event_request > finished and (
            self._next_event_s == _NEVER or self._next_event_s > self._elapsed_s()
        ):
            return
        elapsed_s = self._elapsed_s()
        due = [event for event in self._events if self._is_due(event, elapsed_s, finished)]
        self._events = [event for event in self._events if event not in due]
        self._next_event_s, self._next_event_request = self._next_triggers()
        for event in due:
            self.apply(event.change)

    def apply(self, change: Change) -> None:
        """Turn the knobs that `change` sets.

        Raises:
            ConfigurationError: it names an endpoint or model that is not listed.
        """
        for endpoint in change.endpoints:
            self.catalogue.apply(endpoint)
        for addition in change.add:
            self.catalogue.add(addition.model, addition.endpoint)
        self._apply_account(change)
        self._apply_faults(change.faults, change.provider_faults)
        if change.traffic is not None:
            self.traffic = change.traffic
        self.provider_traffic |= change.provider_traffic
        if change.answers is not None:
            self.answers = change.answers
            if not self.has_own_backend:
                self.backend = SyntheticBackend(change.answers)
        if change.time_scale is not None:
            self.time_scale = change.time_scale
        if change.generation_delay_s is not None:
            self.generation_delay_s = change.generation_delay_s
        if change.generation_misses is not None:
            self.generation_misses = change.generation_misses

    def _apply_account(self, change: Change) -> None:
        account = self.account
        # Explicit null lifts a limit; an absent field leaves it as it is.
        if "credits_usd" in change.model_fields_set:
            account.credits_usd = change.credits_usd
        if "key_limit_usd" in change.model_fields_set:
            account.key_limit_usd = change.key_limit_usd
        if change.add_credits_usd is not None:
            account.credits_usd = (account.credits_usd or 0) + change.add_credits_usd
        if change.reserve_in_flight is not None:
            account.reserve_in_flight = change.reserve_in_flight

    def _apply_faults(self, faults: Faults | None, by_provider: dict[str, Faults]) -> None:
        if faults is None and not by_provider:
            return
        self._faults = self._faults.overlaid(faults)
        self._provider_faults |= by_provider
        self.edge_tables = FaultTables(self._faults)
        self._tables.clear()

    def _elapsed_s(self) -> float:
        return self.clock.now_s() - self._started_at_s

    def _is_due(self, event: Event, elapsed_s: float, finished: int) -> bool:
        if event.at_s is not None:
            return event.at_s <= elapsed_s
        return (event.after_requests or 0) <= finished

    def _next_triggers(self) -> tuple[float, float]:
        """(seconds, number of the request) at which the next event is due."""
        times = [event.at_s for event in self._events if event.at_s is not None]
        counts = [event.after_requests for event in self._events if event.after_requests]
        return min(times, default=_NEVER), min(counts, default=_NEVER)
