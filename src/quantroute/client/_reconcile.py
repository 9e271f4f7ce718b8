"""Finding out what unknown outcomes cost: by generation record, then by the key's own usage.

An entry is held when its bill did not come with the answer: a lost connection, a cancelled or
killed run, an answer without usage. Two sources settle it later, in this order.

1. The generation record. Entries whose id was seen (it comes with the answer's headers) are looked
   up at `/generation`; the record appears some seconds after the answer, so 404 means "ask again".
2. The key's usage. An entry whose id was never seen cannot be looked up. But `/key` says what the
   key has spent in all. Once nothing is in flight and the entries are old enough that the service
   has finished with them,

       (usage now - usage at the baseline) - (posted since the baseline) = what they cost together

   and that remainder is posted to them, each up to its reservation, oldest first. Other use of the
   same key since the baseline can only make the remainder larger, so the ledger never understates.
   The baseline is noted before the first request of a ledger, per key fingerprint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final
from urllib.parse import quote

from quantroute._log import get_logger
from quantroute.client._local import LOCAL_PREFIX, LocalEndpoint
from quantroute.client._reply import loads
from quantroute.client._transport import Transport
from quantroute.client._wire import WireGeneration, WireKey
from quantroute.clock import Clock
from quantroute.domain import TokenUsage
from quantroute.errors import EntryStateError, TransportError
from quantroute.ledger import Basis, BudgetLedger, Charge, OpenEntry
from quantroute.money import parse_reported_usd, to_pusd
from quantroute.secrets import EnvKey

__all__ = ["KeyUsage", "Reconciliation", "Reconciler"]

log = get_logger("quantroute.client")

#: How long a record may take to appear. No official figure exists; some seconds are usual.
_RECORD_PATIENCE_S: Final = 45.0
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 8.0
_LOOKUPS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """What `/key` says, in USD; `limit_usd` is None when the key has no limit of its own.

    `usage_usd` is all that was spent through the key: credits, and the providers' own bills where
    the user brought a provider key (`byok_usage`), as ledger charges count them too.
    """

    usage_usd: Decimal
    limit_usd: Decimal | None
    remaining_usd: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """What a pass over the held entries achieved. Units: pico-dollars.

    `key_difference_pusd` is the key's usage since the baseline minus what the ledger has posted:
    zero when both agree, positive for other use of the key or entries still held, None if the
    service did not say or the ledger has no baseline for this key.
    """

    settled_by_record: int = 0
    settled_by_key_usage: int = 0
    settled_at_bound: int = 0
    still_held: int = 0
    key_difference_pusd: int | None = None


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """Settles held entries of one ledger against one service."""

    ledger: BudgetLedger
    transport: Transport
    key: EnvKey
    clock: Clock

    async def note_baseline(self, *, renew: bool = False) -> None:
        """Remember the key's usage before its first request under this ledger, once per key.

        `renew` takes it anew, for an account whose own count has started again.
        """
        name = self._baseline_name()
        if name in self.ledger.notes and not renew:
            return
        usage = await self.key_usage()
        if usage is not None:
            await self.ledger.note(
                name, str(to_pusd(usage.usage_usd) - await self._posted_through_key_pusd())
            )

    async def key_usage(self) -> KeyUsage | None:
        """The key's spending and limit; None if the service does not say."""
        try:
            status, body = await self.transport.get("/key", headers=self.key.headers())
        except TransportError as error:
            log.warning("key usage not available", problem=error.problem)
            return None
        wire = WireKey.model_validate(_data(body)) if status == 200 else None
        usage_usd = parse_reported_usd(wire.usage) if wire else None
        if wire is None or usage_usd is None:
            return None
        return KeyUsage(
            usage_usd=usage_usd + (parse_reported_usd(wire.byok_usage) or Decimal(0)),
            limit_usd=parse_reported_usd(wire.limit),
            remaining_usd=parse_reported_usd(wire.limit_remaining),
        )

    async def run(
        self, *, quiet_s: float, charge_bound: bool = False, patience_s: float = _RECORD_PATIENCE_S
    ) -> Reconciliation:
        """One pass over everything that is held. Call it when nothing is in flight.

        Args:
            quiet_s: entries without an id are settled by the key's usage only when older than
                this; it must exceed the time the service may still work on a lost request.
            charge_bound: charge what remains unknown at its full reservation.
            patience_s: how long to wait for a generation record to appear.
        """
        await self._settle_local()
        by_record = await self._settle_by_record(patience_s)
        by_key, difference = await self._settle_by_key_usage(quiet_s)
        at_bound = await self._settle_at_bound() if charge_bound else 0
        return Reconciliation(
            settled_by_record=by_record,
            settled_by_key_usage=by_key,
            settled_at_bound=at_bound,
            still_held=len(await self.ledger.unresolved()),
            key_difference_pusd=difference,
        )

    async def _settle_by_record(self, patience_s: float) -> int:
        entries = [entry for entry in await self.ledger.unresolved() if entry.generation_id]
        deadline_s = self.clock.now_s() + patience_s
        pause_s, settled = _FIRST_PAUSE_S, 0
        while entries:
            remaining = await self._settle_recorded(entries, deadline_s)
            settled += len(entries) - len(remaining)
            entries = remaining
            if not entries or self.clock.now_s() + pause_s > deadline_s:
                break
            await self.clock.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return settled

    async def _settle_recorded(
        self, entries: Sequence[OpenEntry], deadline_s: float
    ) -> list[OpenEntry]:
        """Those among `entries` that have no record yet; one look at each, a few at a time.

        Once the service has failed to answer and the deadline is over, the rest is not asked for:
        one that hangs must not hold up thousands of entries for half a minute each.
        """
        waiting, remaining = iter(entries), list[OpenEntry]()
        is_silent = False

        async def worker() -> None:
            nonlocal is_silent
            for entry in waiting:
                charge = None
                if not (is_silent and self.clock.now_s() > deadline_s):
                    try:
                        charge = await self._recorded_charge(entry)
                    except TransportError as error:
                        is_silent = True
                        log.warning("generation record not available", problem=error.problem)
                if charge is None:
                    remaining.append(entry)
                else:
                    await self._post(entry, charge)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_LOOKUPS_AT_ONCE, len(entries))):
                    group.create_task(worker())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return remaining

    async def _post(self, entry: OpenEntry, charge: Charge) -> None:
        # Another process on the same ledger may reconcile as well, and have been first.
        with contextlib.suppress(EntryStateError):
            await self.ledger.post(entry.entry_id, charge)

    async def _recorded_charge(self, entry: OpenEntry) -> Charge | None:
        """The billed charge of one generation; None while there is no record.

        Raises:
            TransportError: the service did not answer.
        """
        status, body = await self.transport.get(
            f"/generation?id={quote(entry.generation_id or '', safe='')}",
            headers=self.key.headers(),
        )
        if status != 200:
            return None
        wire = WireGeneration.model_validate(_data(body))
        cost_usd = parse_reported_usd(wire.total_cost)
        if cost_usd is None:
            return None
        if wire.is_byok:
            cost_usd += parse_reported_usd(wire.upstream_inference_cost) or Decimal(0)
        if parse_reported_usd(cost_usd) is None:
            return None  # the sum is beyond what a journal can hold
        return Charge(
            amount_pusd=to_pusd(cost_usd),
            basis=Basis.RECORD,
            usage=_recorded_usage(wire),
            generation_id=entry.generation_id,
        )

    async def _settle_by_key_usage(self, quiet_s: float) -> tuple[int, int | None]:
        entries = await self.ledger.unresolved()
        remainder = await self._unexplained_pusd()
        if remainder is None:
            return 0, None
        oldest_first = sorted(entries, key=lambda entry: entry.reserved_at_s)
        now_s = self.clock.time_s()
        has_lookups = any(entry.generation_id for entry in entries)
        is_young = any(now_s - entry.reserved_at_s < quiet_s for entry in entries)
        if not entries or has_lookups or is_young or remainder < 0:
            return 0, remainder
        return await self._allocate(oldest_first, remainder)

    async def _allocate(self, entries: Sequence[OpenEntry], remainder: int) -> tuple[int, int]:
        """Post the remainder to the entries, oldest first, each up to its reservation."""
        for entry in entries:
            share = min(remainder, entry.reserved_pusd)
            remainder -= share
            await self._post(
                entry,
                Charge(amount_pusd=share, basis=Basis.KEY_USAGE, usage=None, generation_id=None),
            )
        return len(entries), remainder

    async def _unexplained_pusd(self) -> int | None:
        """The key's usage since the baseline that no posted entry explains."""
        baseline = self.ledger.notes.get(self._baseline_name())
        usage = await self.key_usage()
        if baseline is None or usage is None:
            return None
        posted_pusd = await self._posted_through_key_pusd()
        return to_pusd(usage.usage_usd) - int(baseline) - posted_pusd

    async def _posted_through_key_pusd(self) -> int:
        """What the service has billed: not what servers of the user's own are said to cost."""
        posted_pusd = self.ledger.balance().posted_pusd
        if not posted_pusd:
            return 0
        own_pusd = sum(
            line.posted_pusd
            for line in await self.ledger.statement()
            if line.endpoint.startswith(LOCAL_PREFIX)
        )
        return posted_pusd - own_pusd

    async def _settle_local(self) -> None:
        """Requests to a local server that were cancelled or killed: nobody keeps a record there."""
        for entry in await self.ledger.unresolved():
            if entry.endpoint.startswith(LOCAL_PREFIX):
                await self._post(entry, LocalEndpoint.bound(entry.reserved_pusd).charge)

    async def _settle_at_bound(self) -> int:
        entries = await self.ledger.unresolved()
        for entry in entries:
            await self._post(
                entry,
                Charge(
                    amount_pusd=entry.reserved_pusd,
                    basis=Basis.BOUND,
                    usage=None,
                    generation_id=entry.generation_id,
                ),
            )
        return len(entries)

    def _baseline_name(self) -> str:
        # A fingerprint, so that two keys on one ledger keep two baselines; the key itself is long
        # and random, so it cannot be found from twelve hex digits of its hash.
        fingerprint = hashlib.sha256(self.key.read().encode()).hexdigest()[:12]
        return f"key-usage-baseline-pusd/{fingerprint}"


def _data(body: bytes) -> dict[str, object]:
    """The `data` object of an accounting answer; empty when it is not one."""
    try:
        decoded = loads(body)
    except ValueError:
        return {}
    data = decoded.get("data") if isinstance(decoded, dict) else None
    return data if isinstance(data, dict) else {}


def _recorded_usage(wire: WireGeneration) -> TokenUsage | None:
    if wire.native_tokens_prompt is None or wire.native_tokens_completion is None:
        return None
    return TokenUsage(
        input_tokens=wire.native_tokens_prompt,
        output_tokens=wire.native_tokens_completion,
        reasoning_tokens=wire.native_tokens_reasoning,
        cached_tokens=wire.native_tokens_cached,
    )
