"""Keeping to a deadline: the mix of endpoints is chosen anew every few seconds."""

from __future__ import annotations

from collections.abc import Sequence

from quantroute._log import get_logger
from quantroute.clock import Clock
from quantroute.errors import NoEligibleEndpoint, RegistryError
from quantroute.generation._config import RunConfig
from quantroute.generation._conversation import ChatClient
from quantroute.generation._deadline import REPLAN_EVERY_S, Deadline, Pace, needed_per_s
from quantroute.generation._expect import assumed
from quantroute.generation._feed import Feed
from quantroute.generation._known import KnownRows
from quantroute.generation._report import Tally
from quantroute.routing import Mix

__all__ = ["Pacer"]

log = get_logger("quantroute.generation")


class Pacer:
    """Has a client use the endpoints that a deadline needs, and no others.

    Args:
        began_s: when the run began, on the clock's own scale.
    """

    def __init__(
        self,
        deadline: Deadline,
        *,
        client: ChatClient,
        config: RunConfig,
        feeds: Sequence[Feed],
        known: KnownRows,
        tally: Tally,
        clock: Clock,
        began_s: float,
    ) -> None:
        self._deadline = deadline
        self._client = client
        self._config = config
        self._feeds = feeds
        self._known = known
        self._tally = tally
        self._clock = clock
        self._began_s = began_s
        self._is_warned = False
        self.pace: Pace | None = None
        """How it stands, as of the last choice; None as long as nobody could be asked."""

    async def keep(self) -> None:
        """Choose now, by what is left to do and the time left for it."""
        left_s = self._deadline.after_s - (self._clock.now_s() - self._began_s)
        rows = self._remaining_rows()
        answers = rows * self._answers_per_row()
        wanted_per_s = needed_per_s(answers=answers, left_s=left_s, answer_s=self._answer_s())
        mix = await self._set(wanted_per_s)
        if mix is None:
            return
        self.pace = Pace(left_s=left_s, remaining_rows=rows, mix=mix)
        if mix.is_enough:
            self._is_warned = False
        elif self._tally.answers and not self._is_warned:  # before that it is but an assumption
            self._is_warned = True
            log.warning("deadline cannot be met", state=str(self.pace), remaining_rows=round(rows))

    async def keep_on(self) -> None:
        """Choose anew from time to time, until cancelled."""
        while True:
            await self._clock.sleep(REPLAN_EVERY_S)
            await self.keep()

    async def lift(self) -> None:
        """Every endpoint may be used again."""
        await self._set(None)

    def _remaining_rows(self) -> float:
        rows = sum(feed.remaining_rows or 0.0 for feed in self._feeds)
        if len(self._feeds) == 1 and self._feeds[0].dataset is None:
            rows = max(0.0, rows - self._known.resumed - self._known.duplicates)
        return rows

    def _answers_per_row(self) -> float:
        ended = sum(self._tally.ends.values())
        return max(1.0, self._tally.answers / ended) if ended else 1.0

    async def _set(self, wanted_per_s: float | None) -> Mix | None:
        try:
            return await self._client.pace(
                self._config.model,
                self._config.sampling,
                needed_per_s=wanted_per_s,
                answer_s=self._assumed_s(),
            )
        except (RegistryError, NoEligibleEndpoint):
            return None  # requests will say so, if it lasts

    def _assumed_s(self) -> float:
        """Seconds an answer is assumed to take before any has come."""
        return assumed(max_output_tokens=self._config.max_output_tokens).answer_s

    def _answer_s(self) -> float:
        """Seconds an answer takes, in the mean of those that have come."""
        tally = self._tally
        return tally.answer_s / tally.answers if tally.answers else self._assumed_s()
