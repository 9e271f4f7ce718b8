"""Against a real vLLM for CPUs, with the hidden-states connector; skipped where there is none.

Its stock connector pins memory, which needs an accelerator: on CPUs alone the server dies at the
first request unless its connector is replaced by one that does not. Run with `-m vllm`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantroute.extraction import (
    LayerIds,
    Target,
    TransformersSource,
    VllmSource,
    probe,
    probe_examples,
)
from quantroute.extraction._vllm import vllm_flags
from states_support import examples, tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or shutil.which("vllm") is None,
        reason="vLLM is not installed",
    ),
]

LAYERS = LayerIds((2, 4, 5))


@contextlib.contextmanager
def vllm(target: Path, folder: Path) -> Iterator[str]:
    """A server's URL, once it answers on /health."""
    import shlex

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = shlex.split(vllm_flags(Target.read(target), LAYERS, str(folder)))
    command = ["vllm", "serve", str(target), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "256", "--enforce-eager", "--skip-tokenizer-init", *flags]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (
        (folder.parent / "vllm.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings) as server,
    ):
        try:
            _wait_until_up(server, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "vllm ended while starting; see vllm.log"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    raise AssertionError("vllm did not come up in 300 s")


async def test_a_real_server_agrees_with_transformers(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", hidden=128)
    (tmp_path / "states").mkdir()
    with vllm(target, tmp_path / "states") as url:
        source = VllmSource(target, LAYERS, server=url, dtype="bfloat16")
        reference = TransformersSource(target, LAYERS, dtype="bfloat16")
        report = await probe(source, probe_examples(examples(8)), reference=reference)
        await source.close()
    assert min(report.cosine) > 0.999
