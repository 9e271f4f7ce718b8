"""Generation on a Ray cluster: parts of one run as actors take them, one hard cap for all.

    pip install 'quantroute[ray,redis]'
    python examples/generate_on_ray.py --parts 16 --actors 4 --ledger redis://ledger-host:6379/0 \
        run.toml --out shared/runs/k2

What is not an option of this script goes to `quantroute generate`. An actor that dies is started
again and takes its part up where it stopped: rows that are in are not asked again, and what it had
in flight stays reserved in the ledger until `quantroute reconcile` knows its price. With more parts
than actors, a slow host does fewer of them. `--out` lies on storage that all hosts see under the
same path.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray
from ray.util import ActorPool

from quantroute.cli import main as quantroute


class Worker:
    """One process that generates part after part."""

    def generate(self, arguments: list[str], part: int, parts: int) -> tuple[int, int, int]:
        """The part, the command's exit code, and who did it."""
        words = ["generate", *arguments, "--shard", f"{part}/{parts}"]
        try:
            quantroute(words)
        except SystemExit as end:
            return part, int(end.code or 0), os.getpid()
        return part, 0, os.getpid()


def main() -> int:
    parser = argparse.ArgumentParser(description="Generation on a Ray cluster.")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--address", help='of a running cluster, such as "auto"; else one here')
    options, arguments = parser.parse_known_args()
    ray.init(address=options.address, include_dashboard=False)
    # Waiting on a network needs little of a core; what is lost with an actor is done again.
    remote: Any = ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=3)(Worker)
    pool = ActorPool([remote.remote() for _ in range(options.actors)])
    codes = set()
    for part, code, process in pool.map_unordered(
        lambda worker, part: worker.generate.remote(arguments, part, options.parts),
        range(options.parts),
    ):
        print(f"part {part} of {options.parts}: exit code {code}, process {process}", flush=True)
        codes.add(code)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
