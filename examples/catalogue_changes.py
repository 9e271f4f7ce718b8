"""Two readings of an endpoint list, kept as snapshots: what changed, and who may serve now."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from quantroute import ExclusionPolicy, ProviderRegistry, Service
from quantroute.registry import EndpointList, compare
from quantroute.simulator import EndpointChange, Simulator

MODEL = "moonshotai/kimi-k2.5"
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/snapshots")
#: What a provider may do overnight: serve another format, ask another price, leave.
OVERNIGHT = (
    EndpointChange(tag="inceptron/int4", quantization="fp8"),
    EndpointChange(
        tag="siliconflow/int4", pricing={"prompt": "0.000001", "completion": "0.000004"}
    ),
    EndpointChange(tag="novita", removed=True),
)


async def reading(simulator: Simulator, path: Path) -> EndpointList:
    """Read the list anew, keep it, and return what the file says: later runs need no network."""
    async with ProviderRegistry(service=Service(base_url=simulator.base_url)) as registry:
        await registry.snapshot(path, models=[MODEL])
    return await ProviderRegistry.from_snapshot(path).endpoints(MODEL)


async def main() -> None:
    async with Simulator() as simulator:
        monday = await reading(simulator, FOLDER / "monday.json")
        simulator.change(endpoints=OVERNIGHT)
        tuesday = await reading(simulator, FOLDER / "tuesday.json")
    for change in compare(monday, tuesday):
        print(change)
    for name, listing in (("monday", monday), ("tuesday", tuesday)):
        bound = ExclusionPolicy().bind(listing.endpoints, at=datetime.now(UTC))
        print(f"{name}: {len(bound.eligible)} of {len(bound.verdicts)} may serve")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    asyncio.run(main())
