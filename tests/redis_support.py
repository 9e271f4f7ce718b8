"""A real redis-server for tests: started by the test, on loopback, ended by its own pid."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class RedisServer:
    """One server process with its folder; it may be killed and started again on the same data."""

    folder: Path
    port: int
    settings: tuple[str, ...] = ("--appendonly", "yes", "--appendfsync", "always")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--dir", str(self.folder), *self.settings],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline_s = time.monotonic() + 20
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1) as c,
        ):
            c.sendall(b"PING\r\n")
            return c.recv(64).startswith(b"+PONG")
        return False

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default as a power cut would."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    """A running server, or a skip that says why."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    pytest.importorskip("redis", reason="the redis client is not installed (quantroute[redis])")
    server = RedisServer(folder, free_port(), *((settings,) if settings else ()))
    server.start()
    try:
        yield server
    finally:
        server.stop()
