"""The key appears in no artefact of a run in which the server echoes it everywhere."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow.parquet

from cli_support import quantroute
from quantroute.simulator import Faults, ThreadedSimulator, kimi_mission_scenario

KEY = "sk-or-v1-5ecret0000bytes1111that2222must3333not4444show"


def forms_of(key: str) -> list[bytes]:
    """The key as it is, and its base64 text at each of the three alignments."""
    found = [key.encode()]
    for shift in range(3):
        encoded = base64.b64encode(b"x" * shift + key.encode() + b"xx")
        found.append(encoded[4:-4])
    return found


def test_no_artefact_holds_the_key(tmp_path: Path) -> None:
    scenario = kimi_mission_scenario(
        faults=Faults(key_echo=0.5, key_echo_in_errors=1.0, upstream_500=0.2, upstream_400=0.05)
    )
    out = tmp_path / "run"
    with ThreadedSimulator(scenario, seed=5, api_key=KEY) as simulator:
        env = {"OPENROUTER_API_KEY": KEY, "QUANTROUTE_BASE_URL": simulator.base_url}
        streams = ""
        for arguments in (
            ["generate", "--cap", "5", "--out", str(out)],
            ["generate", "--cap", "5", "--out", str(out), "--json"],
            ["status", str(out)],
            ["export", str(out), str(tmp_path / "rows.jsonl"), "--partial"],
            ["export", str(out), str(tmp_path / "rows.parquet"), "--class", "good"],
            ["endpoints", "moonshotai/kimi-k2.5", "--save-snapshot", str(tmp_path / "s.json")],
            ["reconcile", str(out)],
        ):
            ended = quantroute("-v", *arguments, env=env)
            streams += ended.out + ended.err
    assert "Traceback" not in streams
    assert "[redacted]" in streams  # errors that echoed the key were shown, without it
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".sqlite", ".jsonl", ".parquet", ".json"}
    stored = b"".join(path.read_bytes() for path in files)
    stored += repr(pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()).encode()
    assert b"[redacted]" in stored  # answers that echoed it were kept, without it
    for form in forms_of(KEY):
        assert form not in streams.encode()
        assert form not in stored
