"""Recorded endpoint lists, if their folder lies beside the repository; see CONTRIBUTING.md."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "../shared/data/openrouter"
SERIES = FOLDER / "kimi-endpoints-2026-07-04-to-08-22.jsonl.gz"

Body = dict[str, Any]


def readings(model: str, path: Path = SERIES) -> Iterator[tuple[datetime, Body]]:
    """Each reading of the model's endpoint list, oldest first: when, and the body as answered.

    Raises:
        FileNotFoundError: the recordings are not there.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            reading = json.loads(line)
            body = reading["endpoints"].get(model)
            if body is not None:
                yield datetime.fromisoformat(reading["captured_at"]), body
