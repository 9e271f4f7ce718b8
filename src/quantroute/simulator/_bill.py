"""The service's own books: every generation it billed, the account behind the key, counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from quantroute.money import to_pusd
from quantroute.pricing import TokenUsage
from quantroute.simulator._scenario import AccountSpec

__all__ = ["Account", "Bill", "GenerationRecord", "Stats"]

_ZERO: Final = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One billed generation; money is exact.

    `cost_usd` is what the service charged, `upstream_usd` what a BYOK provider charges besides
    (None otherwise). `prompt_id` is `prompt_id()` of the request's messages.
    """

    generation_id: str
    prompt_id: str
    model: str
    tag: str
    provider_name: str
    quantization: str
    usage: TokenUsage
    cost_usd: Decimal
    upstream_usd: Decimal | None
    finish_reason: str | None
    is_streamed: bool
    is_cancelled: bool
    is_byok: bool
    shape: str
    created_at_s: float
    recorded_at_s: float
    latency_ms: int
    generation_ms: int

    @property
    def spend_usd(self) -> Decimal:
        """What the answer costs its buyer: the cost, plus the upstream's price under BYOK."""
        return self.cost_usd + (self.upstream_usd or _ZERO if self.is_byok else _ZERO)

    @property
    def spend_pusd(self) -> int:
        """The same in whole pico-dollars, rounded up."""
        return to_pusd(self.spend_usd)

    def as_json(self) -> dict[str, Any]:
        """The record for `/__sim/bill`; money as decimal strings."""
        return {
            "generation_id": self.generation_id,
            "prompt_id": self.prompt_id,
            "model": self.model,
            "tag": self.tag,
            "provider_name": self.provider_name,
            "quantization": self.quantization,
            "prompt_tokens": self.usage.input_tokens,
            "completion_tokens": self.usage.output_tokens,
            "reasoning_tokens": self.usage.reasoning_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "cache_write_tokens": self.usage.cache_write_tokens,
            "cost_usd": str(self.cost_usd),
            "upstream_usd": None if self.upstream_usd is None else str(self.upstream_usd),
            "spend_usd": str(self.spend_usd),
            "spend_pusd": self.spend_pusd,
            "finish_reason": self.finish_reason,
            "is_streamed": self.is_streamed,
            "is_cancelled": self.is_cancelled,
            "is_byok": self.is_byok,
            "shape": self.shape,
        }


@dataclass(slots=True)
class Bill:
    """Every generation by id, and running totals.

    `total_pusd` adds up whole pico-dollars, each record rounded up, as a ledger posts them;
    `total_usd` is the unrounded sum.
    """

    records: dict[str, GenerationRecord] = field(default_factory=dict)
    total_usd: Decimal = _ZERO
    total_pusd: int = 0
    lookups: Counter[str] = field(default_factory=Counter)

    def add(self, record: GenerationRecord) -> None:
        """Enter one generation; ids are unique by construction."""
        self.records[record.generation_id] = record
        self.total_usd += record.spend_usd
        self.total_pusd += record.spend_pusd

    @property
    def requests(self) -> int:
        """How many generations there are, charged or insured."""
        return len(self.records)

    def by_provider(self) -> dict[str, Decimal]:
        """Spend in USD per provider name."""
        totals: dict[str, Decimal] = {}
        for record in self.records.values():
            totals[record.provider_name] = (
                totals.get(record.provider_name, _ZERO) + record.spend_usd
            )
        return totals

    def paid_by_prompt(self) -> Counter[str]:
        """How many charged generations each prompt has; more than one is a duplicate purchase."""
        return Counter(r.prompt_id for r in self.records.values() if r.spend_usd > 0)

    def as_json(self, *, with_records: bool = True) -> dict[str, Any]:
        """The bill for `/__sim/bill`."""
        body: dict[str, Any] = {
            "total_usd": str(self.total_usd),
            "total_pusd": self.total_pusd,
            "requests": self.requests,
            "by_provider": {name: str(usd) for name, usd in self.by_provider().items()},
            "output_tokens": sum(r.usage.output_tokens for r in self.records.values()),
        }
        if with_records:
            body["records"] = [record.as_json() for record in self.records.values()]
        return body


@dataclass(slots=True)
class Stats:
    """Counters over chat requests since the start."""

    requests: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    disconnects: int = 0
    by_status: Counter[int] = field(default_factory=Counter)
    by_provider: Counter[str] = field(default_factory=Counter)
    by_shape: Counter[str] = field(default_factory=Counter)
    attempts_by_tag: Counter[str] = field(default_factory=Counter)
    answers_by_prompt: Counter[str] = field(default_factory=Counter)

    def enter(self) -> None:
        """A chat request arrived."""
        self.requests += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    def as_json(self) -> dict[str, Any]:
        """The counters for `/__sim/stats`."""
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "disconnects": self.disconnects,
            "by_status": {str(status): count for status, count in self.by_status.items()},
            "by_provider": dict(self.by_provider),
            "by_shape": dict(self.by_shape),
            "attempts_by_tag": dict(self.attempts_by_tag),
            "answers_by_prompt": dict(self.answers_by_prompt),
            "duplicate_answers": sum(count - 1 for count in self.answers_by_prompt.values()),
        }


class Account:
    """Credits and the key's own limit, kept current by every charge.

    Nothing here refuses: `available_usd` says what is left, and requests that run together can
    still take the balance below zero, as on the real service.
    """

    def __init__(self, spec: AccountSpec) -> None:
        self.credits_usd = spec.credits_usd
        self.key_limit_usd = spec.key_limit_usd
        self.include_byok_in_limit = spec.include_byok_in_limit
        self.reserve_in_flight = spec.reserve_in_flight
        self.byok_fee = spec.byok_fee
        self.usage_usd = _ZERO
        self.byok_usage_usd = _ZERO
        self.held_usd = _ZERO

    @property
    def is_limited(self) -> bool:
        """Whether anything can run out."""
        return self.credits_usd is not None or self.key_limit_usd is not None

    def available_usd(self) -> tuple[Decimal, str] | None:
        """What a new request can afford and which limit binds ("credits" or "key")."""
        held = self.held_usd if self.reserve_in_flight else _ZERO
        found: list[tuple[Decimal, str]] = []
        if self.credits_usd is not None:
            found.append((self.credits_usd - self.usage_usd - held, "credits"))
        if self.key_limit_usd is not None:
            found.append((self.key_remaining_usd() - held, "key"))
        return min(found, default=None)

    def key_remaining_usd(self) -> Decimal:
        """What is left of the key's limit; call only when there is one."""
        counted = self.usage_usd + (self.byok_usage_usd if self.include_byok_in_limit else _ZERO)
        return (self.key_limit_usd or _ZERO) - counted

    def hold(self, usd: Decimal) -> None:
        """A request with this worst case started."""
        self.held_usd += usd

    def release(self, usd: Decimal) -> None:
        """That request ended, however it did."""
        self.held_usd -= usd

    def take(self, record: GenerationRecord) -> None:
        """Charge a generation."""
        self.usage_usd += record.cost_usd
        if record.is_byok:
            self.byok_usage_usd += record.upstream_usd or _ZERO

    def key_json(self, label: str) -> dict[str, Any]:
        """The body of GET /key."""
        limit = self.key_limit_usd
        usage, byok = float(self.usage_usd), float(self.byok_usage_usd)
        return {
            "label": label,
            "limit": None if limit is None else float(limit),
            "limit_remaining": None if limit is None else float(self.key_remaining_usd()),
            "limit_reset": None,
            "include_byok_in_limit": self.include_byok_in_limit,
            "usage": usage,
            "usage_daily": usage,
            "usage_weekly": usage,
            "usage_monthly": usage,
            "byok_usage": byok,
            "byok_usage_daily": byok,
            "byok_usage_weekly": byok,
            "byok_usage_monthly": byok,
            "is_free_tier": False,
            "is_management_key": False,
            "is_provisioning_key": False,
            "creator_user_id": "user_simulated",
            "expires_at": None,
            "rate_limit": {"requests": -1, "interval": "10s", "note": "This field is deprecated."},
        }
