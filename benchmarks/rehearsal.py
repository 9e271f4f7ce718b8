"""The whole case in small: quantroute beside two plain scripts on the same prompts, cap and faults.

    .venv/bin/python benchmarks/rehearsal.py            about four minutes on two cores
    .venv/bin/python benchmarks/rehearsal.py --quick    half a minute

Kimi K2.5 behind eleven endpoints with the prices and labels of a recorded list (a list written
below where the recordings are missing), served by the simulator over HTTP on this machine. Six
datasets want more tokens than the cap affords; the proportions of the full case are kept: a wave
of all slots costs 4.4% of the cap, and the output limit is sixteen times the mean. On the way: 5%
of requests meet a 429, 1% a 503, 1% an error inside a 200, 0.5% an answer that breaks off; the
price of one endpoint rises, another is out for a while, a third changes its label. Speeds and each
endpoint's limit of requests at once are invented; pauses of all contenders are scaled like them.

The judge is the simulator's bill. An answer is *whole* if it was charged and delivered to its end.
A row is *accepted* if it is whole and its endpoint was labelled with the model's native format when
it answered. *Lost* is a whole answer that is not among a contender's rows, *twice* a prompt with
two whole answers. Exits with 1 if quantroute loses a row, buys one twice, exceeds the cap, spends
less than 99% of it (98% with --quick), differs from the bill, or takes a row below native format.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from _contenders import PlainScript
from _recorded import SERIES, readings

from quantroute import BudgetLedger, Client, EnvKey, ProviderRegistry, Service
from quantroute.client import RetryPolicy
from quantroute.generation import DatasetRun, DatasetSpec, RunSpec, builtin_prompts
from quantroute.money import cap_pusd
from quantroute.routing import BreakerSettings, LimitSettings
from quantroute.simulator import (
    AnswerSpec,
    Bill,
    EndpointSpec,
    Event,
    Faults,
    ModelSpec,
    ProviderSpec,
    Scenario,
    ThreadedSimulator,
    TrafficSpec,
)

MODEL = "moonshotai/kimi-k2.5"
NATIVE = "int4"
DATASETS = ("B3", "B4", "B5", "B6", "B7", "B8")
#: What 60M tokens cost at the least against the $100 there were: targets exceed the cap by a third.
WANTED_OVER_CAP = Fraction(132, 100)
WAVES = 23  # in the cap: a wave is 4.4% of it
BROKEN_SHAPES = frozenset({"truncated_stream"})
FAULTS = Faults(upstream_429=0.05, upstream_503=0.01, error_in_200=0.01, truncated_stream=0.005)
FIELDS = (
    "tag",
    "quantization",
    "context_length",
    "max_completion_tokens",
    "supported_parameters",
    "uptime_last_30m",
    "status",
)
#: Where nothing is recorded: the same kinds of endpoints at made-up prices, USD per million.
MADE_UP = (
    ("alder", "unknown", "0.38", "2.05"),
    ("birch/fp4", "fp4", "0.40", "1.90"),
    ("chutes/int4", "int4", "0.44", "2.00"),
    ("dogwood/fp4", "fp4", "0.45", "2.25"),
    ("siliconflow/int4", "int4", "0.45", "2.25"),
    ("atlas-cloud/int4", "int4", "0.49", "2.50"),
    ("elm/fp8", "fp8", "0.54", "2.70"),
    ("fir", "unknown", "0.56", "3.50"),
    ("gum", "unknown", "0.57", "2.85"),
    ("moonshotai/int4", "int4", "0.60", "3.00"),
    ("holly", "unknown", "0.60", "3.00"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the rehearsal is; money follows from it."""

    slots: int
    mean_tokens: int
    time_scale: float
    least_spent: float = 0.99
    output_usd_per_token: Decimal = Decimal("0.0000022")

    @property
    def cap_usd(self) -> Decimal:
        return (WAVES * self.slots * self.mean_tokens * self.output_usd_per_token).quantize(
            Decimal("0.01")
        )

    @property
    def rows(self) -> int:
        """About as many as the cap buys."""
        return WAVES * self.slots

    @property
    def target_tokens(self) -> int:
        """Wanted of each dataset."""
        return int(self.rows * self.mean_tokens * WANTED_OVER_CAP / len(DATASETS))

    @property
    def max_tokens(self) -> int:
        return 16 * self.mean_tokens


FULL = Size(slots=160, mean_tokens=1_000, time_scale=0.1)
#: Each of six datasets leaves less than one reservation, which is a part of 150 rows, not of 7,000.
QUICK = Size(slots=40, mean_tokens=300, time_scale=0.06, least_spent=0.98)


def endpoints() -> tuple[tuple[EndpointSpec, ...], tuple[ProviderSpec, ...], str]:
    """The endpoints of the first recorded list, their providers, and where they are from."""
    if not SERIES.is_file():
        made_up = tuple(
            EndpointSpec(
                tag=tag,
                quantization=label,
                pricing={"prompt": _per_token(prompt), "completion": _per_token(completion)},
            )
            for tag, label, prompt, completion in MADE_UP
        )
        return made_up, (), "a made-up list (no recordings beside the repository)"
    at, body = next(readings(MODEL))
    rows = body["data"]["endpoints"]
    found = tuple(
        EndpointSpec(pricing=row["pricing"], **{name: row[name] for name in FIELDS}) for row in rows
    )
    providers = tuple(
        ProviderSpec(slug=row["tag"].split("/")[0], name=row["provider_name"]) for row in rows
    )
    return found, providers, f"the list of {at:%Y-%m-%d %H:%M}"


def _per_token(usd_per_million: str) -> str:
    return format(Decimal(usd_per_million) / 1_000_000, "f")


def scenario(size: Size) -> tuple[Scenario, str]:
    """The service that every contender meets, and where its endpoints are from."""
    specs, providers, source = endpoints()

    def at(share: float, **change: Any) -> Event:
        return Event.model_validate({"after_requests": int(share * size.rows), "change": change})

    risen = {"tag": "siliconflow/int4", "pricing": {"completion": "0.00000245"}}
    relabelled = {"tag": "siliconflow/int4", "new_tag": "siliconflow/fp8", "quantization": "fp8"}
    return (
        Scenario(
            name="rehearsal",
            models=(
                ModelSpec(
                    id=MODEL, endpoints=specs, reasoning={"mandatory": False, "default_enabled": 1}
                ),
            ),
            providers=providers,
            answers=AnswerSpec(mean_tokens=size.mean_tokens, sigma=0.6, chunk_tokens=64),
            traffic=TrafficSpec(max_concurrent=int(0.45 * size.slots), tokens_per_s=55.0),
            faults=FAULTS,
            time_scale=size.time_scale,
            events=(
                at(0.2, endpoints=[risen]),
                at(0.4, endpoints=[{"tag": "chutes/int4", "is_out": True}]),
                at(0.5, endpoints=[{"tag": "chutes/int4", "is_out": False}]),
                at(0.65, endpoints=[relabelled]),
            ),
        ),
        source,
    )


def prompts(size: Size) -> list[tuple[str, str]]:
    """(dataset, text): half as many again as the targets need, the datasets in turn."""
    texts = [prompt.turns[0] for prompt in builtin_prompts()]
    count = int(1.5 * size.target_tokens / size.mean_tokens) + size.slots
    return [
        (dataset, f"{texts[number % len(texts)]} ({dataset}, variant {number // len(texts)})")
        for number in range(count)
        for dataset in DATASETS
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One contender, judged by the bill. Money in pico-dollars."""

    name: str
    cap_pusd: int
    bill_pusd: int
    ledger_pusd: int | None
    whole_rows: int
    accepted_rows: int
    accepted_tokens: int
    below_native: int
    unlabelled: int
    lost: int
    twice: int
    rowless_pusd: int
    least_share: float
    wall_s: float

    def problems(self, *, least_spent: float) -> list[str]:
        """What must not be, of a contender that promises."""
        found = {
            "rows lost": self.lost,
            "rows bought twice": self.twice,
            "pico-dollars over the cap": max(0, self.bill_pusd - self.cap_pusd),
            "rows below native precision": self.below_native + self.unlabelled,
            "pico-dollars between ledger and bill": abs((self.ledger_pusd or 0) - self.bill_pusd),
        }
        lines = [f"{count:,} {what}" for what, count in found.items() if count]
        if self.bill_pusd < least_spent * self.cap_pusd:
            lines.append(f"only {self.bill_pusd / self.cap_pusd:.2%} of the cap spent")
        return lines


def judge(
    name: str,
    kept: dict[str, str],
    bill: Bill,
    size: Size,
    *,
    wall_s: float,
    ledger_pusd: int | None = None,
) -> Outcome:
    """The outcome of a contender that kept these answers: generation id -> dataset."""
    whole = {
        key: record
        for key, record in bill.records.items()
        if record.spend_pusd > 0
        and record.finish_reason == "stop"
        and record.shape not in BROKEN_SHAPES
        and not record.is_cancelled
    }
    rows = {key: record for key, record in whole.items() if key in kept}
    accepted = [record for record in rows.values() if record.quantization == NATIVE]
    tokens = Counter[str]()
    for key, record in rows.items():
        tokens[kept[key]] += record.usage.output_tokens
    by_prompt = Counter(record.prompt_id for record in whole.values())
    return Outcome(
        name=name,
        cap_pusd=int(size.cap_usd * 10**12),
        bill_pusd=bill.total_pusd,
        ledger_pusd=ledger_pusd,
        whole_rows=len(rows),
        accepted_rows=len(accepted),
        accepted_tokens=sum(record.usage.output_tokens for record in accepted),
        below_native=sum(r.quantization not in (NATIVE, "unknown") for r in rows.values()),
        unlabelled=sum(record.quantization == "unknown" for record in rows.values()),
        lost=len(whole) - len(rows),
        twice=sum(count - 1 for count in by_prompt.values()),
        rowless_pusd=bill.total_pusd - sum(record.spend_pusd for record in rows.values()),
        least_share=min(tokens[dataset] for dataset in DATASETS) / size.target_tokens,
        wall_s=wall_s,
    )


async def plain(simulator: ThreadedSimulator, size: Size, provider: Any) -> PlainScript:
    """A plain script's run."""
    script = PlainScript(
        url=simulator.base_url,
        key=simulator.api_key,
        model=MODEL,
        cap_usd=float(size.cap_usd),
        slots=size.slots,
        max_tokens=size.max_tokens,
        target_tokens=size.target_tokens,
        first_pause_s=1.0 * size.time_scale,
        provider=provider,
    )
    await script.run(prompts(size))
    return script


def run_spec(size: Size, folder: Path) -> RunSpec:
    """The same job as a run of six datasets."""
    asked = prompts(size)
    specs = []
    for dataset in DATASETS:
        path = folder / f"{dataset}.jsonl"
        lines = (json.dumps({"prompt": text}) for name, text in asked if name == dataset)
        path.write_text("\n".join(lines))
        specs.append(
            DatasetSpec(
                name=dataset,
                prompts=path,
                max_output_tokens=size.max_tokens,
                target_output_tokens=size.target_tokens,
            )
        )
    cap = cap_pusd(str(size.cap_usd))
    assert isinstance(cap, int)
    return RunSpec(
        name="rehearsal",
        model=MODEL,
        cap_pusd=cap,
        datasets=tuple(specs),
        out=folder,
        max_in_flight=size.slots,
        source_class="simulated:",
    )


async def quantroute(
    simulator: ThreadedSimulator, size: Size, folder: Path
) -> tuple[dict[str, str], int]:
    """quantroute's run: as often as it takes, like its command; (kept answers, ledger's total)."""
    spec, service = run_spec(size, folder), Service(base_url=simulator.base_url)
    scale = size.time_scale
    async with (
        BudgetLedger.open(folder / "ledger.sqlite", cap=str(size.cap_usd)) as ledger,
        ProviderRegistry(service=service, ttl_s=300 * scale) as registry,
        Client(
            ledger=ledger,
            service=service,
            registry=registry,
            key=EnvKey("REHEARSAL_KEY"),
            max_in_flight=size.slots,
            limits=LimitSettings(pause_s=0.5 * scale, ramp_interval_s=0.25 * scale),
            breakers=BreakerSettings(pause_s=5.0 * scale, max_pause_s=120.0 * scale),
            retry=RetryPolicy(base_s=0.5 * scale, cap_s=60 * scale),
        ) as client,
    ):
        before_pusd = -spec.cap_pusd
        while ledger.balance().posted_pusd - before_pusd > spec.cap_pusd // 1_000:
            before_pusd = ledger.balance().posted_pusd
            job = await DatasetRun.prepare(client, spec)
            await job.execute()
            # Answers that broke off are looked up; what they did not cost can be spent again.
            await client.reconcile(quiet_s=0.0, patience_s=2.0)
        await ledger.verify()
        rows = await ledger.store.aread(
            lambda c: c.execute(
                "SELECT generation_id, dataset FROM generation_turns "
                "JOIN generation_rows USING (row_id)"
            ).fetchall()
        )
        return dict(rows), ledger.balance().posted_pusd


def compete(size: Size) -> list[Outcome]:
    """Each contender alone, with a fresh service of the same seed."""
    outcomes = []
    described, source = scenario(size)
    print(
        f"{MODEL}: {source}; ${size.cap_usd} cap, {size.slots} in flight, "
        f"{len(DATASETS)} datasets x {size.target_tokens:,} tokens wanted\n"
    )
    for name, provider in (("default balancing", None), ("cheapest first", {"sort": "price"})):
        with ThreadedSimulator(described, seed=3) as simulator:
            began_s = time.monotonic()
            script = asyncio.run(plain(simulator, size, provider))
            wall_s = time.monotonic() - began_s
            kept = {answer["id"]: dataset for dataset, answer in script.rows}
            outcomes.append(judge(name, kept, simulator.bill, size, wall_s=wall_s))
    with ThreadedSimulator(described, seed=3) as simulator, tempfile.TemporaryDirectory() as folder:
        os.environ["REHEARSAL_KEY"] = simulator.api_key
        began_s = time.monotonic()
        kept, ledger_pusd = asyncio.run(quantroute(simulator, size, Path(folder)))
        wall_s = time.monotonic() - began_s
        outcomes.append(
            judge(
                "quantroute",
                kept,
                simulator.bill,
                size,
                wall_s=wall_s,
                ledger_pusd=ledger_pusd,
            )
        )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """One column per contender."""

    def share(part: int, whole: int) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    def per_million(outcome: Outcome) -> str:
        if not outcome.accepted_tokens:
            return "-"
        return f"${outcome.bill_pusd / outcome.accepted_tokens / 10**6:.3f}"

    lines: list[tuple[str, list[str]]] = [
        ("", [o.name for o in outcomes]),
        ("whole rows", [f"{o.whole_rows:,}" for o in outcomes]),
        ("rows below native precision", [share(o.below_native, o.whole_rows) for o in outcomes]),
        ("rows without a label", [share(o.unlabelled, o.whole_rows) for o in outcomes]),
        ("accepted rows", [f"{o.accepted_rows:,}" for o in outcomes]),
        ("accepted output tokens", [f"{o.accepted_tokens:,}" for o in outcomes]),
        ("cost per million accepted", [per_million(o) for o in outcomes]),
        ("lost rows", [str(o.lost) for o in outcomes]),
        ("rows paid twice", [str(o.twice) for o in outcomes]),
        ("money in answers without a row", [share(o.rowless_pusd, o.bill_pusd) for o in outcomes]),
        (
            "money over the cap",
            [f"${max(0, o.bill_pusd - o.cap_pusd) / 10**12:.4f}" for o in outcomes],
        ),
        ("share of the cap used", [f"{o.bill_pusd / o.cap_pusd:.2%}" for o in outcomes]),
        ("least target reached (whole rows)", [f"{o.least_share:.1%}" for o in outcomes]),
        ("wall time", [f"{o.wall_s:.0f} s" for o in outcomes]),
    ]
    return "\n".join(f"{head:34}" + "".join(f"{cell:>20}" for cell in row) for head, row in lines)


def main() -> int:
    """Compete, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a self-check of half a minute")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    outcomes = compete(size)
    print(table(outcomes))
    ours = outcomes[-1]
    problems = ours.problems(least_spent=size.least_spent)
    best_s = min(outcome.wall_s for outcome in outcomes[:-1])
    print(f"\nquantroute took {ours.wall_s / best_s:.2f} times the faster script's time")
    for problem in problems:
        print(f"NOT AS PROMISED: {problem}", file=sys.stderr)
    if not problems:
        print("quantroute: none lost, none twice, nothing over the cap, the bill is the ledger")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
