"""How fast the last part of a cap is spent, and how much of it: elastic limits against fixed ones.

    .venv/bin/python benchmarks/tight_cap.py [--slots 500] [--cap 25] [--mean 1000] [--fixed]
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
from pathlib import Path

from quantroute import BudgetLedger, Client, EnvKey, Service
from quantroute.generation import Prompt, Run, RunConfig
from quantroute.simulator import AnswerSpec, ThreadedSimulator, kimi_mission_scenario

MODEL = "moonshotai/kimi-k2.5"
LIMIT_TOKENS = 16_384
LONGEST_S = 400.0


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


async def measure(url: str, folder: Path, args: argparse.Namespace, *, elastic: bool) -> None:
    """One run to its cap."""
    cap_pusd = int(args.cap * 10**12)
    path = folder / f"{elastic}.sqlite"
    async with (
        BudgetLedger.open(path, cap=str(args.cap)) as ledger,
        Client(
            ledger=ledger,
            service=Service(base_url=url),
            key=EnvKey("BENCH_KEY"),
            max_in_flight=args.slots,
        ) as client,
    ):
        config = RunConfig(name="r", model=MODEL, max_output_tokens=LIMIT_TOKENS, datasets=("d",))
        run = Run(client, config, prompts(), elastic_limits=elastic)
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
        f"{'elastic' if elastic else 'fixed  '}  50%->99%: {shown} x full speed   "
        f"spent {spent:.2%}   cut and redone {cut_pusd / cap_pusd:.2%}   "
        f"rows {report.finished:,}   {report.elapsed_s:.0f} s   {report.stop_reason.value}"
    )


def main() -> None:
    """Parse, start the simulator in a thread of its own, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--cap", type=float, default=25.0)
    parser.add_argument("--mean", type=float, default=1000.0)
    parser.add_argument("--sigma", type=float, default=0.6)
    parser.add_argument("--fixed", action="store_true", help="also measure fixed limits (minutes)")
    parser.add_argument("--quick", action="store_true", help="a self-check of a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.slots, args.cap, args.mean = 50, 0.5, 200.0
    scenario = kimi_mission_scenario(
        time_scale=0.02 if args.quick else 0.1,
        answers=AnswerSpec(mean_tokens=args.mean, sigma=args.sigma),
    )
    print(f"{args.slots} slots, ${args.cap} cap, mean {args.mean:.0f} tokens, sigma {args.sigma}")
    with ThreadedSimulator(scenario, seed=1) as simulator, tempfile.TemporaryDirectory() as folder:
        os.environ["BENCH_KEY"] = simulator.api_key
        for elastic in (True, False) if args.fixed or args.quick else (True,):
            asyncio.run(measure(simulator.base_url, Path(folder), args, elastic=elastic))


if __name__ == "__main__":
    main()
