"""Finding out what unknown outcomes cost: by generation record, then by the key's own usage.

An entry is held when its bill did not come with the answer: a lost connection, a cancelled or
killed run, an answer without usage. Two sources settle it later, in this order.

1. The generation record. Entries whose id was seen (it comes with the answer's headers) are looked
   up at `/generation`; the record appears some seconds after the answer, so 404 means "ask again".
2. The key's usage. An entry whose id was never seen cannot be looked up, and some records never
   come. But `/key` says what the key has spent in all. Once nothing is in flight and the entries
   are old enough that the service has finished with them,

       (usage now - usage at the baseline) - (posted since the baseline) = what they cost together

   and that remainder is posted to them, each up to its reservation, oldest first. Other use of the
   same key since the baseline can only make the remainder larger, so the ledger never understates.
   The baseline is noted before the first request of a ledger, per key fingerprint. Where something
   is open by then (the service did not say earlier, or the requests went out by another key), the
   baseline is lower by all of it: nobody knows what of it the service had counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from quantroute._log import get_logger
from quantroute.client._accounts import KeyComparison, KeyUsage
from quantroute.client._keycheck import data_of, key_usage_of
from quantroute.client._local import LOCAL_PREFIX, LocalEndpoint
from quantroute.client._reply import billed_usd
from quantroute.client._transport import Transport
from quantroute.client._wire import WireGeneration
from quantroute.clock import Clock
from quantroute.errors import AccountError, EntryStateError, TransportError
from quantroute.ledger import Basis, Charge, Ledger, OpenEntry
from quantroute.money import parse_reported_usd, to_pusd
from quantroute.pricing import TokenUsage
from quantroute.secrets import EnvKey

__all__ = ["Reconciliation", "Reconciler"]

log = get_logger("quantroute.client")

#: How long a record may take to appear. No official figure exists; some seconds are usual.
_RECORD_PATIENCE_S: Final = 45.0
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 8.0
_LOOKUPS_AT_ONCE: Final = 16
#: A run begins and ends with a look at the key; a service that hangs must not hold it up.
_COMPARE_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """What a pass over the held entries achieved. Units: pico-dollars.

    `key_difference_pusd` is the key's usage since the baseline minus what the ledger has posted:
    zero when both agree, positive for other use of the key, entries still held and what was open at
    the baseline, None if the service did not say or there is no baseline for this key. `key` says
    the same at length, as things stand after the pass. `quiet_in_s` is how long it takes until what
    is held without a record is old enough for the key's usage to settle it; 0 if age is not what it
    waits for.
    """

    settled_by_record: int = 0
    settled_by_key_usage: int = 0
    settled_at_bound: int = 0
    still_held: int = 0
    key_difference_pusd: int | None = None
    key: KeyComparison | None = None
    quiet_in_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """Settles held entries of one ledger against one service."""

    ledger: Ledger
    transport: Transport
    key: EnvKey
    clock: Clock
    _usage: KeyUsage | None = field(default=None, init=False)  # as the last pass saw it

    async def note_baseline(self, *, renew: bool = False) -> None:
        """Remember the key's usage before its first request under this ledger, once per key.

        `renew` takes it anew, for an account whose own count has started again. Without a key there
        is no account: only servers of one's own can be asked then.
        """
        if not self.key.is_set:
            return
        name = self._baseline_name()
        if name in self.ledger.notes and not renew:
            return
        usage = await self.key_usage()
        if usage is not None:
            await self._note_usage(usage, renew=renew)

    async def _note_usage(self, usage: KeyUsage, *, renew: bool = False) -> None:
        name = self._baseline_name()
        if name in self.ledger.notes and not renew:
            return
        open_pusd = self.ledger.balance().pending_pusd
        told_pusd = await self._posted_through_key_pusd() + open_pusd
        await self.ledger.note(self._open_name(), str(open_pusd), keep=not renew)
        await self.ledger.note(name, str(to_pusd(usage.usage_usd) - told_pusd), keep=not renew)

    async def key_usage(self) -> KeyUsage | None:
        """The key's spending and limit; None if the service does not say, or no key is set."""
        if not self.key.is_set:
            return None
        try:
            status, body = await self.transport.get("/key", headers=self.key.headers())
        except TransportError as error:
            log.warning("key usage not available", problem=error.problem)
            return None
        return key_usage_of(body) if status == 200 else None

    async def run(
        self, *, quiet_s: float, charge_bound: bool = False, patience_s: float = _RECORD_PATIENCE_S
    ) -> Reconciliation:
        """One pass over everything that is held. Call it when nothing is in flight.

        Args:
            quiet_s: entries without an id, or whose record has not come, are settled by the key's
                usage only when older than this; it must exceed the time the service may still work
                on a lost request.
            charge_bound: charge what remains unknown at its full reservation.
            patience_s: how long to wait for a generation record to appear.
        """
        await self._settle_local()
        by_record = await self._settle_by_record(patience_s)
        by_key, difference = await self._settle_by_key_usage(quiet_s)
        at_bound = await self._settle_at_bound() if charge_bound else 0
        held = await self.ledger.unresolved()
        return Reconciliation(
            settled_by_record=by_record,
            settled_by_key_usage=by_key,
            settled_at_bound=at_bound,
            still_held=len(held),
            quiet_in_s=self._quiet_in_s(held, quiet_s),
            key_difference_pusd=difference,
            key=None if self._usage is None else await self._comparison(self._usage),
        )

    async def compare(self, *, moment: str) -> KeyComparison | None:
        """The key's usage against the ledger, told as an event; None if the service does not say.

        Notes the baseline if this key has none, so that the first comparison of a ledger agrees.
        """
        try:
            async with asyncio.timeout(_COMPARE_WITHIN_S):
                usage = await self.key_usage()
        except (TimeoutError, AccountError) as error:
            log.warning("key usage not available", problem=str(error) or "no answer in time")
            usage = None
        if usage is None:
            return None
        await self._note_usage(usage)
        found = await self._comparison(usage)
        if found is not None:
            facts = {
                "moment": moment,
                "usage_pusd": found.usage_pusd,
                "posted_pusd": found.posted_pusd,
                "held_pusd": found.held_pusd,
                "difference_pusd": found.difference_pusd,
                "explanation": found.explanation,
            }
            if found.is_explained:
                log.info("key usage compared", **facts)
            else:
                log.warning("key usage unexplained", **facts)
        return found

    async def _comparison(self, usage: KeyUsage) -> KeyComparison | None:
        baseline = self.ledger.notes.get(self._baseline_name())
        if baseline is None:
            return None
        balance = self.ledger.balance()
        usage_pusd = to_pusd(usage.usage_usd) - int(baseline)
        posted_pusd = await self._posted_through_key_pusd()
        estimated_pusd = 0
        if usage_pusd < posted_pusd:
            estimated_pusd = sum(
                line.estimated_pusd
                for line in await self.ledger.statement()
                if not line.endpoint.startswith(LOCAL_PREFIX)
            )
        return KeyComparison(
            usage_pusd=usage_pusd,
            posted_pusd=posted_pusd,
            held_pusd=balance.held_pusd,
            held_entries=balance.held_entries,
            in_flight_pusd=balance.pending_pusd - balance.held_pusd,
            estimated_pusd=estimated_pusd,
            open_before_pusd=int(self.ledger.notes.get(self._open_name(), "0")),
        )

    async def _settle_by_record(self, patience_s: float) -> int:
        entries = await self._with_record(await self.ledger.unresolved())
        deadline_s = self.clock.now_s() + patience_s
        pause_s, settled = _FIRST_PAUSE_S, 0
        while entries:
            settled += await self._settle_recorded(entries, deadline_s)
            entries = await self._with_record(await self.ledger.unresolved())
            if not entries or self.clock.now_s() + pause_s > deadline_s:
                break
            await self.clock.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return settled

    async def _settle_recorded(self, entries: Sequence[OpenEntry], deadline_s: float) -> int:
        """How many of `entries` were settled now; one look at each, a few at a time.

        Once the service has failed to answer and the deadline is over, the rest is not asked for:
        one that hangs must not hold up thousands of entries for half a minute each.
        """
        waiting, settled = iter(entries), 0
        is_silent = False

        async def worker() -> None:
            nonlocal is_silent, settled
            for entry in waiting:
                charge = None
                if not (is_silent and self.clock.now_s() > deadline_s):
                    try:
                        _, charge = await self._recorded_charge(entry)
                    except TransportError as error:
                        is_silent = True
                        log.warning("generation record not available", problem=error.problem)
                if charge is not None and await self._post(entry, charge):
                    settled += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_LOOKUPS_AT_ONCE, len(entries))):
                    group.create_task(worker())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return settled

    async def look(self, entry: OpenEntry) -> tuple[int, int | None]:
        """Look an entry's record up and post it: the status, and the amount (None: not yet)."""
        status, charge = await self._recorded_charge(entry)
        if charge is None or not await self._post(entry, charge):
            return status, None
        return status, charge.amount_pusd

    async def _with_record(self, entries: Sequence[OpenEntry]) -> list[OpenEntry]:
        """Those whose record can still come: with an id that no other entry was charged for."""
        ids = [entry.generation_id for entry in entries if entry.generation_id]
        recorded = await self.ledger.recorded(ids) if ids else frozenset()
        return [
            entry
            for entry in entries
            if entry.generation_id and entry.generation_id not in recorded
        ]

    async def _post(self, entry: OpenEntry, charge: Charge) -> bool:
        """Whether it was posted now."""
        try:
            await self.ledger.post(entry.entry_id, charge)
        except EntryStateError:
            # Somebody else settles this ledger as well and was first, or the record is posted for
            # another entry; then only the key's usage can tell what this one cost.
            return False
        except ValueError as error:
            log.warning("charge not credible", entry=entry.entry_id, problem=str(error))
            return False
        log.info(
            "charge settled",
            entry=entry.entry_id,
            endpoint=entry.endpoint,
            basis=charge.basis.value,
            amount_pusd=charge.amount_pusd,
            reserved_pusd=entry.reserved_pusd,
            after_s=round(max(0.0, self.clock.time_s() - entry.reserved_at_s), 3),
        )
        return True

    async def _recorded_charge(self, entry: OpenEntry) -> tuple[int, Charge | None]:
        """The status, and the billed charge of one generation; None while there is no record.

        Raises:
            TransportError: the service did not answer.
        """
        status, body = await self.transport.get(
            f"/generation?id={quote(entry.generation_id or '', safe='')}",
            headers=self.key.headers(),
        )
        if status != 200:
            return status, None
        wire = WireGeneration.model_validate(data_of(body))
        cost_usd = billed_usd(
            wire.total_cost,
            upstream=wire.upstream_inference_cost,
            is_byok=bool(wire.is_byok),
        )
        if cost_usd is None or parse_reported_usd(cost_usd) is None:
            return status, None  # not said, or a sum beyond what a journal can hold
        return status, Charge(
            amount_pusd=to_pusd(cost_usd),
            basis=Basis.RECORD,
            usage=_recorded_usage(wire),
            generation_id=entry.generation_id,
        )

    async def _settle_by_key_usage(self, quiet_s: float) -> tuple[int, int | None]:
        entries = await self.ledger.unresolved()
        if not self.key.is_set and not entries:
            return 0, None  # nothing was asked of the service, or all of it is known
        remainder = await self._unexplained_pusd()
        if remainder is None:
            return 0, None
        oldest_first = sorted(entries, key=lambda entry: entry.reserved_at_s)
        # A record that has not come by now never will, and the key has spent its cost as well.
        has_lookups = self._quiet_in_s(await self._with_record(entries), _RECORD_PATIENCE_S) > 0
        balance = self.ledger.balance()
        is_busy = balance.open_entries > balance.held_entries  # others' requests are under way
        is_young = self._quiet_in_s(entries, quiet_s) > 0
        if not entries or has_lookups or is_young or is_busy or remainder < 0:
            return 0, remainder
        return await self._allocate(oldest_first, remainder)

    def _quiet_in_s(self, entries: Sequence[OpenEntry], quiet_s: float) -> float:
        """Seconds until the youngest of `entries` is `quiet_s` old; 0 if it is.

        One from the future is as young as can be: the clock has been set back since.
        """
        youngest_s = max((entry.reserved_at_s for entry in entries), default=-math.inf)
        age_s = max(0.0, self.clock.time_s() - youngest_s)
        return max(0.0, quiet_s - age_s)

    async def _allocate(self, entries: Sequence[OpenEntry], remainder: int) -> tuple[int, int]:
        """Post the remainder to the entries, oldest first, each up to its reservation."""
        settled = 0
        for entry in entries:
            share = min(remainder, entry.reserved_pusd)
            charge = Charge(
                amount_pusd=share, basis=Basis.KEY_USAGE, usage=None, generation_id=None
            )
            if await self._post(entry, charge):
                remainder -= share
                settled += 1
        return settled, remainder

    async def _unexplained_pusd(self) -> int | None:
        """The key's usage since the baseline that no posted entry explains."""
        baseline = self.ledger.notes.get(self._baseline_name())
        usage = await self.key_usage()
        self._usage = usage
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
        settled = 0
        for entry in await self.ledger.unresolved():
            charge = Charge(
                amount_pusd=entry.reserved_pusd,
                basis=Basis.BOUND,
                usage=None,
                generation_id=entry.generation_id,
            )
            settled += await self._post(entry, charge)
        return settled

    def _baseline_name(self) -> str:
        return f"key-usage-baseline-pusd/{self._fingerprint()}"

    def _open_name(self) -> str:
        return f"key-usage-open-before-pusd/{self._fingerprint()}"

    def _fingerprint(self) -> str:
        # So that two keys on one ledger keep two baselines; the key itself is long and random, so
        # it cannot be found from twelve hex digits of its hash.
        return hashlib.sha256(self.key.read().encode()).hexdigest()[:12]


def _recorded_usage(wire: WireGeneration) -> TokenUsage | None:
    if wire.native_tokens_prompt is None or wire.native_tokens_completion is None:
        return None
    return TokenUsage(
        input_tokens=wire.native_tokens_prompt,
        output_tokens=wire.native_tokens_completion,
        reasoning_tokens=wire.native_tokens_reasoning,
        cached_tokens=wire.native_tokens_cached,
    )
