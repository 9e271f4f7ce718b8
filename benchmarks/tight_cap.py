"""How fast the last part of a cap is spent, and how much of it, with each kind of reserve.

    .venv/bin/python benchmarks/tight_cap.py [--slots 500] [--cap 25] [--mean 1000]
                                             [--fixed] [--statistical] [--seeds 3]
    .venv/bin/python benchmarks/tight_cap.py --grid [--seeds 3]   three sizes of a wave, ten minutes
    .venv/bin/python benchmarks/tight_cap.py --quick

Runs the real client, ledger and row store against the simulator over HTTP on this machine, with a
limit of 16,384 tokens and log-normal lengths. Prints the time from 50% to 99% of the cap as a
multiple of what the same money took at full concurrency (measured from 10% to 40% in the same
run), the share of the cap that was spent, and the share that went into answers cut by an elastic
limit and asked for again. See docs/design/0007-tight-cap.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.generation import Prompt, Run, RunConfig, StatisticalReserve
from quantroute.money import PicoUSD, to_usd
from quantroute.simulator import AnswerSpec, ThreadedSimulator, kimi_mission_scenario

MODEL = "moonshotai/kimi-k2.5"
LIMIT_TOKENS = 16_384
LONGEST_S = 900.0
USD_PER_TOKEN = 2.2e-6  # of output, at the cheapest endpoint
DEAREST_USD_PER_TOKEN = Decimal("0.0000033")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One setting of the experiment; `sigma` is the spread of the log-normal lengths."""

    slots: int
    cap_usd: float
    mean_tokens: float
    sigma: float
    time_scale: float

    @property
    def wave(self) -> float:
        """What all slots cost once, as a share of the cap."""
        return self.slots * self.mean_tokens * USD_PER_TOKEN / self.cap_usd


def prompts() -> Iterator[Prompt]:
    """More prompts than any cap here affords."""
    return (Prompt(id=str(n), dataset="d", turns=(f"question {n}",)) for n in range(10**6))


async def watch(ledger: BudgetLedger, cap_pusd: int, seen: dict[int, float]) -> None:
    """Note when each percent of the cap was reached."""
    while True:
        percent = 100 * ledger.balance().posted_pusd // cap_pusd
        for reached in range(percent + 1):
            seen.setdefault(reached, time.monotonic())
        await asyncio.sleep(0.02)


def statistical(size: Size, cap_pusd: int) -> StatisticalReserve:
    """The reserve whose target is the cap; the ledger's own cap lies above it."""
    worst_usd = Decimal(LIMIT_TOKENS) * DEAREST_USD_PER_TOKEN
    return StatisticalReserve(
        target_pusd=PicoUSD(cap_pusd), worst_pusd=PicoUSD(int(worst_usd * 10**12))
    )


async def measure(url: str, folder: Path, size: Size, *, how: str) -> float | None:
    """One run to its cap; the ratio that is looked for, None if 99% were never spent."""
    cap_pusd = int(size.cap_usd * 10**12)
    reserve = None if how != "statistical" else statistical(size, cap_pusd)
    hard_pusd = cap_pusd + (reserve.worst_overrun_pusd(size.slots) if reserve else 0)
    async with (
        BudgetLedger.open(folder / "l.sqlite", cap=to_usd(hard_pusd)) as ledger,
        Client(
            ledger=ledger,
            service=Service(base_url=url),
            key=EnvKey("BENCH_KEY"),
            max_in_flight=size.slots,
        ) as client,
    ):
        config = RunConfig(name="r", model=MODEL, max_output_tokens=LIMIT_TOKENS, datasets=("d",))
        run = Run(client, config, prompts(), elastic_limits=how == "elastic", reserve=reserve)
        seen: dict[int, float] = {}
        watcher = asyncio.create_task(watch(ledger, cap_pusd, seen))
        stopper = asyncio.get_running_loop().call_later(LONGEST_S, run.request_stop)
        report = await run.execute()
        await asyncio.sleep(0.1)
        stopper.cancel()
        watcher.cancel()
        cut_pusd = ledger.store.read(
            lambda c: c.execute(
                "SELECT coalesce(sum(cost_pusd), 0) FROM generation_turns "
                "WHERE row_class = 'truncated' AND max_output_tokens < ?",
                (LIMIT_TOKENS,),
            ).fetchone()[0]
        )
        spent = ledger.balance().posted_pusd / cap_pusd
    pace_s = (seen[40] - seen[10]) / 30  # per percent, every slot busy
    ratio = (seen[99] - seen[50]) / (49 * pace_s) if 99 in seen else None
    shown = "not reached" if ratio is None else f"{ratio:.2f}"
    print(
        f"{how:12} wave {size.wave:4.1%} of the cap   "
        f"50%->99%: {shown} x full speed   "
        f"spent {spent:.2%}   cut and redone {cut_pusd / cap_pusd:.2%}   "
        f"rows {report.finished:,}   {report.elapsed_s:.0f} s   {report.stop_reason.value}",
        flush=True,
    )
    return ratio


def run_once(size: Size, seed: int, *, how: str = "elastic") -> float | None:
    """One run against a fresh service in a thread of its own."""
    scenario = kimi_mission_scenario(
        time_scale=size.time_scale,
        answers=AnswerSpec(mean_tokens=size.mean_tokens, sigma=size.sigma),
    )
    with (
        ThreadedSimulator(scenario, seed=seed) as simulator,
        tempfile.TemporaryDirectory() as folder,
    ):
        os.environ["BENCH_KEY"] = simulator.api_key
        return asyncio.run(measure(simulator.base_url, Path(folder), size, how=how))


def grid(slots: int, sigma: float, seeds: int) -> None:
    """Three sizes of a wave, several seeds each."""
    for waves in (45, 23, 11):
        cap_usd = round(waves * slots * 1_000 * USD_PER_TOKEN, 2)
        size = Size(slots=slots, cap_usd=cap_usd, mean_tokens=1_000, sigma=sigma, time_scale=0.1)
        ratios = [run_once(size, seed) for seed in range(1, seeds + 1)]
        reached = [ratio for ratio in ratios if ratio is not None]
        mean = sum(reached) / len(reached) if reached else float("nan")
        print(
            f"         wave {size.wave:.1%}: mean {mean:.2f} of {len(reached)} runs\n", flush=True
        )


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--cap", type=float, default=25.0)
    parser.add_argument("--mean", type=float, default=1000.0)
    parser.add_argument("--sigma", type=float, default=0.6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--time-scale", type=float, default=0.1, help="of the simulated latencies")
    parser.add_argument("--fixed", action="store_true", help="also measure fixed limits (minutes)")
    parser.add_argument("--statistical", action="store_true", help="also the statistical reserve")
    parser.add_argument("--grid", action="store_true", help="three sizes of a wave (minutes)")
    parser.add_argument("--quick", action="store_true", help="a self-check of a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.slots, args.cap, args.mean = 50, 0.5, 200.0
    size = Size(
        slots=args.slots,
        cap_usd=args.cap,
        mean_tokens=args.mean,
        sigma=args.sigma,
        time_scale=0.02 if args.quick else args.time_scale,
    )
    print(f"{args.slots} slots, mean {args.mean:.0f} tokens, sigma {args.sigma}")
    if args.grid:
        grid(args.slots, args.sigma, args.seeds)
        return
    for seed in range(1, args.seeds + 1):
        run_once(size, seed)
        if args.statistical or args.quick:
            run_once(size, seed, how="statistical")
        if args.fixed or args.quick:
            run_once(size, seed, how="fixed")


if __name__ == "__main__":
    main()
