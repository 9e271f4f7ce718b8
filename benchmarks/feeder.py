"""A million prompts through the feeder: memory on the way, and how long it takes to find all done.

    python benchmarks/feeder.py                    # about ten minutes, 1.3 GB of disk
    python benchmarks/feeder.py --rows 20000       # a self-check, some seconds

The client is a stand-in without a network: it answers at once. Everything else is real: prompts are
read from a file, every request is reserved and posted in the ledger, every row is stored with its
charge in one transaction. Then three processes resume the finished run: one that may pass over the
file since all its rows are done (`source`), one that reads every prompt again, and the command,
`quantroute generate`, from its first import to its exit; its endpoints are a simulator's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quantroute import BudgetLedger
from quantroute.client import (
    Answer,
    Answered,
    AnswerSink,
    Attendance,
    ChatRequest,
    Completion,
    Provenance,
)
from quantroute.domain import Endpoint, EndpointKey, Quantization, Sampling
from quantroute.errors import QuantrouteError
from quantroute.generation import (
    DatasetSource,
    Progress,
    Prompt,
    Run,
    RunConfig,
    dataset_name,
    policy_class,
    read_prompts,
)
from quantroute.ledger import Account, Basis, Charge
from quantroute.policy import ExclusionPolicy, Precision
from quantroute.pricing import Pricing, Quote, TokenUsage
from quantroute.routing import Mix

MODEL = "moonshotai/kimi-k2.5"
ENDPOINT = Endpoint(
    model=MODEL,
    tag="alpha/int4",
    provider_name="Alpha",
    quantization=Quantization.INT4,
    quantization_label="int4",
    pricing=Pricing.flat(input_usd_per_token="0.0000006", output_usd_per_token="0.0000025"),
)
QUOTE = ENDPOINT.pricing.quote()
USAGE = TokenUsage(input_tokens=20, output_tokens=20)
ANSWER = Answer(
    content="A short answer.",
    reasoning=None,
    finish_reason="stop",
    native_finish_reason="stop",
    usage=USAGE,
    cost_pusd=1_000_000,
    provenance=Provenance(
        endpoint=ENDPOINT,
        precision=Precision(
            quantization=Quantization.INT4, source="label", native=Quantization.INT4
        ),
        generation_id="gen-1",
        served_provider="Alpha",
        served_model=MODEL,
        listed_at_s=0.0,
    ),
)
CHARGE = Charge(amount_pusd=1_000_000, basis=Basis.REPORTED, usage=USAGE, generation_id="gen-1")


class InstantClient:
    """Answers at once; its money and its rows are real."""

    def __init__(self, ledger: BudgetLedger, max_in_flight: int) -> None:
        self.ledger, self.max_in_flight = ledger, max_in_flight
        self.live = 0

    async def complete(self, request: ChatRequest, *, sink: AnswerSink | None = None) -> Completion:
        """Reserve, answer, settle."""
        self.live += 1
        entry_id = await self.ledger.reserve(2_000_000, account=request.account)
        work = sink(ANSWER, entry_id) if sink else None
        self.live -= 1
        await self.ledger.post(entry_id, CHARGE, also=work)
        return Answered(answer=ANSWER, entry_id=entry_id, attempts=1)

    async def slot(self) -> None:
        """Wait for a request to end, if as many are under way as may be."""
        while self.live >= self.max_in_flight:  # noqa: ASYNC110 - many make room, nobody tells
            await asyncio.sleep(0.001)

    def stop_admitting(self, reason: QuantrouteError) -> None:
        """Nothing here stops a run."""
        raise reason

    def admit_again(self) -> None:
        """Nothing to take back."""

    def judged(self, endpoint: EndpointKey, *, accepted: bool, account: Account) -> None:
        """There is one endpoint; nothing to choose."""

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Attendance]:
        """Nothing is unknown here, so nothing is to be settled."""
        yield Attendance()

    async def pace(
        self, model: str, sampling: Sampling, *, needed_per_s: float | None, answer_s: float
    ) -> Mix | None:
        """There is no deadline."""
        return None

    async def quote(self, model: str, sampling: Sampling) -> Quote | None:
        """The one endpoint's ceilings."""
        return QUOTE


def write_prompts(path: Path, rows: int) -> None:
    """One small prompt per line."""
    with path.open("w") as file:
        for number in range(rows):
            text = f"Question {number}: what is {number} times {number % 97}, and why?"
            file.write(json.dumps({"id": number, "prompt": text}) + "\n")


def rss_mb() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def config_of(folder: Path) -> RunConfig:
    """The settings that the command has for that folder and these prompts in a rehearsal."""
    source = DatasetSource.of(folder / "prompts.jsonl")
    return RunConfig(
        name=dataset_name(folder.name),
        model=MODEL,
        max_output_tokens=64,
        datasets=(source.name,),
        policy_class=f"simulated:{policy_class(ExclusionPolicy())}",
        sources=(source,),
    )


async def start(folder: Path, *, has_source: bool, marks: tuple[int, ...]) -> dict[str, Any]:
    """One start of the run; RSS when so many rows have ended, and what it took."""
    path = folder / "prompts.jsonl"
    seen: dict[int, float] = {}

    def watch(progress: Progress) -> None:
        if progress.finished in marks:
            seen.setdefault(progress.finished, rss_mb())

    began_s, cpu_s = time.perf_counter(), time.process_time()
    async with BudgetLedger.open(folder / "run.sqlite", cap="1000000") as ledger:
        config = config_of(folder)
        prompts: Iterator[Prompt] = read_prompts(path)
        (file,) = config.sources
        source = f"{file.name}:{file.sha256}" if has_source else None
        run = Run(InstantClient(ledger, 2_000), config, prompts, source=source)
        report = await run.execute(watch)
    return {
        "finished": report.finished,
        "resumed": report.resumed,
        "strays": report.strays,
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "rss_mb": seen,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_process(folder: Path, *options: str) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, __file__, "--worker", str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def command(folder: Path) -> dict[str, Any]:
    """One start of the command in a rehearsal: what it reports, and its seconds."""
    words = ["generate", str(folder / "prompts.jsonl"), "--simulate", "--json"]
    words += ["--out", str(folder), "--model", MODEL, "--max-output-tokens", "64"]
    began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "quantroute", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report: dict[str, Any] = json.loads(done.stdout)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report | {"wall_s": time.perf_counter() - began_s, "cpu_s": cpu_s}


def main() -> None:
    """Generate, then resume twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="for files; a local disk")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--marks", type=int, nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        figures = start(options.worker, has_source=not options.read, marks=tuple(options.marks))
        print(json.dumps(asyncio.run(figures)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", options.rows)
        marks = [str(options.rows // 10), str(options.rows)]
        first = in_process(folder, "--marks", *marks)
        size_mb = (folder / "run.sqlite").stat().st_size / 2**20
        print(f"{options.rows} rows, {size_mb:.0f} MB, {first['wall_s']:.0f} s")
        print(f"{1e3 * first['cpu_s'] / options.rows:.3f} ms of CPU a row")
        for mark, mb in first["rss_mb"].items():
            print(f"RSS after {mark} rows: {mb:.0f} MB")
        print(f"peak RSS: {first['peak_mb']:.0f} MB")
        for label, option in (("known source", []), ("every prompt read", ["--read"])):
            again = in_process(folder, *option)
            if (again["finished"], again["resumed"], again["strays"]) != (0, options.rows, 0):
                raise SystemExit(f"not all found done: {again}")
            print(
                f"resume, {label}: {again['wall_s']:.2f} s ({again['cpu_s']:.2f} s of CPU), "
                f"peak RSS {again['peak_mb']:.0f} MB"
            )
        again = command(folder)
        if (again["finished"], again["resumed"]) != (0, options.rows):
            raise SystemExit(f"the command did not find all done: {again}")
        print(f"resume, the command: {again['wall_s']:.2f} s ({again['cpu_s']:.2f} s of CPU)")


if __name__ == "__main__":
    main()
