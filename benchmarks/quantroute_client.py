"""quantroute in the peers' table: its normal settings, ledger, policy and durable rows on.

For a harness whose `_common` module offers `args`, `prompt`, `Meter`, `report` and `pct`, and whose
server echoes `row-<n>` at the start of each answer:

    PYTHONPATH=<harness>/clients python benchmarks/quantroute_client.py --base URL --n N \
        --inflight C --out DIR [--opt uvloop] [--opt cap=30] [--opt keep]

`--opt keep` runs again on the same output and so measures resume.

The harness's server lists Alpha, Beta and Gamma but signs every answer "MockProvider", which
quantroute rightly quarantines; so the listing is read with that name put in. All checks stay on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from _common import MODEL, Meter, args, prompt, report  # type: ignore[import-not-found]

from quantroute import BudgetLedger, Client, ProviderRegistry, Service
from quantroute.client import RetryPolicy
from quantroute.generation import Prompt, Run, RunConfig

A = args()
FOLDER = Path(A.out) / "quantroute"


def prompts() -> Any:
    """The harness's prompts, lazily."""
    return (Prompt(id=str(n), dataset="bench", turns=(prompt(n),)) for n in range(A.n))


async def listing() -> ProviderRegistry:
    """The server's own endpoint list, with the name it really answers under."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{A.base}/models/{MODEL}/endpoints") as response,
    ):
        body = await response.json(content_type=None)
    for endpoint in body["data"]["endpoints"]:
        endpoint["provider_name"] = "MockProvider"
    snapshot = {
        "captured_at": "2026-11-30T00:00:00+00:00",
        "models": {"data": []},
        "providers": {"data": []},
        "endpoints": {MODEL: body},
    }
    path = FOLDER / "listing.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(snapshot))
    return ProviderRegistry.from_snapshot(path)


async def main() -> None:
    """Run, then count rows by reading the store again."""
    if "keep" not in A.opt:
        shutil.rmtree(FOLDER, ignore_errors=True)
    os.environ.setdefault("OPENROUTER_API_KEY", "sk-mock")
    config = RunConfig(name="bench", model=MODEL, max_output_tokens=4096, datasets=("bench",))
    registry = await listing()
    async with (
        BudgetLedger.open(FOLDER / "run.sqlite", cap=A.opt.get("cap", "1000")) as ledger,
        Client(
            ledger=ledger,
            service=Service(base_url=A.base),
            registry=registry,
            max_in_flight=A.inflight,
            retry=RetryPolicy(max_attempts=A.retries + 1),
        ) as client,
    ):
        await client.verdicts(MODEL)
        meter = Meter()
        result = await Run(client, config, prompts()).execute()
        meter.stop()
        spent_usd = ledger.balance().posted_pusd / 1e12
        held = ledger.balance().held_entries
    connection = sqlite3.connect(FOLDER / "run.sqlite")
    texts = connection.execute(
        "SELECT r.prompt_id, t.content FROM generation_rows r JOIN generation_turns t "
        "USING (row_id) WHERE t.content IS NOT NULL"
    ).fetchall()
    latencies = [s for (s,) in connection.execute("SELECT total_s FROM generation_turns")]
    connection.close()
    good = Counter(number for number, text in texts if text.startswith(f"row-{number} "))
    report(
        A,
        meter,
        result.finished,
        result.gave_up + result.refused,
        latencies,
        rows_ok=len(good),
        extra={
            "dup_rows": sum(good.values()) - len(good),
            "bad_kept": len(texts) - sum(good.values()),
            "ledger_spent": round(spent_usd, 6),
            "held": held,
            "stop": result.stop_reason.value,
        },
    )


if __name__ == "__main__":
    if "uvloop" in A.opt:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
