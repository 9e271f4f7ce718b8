"""Generation on a Ray cluster: parts of one run as actors take them, one hard cap for all.

    pip install 'quantroute[ray,redis]'
    python examples/generate_on_ray.py --parts 16 --actors 4 --ledger redis://ledger-host:6379/0 \
        run.toml --out shared/runs/k2

What is not an option of this script goes to `quantroute generate`. An actor that dies is started
again and takes its part up where it stopped: rows that are in are not asked again, and what it had
in flight stays reserved in the ledger until `quantroute reconcile` knows its price. With more parts
than actors, a slow host does fewer of them. `--out` lies on storage that all hosts see under the
same path. The actors show their progress; the tables are printed once, of all parts together.
"""

from __future__ import annotations

import argparse
import contextlib
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
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return part, exit_code(words), os.getpid()


def exit_code(words: list[str]) -> int:
    try:
        quantroute(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Generation on a Ray cluster.")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--address", help='of a running cluster, such as "auto"; else one here')
    parser.add_argument("--out", required=True, help="of the run, on storage that all hosts see")
    parser.add_argument("--ledger", required=True, help="redis://HOST:PORT/DB, of all actors")
    options, arguments = parser.parse_known_args()
    arguments += ["--out", options.out, "--ledger", options.ledger]
    ray.init(address=options.address, include_dashboard=False)
    # Waiting on a network needs little of a core; what is lost with an actor is done again.
    remote: Any = ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=3)(Worker)
    pool = ActorPool([remote.remote() for _ in range(options.actors)])
    codes = set()
    for part, code, process in pool.map_unordered(
        lambda worker, part: worker.generate.remote(arguments, part, options.parts),
        range(options.parts),
    ):
        # In one piece: Ray prints its own words from a thread, between any two writes.
        sys.stdout.write(f"part {part} of {options.parts}: exit code {code}, process {process}\n")
        sys.stdout.flush()
        codes.add(code)
    return max(codes | {exit_code(["status", options.out, "--ledger", options.ledger])})


if __name__ == "__main__":
    sys.exit(main())
