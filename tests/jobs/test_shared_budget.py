"""Several workers under one cap, with a worker and the ledger's server killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from redis_support import RedisServer

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/shared_budget.py"


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(280)
@pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks are not part of this copy")
def test_workers_share_a_cap_through_kills(redis: RedisServer) -> None:
    """The benchmark's own smaller figures; `redis` skips this where no server is installed."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, timeout=270
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    found = json.loads(ended.stdout)
    assert found["over_cap_pusd"] == 0
    assert found["used_share"] >= 0.99
    assert found["posted_pusd"] == found["simulator_bill_pusd"]
    assert found["still_held"] == 0
    assert found["exit_codes"] == [3]
