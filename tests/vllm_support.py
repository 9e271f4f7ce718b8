"""A real vLLM for CPUs, started by a test in an environment of its own (see `.ci/vllm-env`)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantroute.extraction import LayerIds, Target
from quantroute.extraction._vllm import vllm_flags
from states_support import VOCAB

LAYERS = LayerIds((2, 4, 5))
_START_S = 420.0
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}assistant"
)


def interpreter() -> Path:
    """The Python of the environment that holds vLLM; skips where there is none."""
    named = os.environ.get("QUANTROUTE_VLLM_PYTHON")
    if not named:
        pytest.skip("QUANTROUTE_VLLM_PYTHON names no Python with vLLM for CPUs; see .ci/vllm-env")
    return Path(named).absolute()


def add_tokenizer(target: Path) -> None:
    """A word a token, and a chat template: enough for a server to answer chats."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]
    words = special + [f"w{number}" for number in range(VOCAB - len(special))]
    ids = {word: number for number, word in enumerate(words)}
    words_alone = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words_alone.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_alone, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def vllm(target: Path, folder: Path, *, cpu_connector: bool = True) -> Iterator[str]:
    """A server's URL, once it answers on /health; states go to `folder`, its log beside."""
    python = interpreter()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = shlex.split(vllm_flags(Target.read(target), LAYERS, str(folder)))
    if cpu_connector:
        flags = _with_cpu_connector(flags)
    command = [str(python.parent / "vllm"), "serve", str(target), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16"]
    command += ["--max-model-len", "256", "--enforce-eager", *flags]
    log_path = folder.with_name("vllm.log")
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=_settings()) as server,
    ):
        try:
            _wait_until_up(server, f"http://127.0.0.1:{port}", log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _with_cpu_connector(flags: list[str]) -> list[str]:
    place = flags.index("--kv-transfer-config") + 1
    config: dict[str, Any] = json.loads(flags[place])
    config["kv_connector"] = "CpuHiddenStatesConnector"
    config["kv_connector_module_path"] = "vllm_cpu_connector"
    return [*flags[:place], json.dumps(config), *flags[place + 1 :]]


def _settings() -> dict[str, str]:
    # With the variable for no bytecode, every start would compile everything again.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": str(Path(__file__).parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "2",
    }


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise AssertionError(f"vllm ended while starting:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    raise AssertionError(f"vllm did not come up in {_START_S:g} s:\n{log.read_text()[-3000:]}")
