"""Registry and policy together: which endpoints may serve a request, and at what cost.

Bound policies are cached per listing, so that a re-read catalogue (a price rise, a relabelled
endpoint, one gone or back) takes effect with the next request, without stopping anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from quantroute._log import get_logger
from quantroute.client._body import input_bound_tokens
from quantroute.client._delegated import Pauses, Pool
from quantroute.client._outcome import Answer, ChatRequest
from quantroute.client._replay import demands_reasoning, lacks_reasoning
from quantroute.clock import Clock
from quantroute.domain import Endpoint, EndpointKey, Provider, Sampling
from quantroute.errors import NoEligibleEndpoint, RegistryError
from quantroute.ledger import Account
from quantroute.policy import BoundPolicy, ExclusionPolicy, Precision, pinned_preferences
from quantroute.pricing import Quote
from quantroute.registry import EndpointList, ProviderRegistry
from quantroute.routing import Candidate, EndpointEconomy, RoutingMode

__all__ = ["Catalogue", "Offers", "TooLong"]

#: Bytes of English text per token, about; only for the expected cost that orders candidates.
_BYTES_PER_TOKEN: Final = 4
#: Share of `max_tokens` an answer is expected to use before any has been seen.
_EXPECTED_SHARE: Final = 0.25
_USUAL_INPUT: Final = 250
_USUAL_OUTPUT: Final = 1_000
_REFRESH_AT_MOST_EVERY_S: Final = 10.0
#: The registry's cache is asked this often, not by each of a thousand requests a second.
_ASK_EVERY_S: Final = 0.5
_ASK_AGAIN_S: Final = 30.0
_OBSERVATIONS_PER_LOOK: Final = 16

log = get_logger("quantroute.client")


class TooLong(Exception):
    """The prompt does not fit any eligible endpoint; internal, becomes a refused row."""


@dataclass(slots=True)
class _Ranks:
    stamp: int = -1
    factors: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """A listing judged for one kind of request."""

    listing: EndpointList
    policy: ExclusionPolicy
    bound: BoundPolicy
    quotes: tuple[tuple[Endpoint, Quote], ...]
    cheapest: Quote | None  # by its output; of all together if the service chooses
    precisions: Mapping[EndpointKey, Precision]
    pins: Mapping[EndpointKey, Mapping[str, Any]]  # the `provider` object that pins each endpoint
    # Delegated routing: one for each set of endpoints that some request can be sent to.
    pools: dict[tuple[EndpointKey, ...], Pool] = field(default_factory=dict)
    ranks: _Ranks = field(default_factory=_Ranks)

    def preferences(self, candidate: Candidate) -> Mapping[str, Any]:
        """The `provider` object to send."""
        if candidate.members:
            return self.pools[candidate.members].preferences
        return self.pins.get(candidate.endpoint.key, {})  # a local server has no such thing

    def quote_of(self, candidate: Candidate) -> Quote | None:
        """The prices that a candidate's costs were reckoned with."""
        if candidate.members:
            return self.pools[candidate.members].quote
        key = candidate.endpoint.key
        return next((quote for endpoint, quote in self.quotes if endpoint.key == key), None)

    def pool(self, endpoints: Sequence[Endpoint]) -> tuple[tuple[EndpointKey, ...], Pool]:
        """These endpoints as one, and the key it is kept under."""
        key = tuple([item.key for item in endpoints])
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool.of(self.bound, endpoints)
        return key, pool


@dataclass(slots=True)
class Catalogue:
    """Candidates for requests, from the registry through the policy."""

    registry: ProviderRegistry
    policy: ExclusionPolicy
    clock: Clock
    mode: RoutingMode = RoutingMode.PINNED
    local: tuple[Endpoint, ...] = ()
    economy: EndpointEconomy = field(default_factory=EndpointEconomy)
    pauses: Pauses = field(default_factory=Pauses)
    _offers: dict[tuple[str, frozenset[str]], Offers] = field(default_factory=dict, init=False)
    _refreshed_at_s: dict[str, float] = field(default_factory=dict, init=False)
    _asked_at_s: dict[str, float] = field(default_factory=dict, init=False)
    _local_only: dict[str, EndpointList] = field(default_factory=dict, init=False)

    async def offers(self, model: str, sampling: Sampling) -> Offers:
        """The judged listing for requests with these sampling parameters.

        Raises:
            RegistryError: the listing cannot be had.
            UnknownName: a name in the policy matches nothing.
        """
        key = (model, sampling.required_parameters())
        known = self._offers.get(key)
        now_s = self.clock.now_s()
        if known is not None and now_s < self._asked_at_s.get(model, 0.0) + _ASK_EVERY_S:
            return known
        listing = await self._listing(model, now_s)
        known = self._offers.get(key)
        if known is not None and known.listing is listing:
            return known
        providers = await self._providers()
        # Two thousand rows may have waited for that list together; the first one back judges.
        known = self._offers.get(key)
        if known is None or known.listing is not listing:
            # A name must match something when a run begins; during it, what it named may be gone.
            known = self._judge(listing, providers, key[1], must_match=known is None)
            self._offers[key] = known
        return known

    def candidates(self, offers: Offers, request: ChatRequest) -> tuple[Candidate, ...]:
        """Endpoints among `offers` that may serve `request`, cheapest per accepted row first.

        Raises:
            NoEligibleEndpoint: the policy excludes every endpoint.
            TooLong: eligible endpoints exist, but the prompt or the output limit fits none.
        """
        if not offers.quotes:
            raise NoEligibleEndpoint(model=request.model, reasons=offers.bound.reasons())
        input_tokens = input_bound_tokens(request.messages)
        usual_tokens = self.economy.usual_output_tokens(request.model, request.account)
        if usual_tokens is None:
            usual_tokens = int(request.max_output_tokens * _EXPECTED_SHARE)
        found = []
        expected_tokens = input_tokens // _BYTES_PER_TOKEN
        for (endpoint, quote), factor in zip(offers.quotes, self._factors(offers), strict=True):
            max_tokens = _max_tokens(endpoint, request, input_tokens)
            if max_tokens <= 0:
                continue
            attempt_pusd = quote.cost_pusd(
                input_tokens=expected_tokens, output_tokens=min(usual_tokens, max_tokens)
            )
            found.append(
                Candidate(
                    endpoint=endpoint,
                    # Not an amount of money but a rank: nothing is posted from it.
                    expected_pusd=int(attempt_pusd * factor),
                    worst_pusd=quote.cost_pusd(input_tokens=input_tokens, output_tokens=max_tokens),
                    max_tokens=max_tokens,
                    attempt_pusd=attempt_pusd,
                )
            )
        if not found:
            raise TooLong(_why_too_long(offers.quotes, request, input_tokens))
        if len(request.messages) > 1 and request.sampling.reasoning is not False:
            found = _without_demanding(found, request)
        if self.mode is RoutingMode.DELEGATED:
            listed = [item for item in found if not item.endpoint.is_local]
            found = [item for item in found if item.endpoint.is_local]
            if listed:
                found.append(self._pooled(offers, listed, input_tokens))
        return self.economy.ordered(found)

    def _factors(self, offers: Offers) -> list[float]:
        """Cost per accepted row and expected attempt, in the order of the quotes.

        Looked up anew after some observations, not for each request: they move slowly.
        """
        stamp = self.economy.observations // _OBSERVATIONS_PER_LOOK
        ranks = offers.ranks
        if ranks.stamp != stamp:
            ranks.stamp = stamp
            ranks.factors = [self.economy.factor(endpoint.key) for endpoint, _ in offers.quotes]
        return ranks.factors

    def _pooled(self, offers: Offers, found: Sequence[Candidate], input_tokens: int) -> Candidate:
        """One candidate for all: at the lowest output limit, lest the service drop some of them."""
        endpoints = [item.endpoint for item in found]
        rested = self.pauses.rested(endpoints, self.clock.now_s()) or endpoints
        if len(rested) < len(found):
            keys = {item.key for item in rested}
            found = [item for item in found if item.endpoint.key in keys]
        members, pool = offers.pool(rested)
        max_tokens = min(item.max_tokens for item in found)
        return Candidate(
            endpoint=pool.endpoint,
            expected_pusd=sum(item.expected_pusd for item in found) // len(found),
            worst_pusd=pool.quote.cost_pusd(input_tokens=input_tokens, output_tokens=max_tokens),
            max_tokens=max_tokens,
            attempt_pusd=sum(item.attempt_pusd for item in found) // len(found),
            members=members,
        )

    def relative_costs(self, offers: Offers) -> dict[EndpointKey, float]:
        """What an accepted row of usual size costs at each endpoint; for comparing, not paying.

        One that the list calls degraded comes after all that are healthy, as in ordering.
        """
        costs = {
            endpoint.key: self.economy.factor(endpoint.key)
            * quote.cost_pusd(input_tokens=_USUAL_INPUT, output_tokens=_USUAL_OUTPUT)
            for endpoint, quote in offers.quotes
        }
        dearest = max(costs.values(), default=0.0)
        for endpoint, _ in offers.quotes:
            if endpoint.is_degraded:
                costs[endpoint.key] += dearest
        return costs

    def learn(
        self, offers: Offers, candidate: Candidate, answer: Answer, *, account: Account
    ) -> None:
        """Note what an answer cost and how long it was, for the ranking of the next candidates.

        One without usage tells nothing; one without a bill yet counts as the list has it.
        """
        usage, quote = answer.usage, offers.quote_of(candidate)
        if usage is None or quote is None:
            return
        if (billed_pusd := answer.cost_pusd) is None:
            billed_pusd = quote.cost_pusd(
                input_tokens=usage.input_tokens, output_tokens=usage.output_tokens
            )
        self.economy.answered(
            answer.provenance.endpoint.key,
            account=account,
            input_pusd=quote.cost_pusd(input_tokens=usage.input_tokens, output_tokens=0),
            pusd_per_output_token=float(quote.output_pusd),
            output_tokens=usage.output_tokens,
            billed_pusd=billed_pusd,
        )

    async def refresh(self, model: str) -> None:
        """Read the listing again, at most every ten seconds; a failure keeps the old one."""
        now_s = self.clock.now_s()
        last_s = self._refreshed_at_s.get(model, float("-inf"))
        if now_s - last_s < _REFRESH_AT_MOST_EVERY_S:
            return
        self._refreshed_at_s[model] = now_s
        try:
            await self.registry.endpoints(model, refresh=True)
            self._asked_at_s.pop(model, None)
        except RegistryError:
            return  # the registry has said so; the stale listing stands

    async def _listing(self, model: str, now_s: float) -> EndpointList:
        """The listing; an empty one if it cannot be had and a server of ours has the model."""
        try:
            listing = await self.registry.endpoints(model, wait=False)
        except RegistryError as error:
            if not any(item.model == model for item in self.local):
                raise
            listing = self._local_only.get(model) or EndpointList(
                model=model,
                canonical_slug=None,
                name=model,
                endpoints=(),
                fetched_at_s=self.clock.time_s(),
                source="local endpoints only",
            )
            if model not in self._local_only:
                log.warning("no listing: local endpoints only", model=model, problem=str(error))
            self._local_only[model] = listing
            self._asked_at_s[model] = now_s + _ASK_AGAIN_S
            return listing
        self._local_only.pop(model, None)
        self._asked_at_s[model] = now_s
        return listing

    async def _providers(self) -> Sequence[Provider]:
        """The provider list, if names have to be compared with it."""
        if not self.policy.names_providers:
            return ()
        try:
            return (await self.registry.providers()).providers
        except RegistryError:
            if not self._local_only:
                raise
            return ()

    def _judge(
        self,
        listing: EndpointList,
        providers: Sequence[Provider],
        required: frozenset[str],
        *,
        must_match: bool,
    ) -> Offers:
        policy = replace(
            self.policy, required_parameters=self.policy.required_parameters | required
        )
        now = datetime.fromtimestamp(self.clock.time_s(), UTC)
        own = [item for item in self.local if item.model == listing.model]
        bound = policy.bind(
            (*listing.endpoints, *own), providers=providers, at=now, must_match=must_match
        )
        is_delegated = self.mode is RoutingMode.DELEGATED
        quotes = tuple(
            (endpoint, endpoint.pricing.quote())
            for endpoint in (bound.delegable if is_delegated else bound.eligible)
            if endpoint.pricing.is_bounded or endpoint.is_local
        )
        listed = [endpoint for endpoint, _ in quotes if not endpoint.is_local]
        cheapest = min(
            (quote for _, quote in quotes), key=lambda quote: quote.output_pusd, default=None
        )
        if is_delegated and listed:
            # The service may choose the dearest, so that is what has to be affordable.
            cheapest = Pool.of(bound, listed).quote
        return Offers(
            listing=listing,
            policy=policy,
            bound=bound,
            quotes=quotes,
            cheapest=cheapest,
            precisions={verdict.endpoint.key: verdict.precision for verdict in bound.verdicts},
            pins={endpoint.key: pinned_preferences(endpoint, policy) for endpoint in listed},
        )


def _without_demanding(found: list[Candidate], request: ChatRequest) -> list[Candidate]:
    """Those that take later turns without earlier reasoning; all, if none is known to do so."""
    if not lacks_reasoning(request.messages):
        return found
    return [item for item in found if not demands_reasoning(item.endpoint)] or found


def _max_tokens(endpoint: Endpoint, request: ChatRequest, input_tokens: int) -> int:
    """The `max_tokens` to send there; 0 if the endpoint cannot take the request.

    An endpoint whose own output limit is below what is wanted would cut answers that others would
    finish, so it takes no part. Where only the sum with the (generous) input bound exceeds the
    context, the limit is lowered instead.
    """
    if (endpoint.max_output_tokens or request.max_output_tokens) < request.max_output_tokens:
        return 0
    return endpoint.output_limit_tokens(
        input_tokens=input_tokens, wanted_tokens=request.max_output_tokens
    )


def _why_too_long(
    quotes: Sequence[tuple[Endpoint, Quote]], request: ChatRequest, input_tokens: int
) -> str:
    outputs = [endpoint.max_output_tokens for endpoint, _ in quotes]
    if all(limit is not None and limit < request.max_output_tokens for limit in outputs):
        most = max(limit for limit in outputs if limit is not None)
        return (
            f"no eligible endpoint gives {request.max_output_tokens} output tokens; "
            f"the most is {most}: lower max_output_tokens"
        )
    return f"a prompt of up to {input_tokens} tokens fits no eligible endpoint; shorten it"
