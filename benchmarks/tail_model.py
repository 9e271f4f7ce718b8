"""The arithmetic behind elastic limits: an event simulation of the last half of a cap, no client.

    .venv/bin/python benchmarks/tail_model.py [--seeds 3]      a minute

Answers are log-normal and take time in proportion to their length; a request starts when a slot is
free and its reservation fits. Money is counted in mean answers. For each size of a wave (all slots
at the mean cost, as a share of the cap), spread and rule it prints the time from 50% to 99% of the
cap against the pace from 10% to 40%, and the share of the cap in answers that were cut and redone.
The figures of docs/design/0007-tight-cap.md are from here.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field

SLOTS = 500
LIMIT_TOKENS = 16_384
FIRST_TOKEN_SHARE = 0.04  # of a mean answer's time
LEAST_SEEN, KEPT, REFRESH = 64, 2_048, 64


@dataclass(frozen=True, slots=True)
class Rule:
    """How limits are chosen: the floor's quantile, and whether a wave is taken off first."""

    quantile: float
    takes_off_a_wave: bool
    margin: float = 1.05

    def __str__(self) -> str:
        return f"{self.quantile:.0%}{', a wave ahead' if self.takes_off_a_wave else ''}"


@dataclass(slots=True)
class Tail:
    """One run to its cap. `limit` is the user's, in mean answers."""

    rule: Rule
    waves: float
    sigma: float
    limit: float
    seed: int
    posted: float = 0.0
    pending: float = 0.0
    wasted: float = 0.0
    now: float = 0.0
    reached: dict[int, float] = field(default_factory=dict)
    _in_flight: list[tuple[float, float, float, bool]] = field(default_factory=list)
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _since: int = REFRESH
    _floor: float = 0.0
    _mean: float = 0.0

    @property
    def cap(self) -> float:
        return self.waves * SLOTS

    def run(self) -> tuple[float, float]:
        """(time from 50% to 99% as a multiple, share wasted)."""
        rng, redo = random.Random(self.seed), deque[float]()
        while True:
            while len(self._in_flight) < SLOTS:
                limit = redo[0] if redo else self._choose()
                if self.posted + self.pending + limit > self.cap:
                    break
                if redo:
                    redo.popleft()
                self._start(rng, limit)
            if not self._in_flight:
                break
            cut_at = self._finish()
            if cut_at is not None:
                redo.append(min(self.limit, 2 * cut_at))
        pace = (self.reached[40] - self.reached[10]) / 30
        return (self.reached[99] - self.reached[50]) / (49 * pace), self.wasted / self.cap

    def _choose(self) -> float:
        if len(self._seen) < LEAST_SEEN:
            return self.limit
        if self._since >= REFRESH:
            ordered = sorted(self._seen)
            at = int(self.rule.quantile * (len(ordered) - 1))
            self._floor = self.rule.margin * ordered[at]
            self._mean = sum(ordered) / len(ordered)
            self._since = 0
        share = (self.cap - self.posted) / SLOTS
        if self.rule.takes_off_a_wave:
            share -= self._mean
        return min(self.limit, max(share, self._floor))

    def _start(self, rng: random.Random, limit: float) -> None:
        length = rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)
        used = min(length, limit)
        is_cut = length > limit and limit < self.limit
        heapq.heappush(self._in_flight, (self.now + FIRST_TOKEN_SHARE + used, limit, used, is_cut))
        self.pending += limit

    def _finish(self) -> float | None:
        """The limit that cut the answer, None if it is whole."""
        self.now, limit, used, is_cut = heapq.heappop(self._in_flight)
        self.pending -= limit
        self.posted += used
        self._seen.append(used)
        self._since += 1
        percent = int(100 * self.posted / self.cap)
        while percent not in self.reached and percent >= 0:
            self.reached[percent] = self.now
            percent -= 1
        if not is_cut:
            return None
        self.wasted += used
        return limit


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rules = [
        Rule(0.98, takes_off_a_wave=False),
        Rule(0.98, takes_off_a_wave=True),
        Rule(0.95, takes_off_a_wave=False),
        Rule(0.95, takes_off_a_wave=True),
        Rule(0.90, takes_off_a_wave=True),
    ]
    print(f"{'mean, sigma, wave':24}" + "".join(f"{rule!s:>20}" for rule in rules))
    for mean in (500, 1_000, 2_000):
        waves = 22.7 * 1_000 / mean
        for sigma in (0.6, 0.8):
            cells = []
            for rule in rules:
                runs = [
                    Tail(rule, waves, sigma, LIMIT_TOKENS / mean, seed).run()
                    for seed in range(args.seeds)
                ]
                ratio = sum(run[0] for run in runs) / len(runs)
                wasted = sum(run[1] for run in runs) / len(runs)
                cells.append(f"{ratio:.2f}, {wasted:.1%}")
            head = f"{mean:,}, {sigma}, {1 / waves:.1%}"
            print(f"{head:24}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
