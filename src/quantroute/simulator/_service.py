"""Starting and stopping a simulated service: in a loop, in a thread, or until cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from quantroute.clock import Clock, SystemClock
from quantroute.errors import ConfigurationError
from quantroute.simulator._backend import Backend
from quantroute.simulator._bill import Bill, Stats
from quantroute.simulator._scenario import Scenario, kimi_mission_scenario, parse_change
from quantroute.simulator._server import API, Front, make_server
from quantroute.simulator._state import ServiceState

__all__ = ["DEFAULT_API_KEY", "Simulator", "ThreadedSimulator", "serve"]

DEFAULT_API_KEY: Final = "sk-or-v1-simulated-0000000000000000"
DEFAULT_MANAGEMENT_KEY: Final = "sk-or-v1-simulated-management-000000"
_MAX_BODY_BYTES: Final = 64 << 20
_BACKLOG: Final = 4096
_SHUTDOWN_S: Final = 0.1
_START_S: Final = 30.0


class Simulator:
    """An OpenRouter-compatible service on a loopback port, for one event loop.

    Args:
        scenario: what it offers; the shipped Kimi K2.5 case if None.
        seed: determines every random choice, whatever the order of concurrent requests.
        host: address to bind; keep it a loopback address, there is no TLS.
        port: 0 picks a free one.
        clock: where time comes from.
        backend: who writes the answers; made-up prose if None.
        api_key: the only inference key it accepts.
        management_key: the key that may read /credits.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        *,
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
        backend: Backend | None = None,
        api_key: str = DEFAULT_API_KEY,
        management_key: str = DEFAULT_MANAGEMENT_KEY,
    ) -> None:
        self.scenario = scenario or kimi_mission_scenario()
        self.host = host
        self.port = port
        self.state = ServiceState(
            self.scenario,
            seed=seed,
            clock=clock or SystemClock(),
            backend=backend,
            api_key=api_key,
            management_key=management_key,
        )
        self._runner: web.ServerRunner | None = None
        self._is_closed = False

    @property
    def api_key(self) -> str:
        """The inference key it accepts."""
        return self.state.api_key

    @property
    def management_key(self) -> str:
        """The key that may read /credits."""
        return self.state.management_key

    @property
    def root_url(self) -> str:
        """Scheme, host and port; `/__sim/...` hangs here."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """What a client is given, up to and including `/api/v1`."""
        return self.root_url + API

    @property
    def bill(self) -> Bill:
        """Every generation billed so far."""
        return self.state.bill

    @property
    def stats(self) -> Stats:
        """Counters over chat requests."""
        return self.state.stats

    def change(self, **fields: Any) -> None:
        """Turn knobs while it runs; the fields are those of `Change`.

        Raises:
            ConfigurationError: a field is unknown or wrong, an endpoint or model is not listed.
        """
        self.state.apply(parse_change(fields))

    async def start(self) -> None:
        """Bind the port.

        Raises:
            ConfigurationError: started before, or the address cannot be bound.
        """
        if self._runner is not None or self._is_closed:
            raise ConfigurationError("a simulator starts once; make a new one")
        server = make_server(Front(self.state), max_body_bytes=_MAX_BODY_BYTES)
        runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, self.host, self.port, backlog=_BACKLOG).start()
        except OSError as error:
            await self.close()
            raise ConfigurationError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}"
            ) from error
        self.port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and drop what is still in flight; harmless when called twice."""
        runner, self._runner = self._runner, None
        self._is_closed = True
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class ThreadedSimulator:
    """The same service in a thread with its own event loop, for code that has none.

    `bill` and `stats` may be read from outside at any time; they are exact once no request is
    in flight. `change` runs on the service's loop and returns when it is done.
    """

    def __init__(self, scenario: Scenario | None = None, **settings: Any) -> None:
        self._simulator = Simulator(scenario, **settings)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None

    @property
    def api_key(self) -> str:
        """The inference key it accepts."""
        return self._simulator.api_key

    @property
    def management_key(self) -> str:
        """The key that may read /credits."""
        return self._simulator.management_key

    @property
    def root_url(self) -> str:
        """Scheme, host and port."""
        return self._simulator.root_url

    @property
    def base_url(self) -> str:
        """What a client is given, up to and including `/api/v1`."""
        return self._simulator.base_url

    @property
    def bill(self) -> Bill:
        """Every generation billed so far."""
        return self._simulator.bill

    @property
    def stats(self) -> Stats:
        """Counters over chat requests."""
        return self._simulator.stats

    def change(self, **fields: Any) -> None:
        """See `Simulator.change`; applied between two requests."""
        change = parse_change(fields)

        async def apply() -> None:
            self._simulator.state.apply(change)

        if self._loop is None:
            self._simulator.state.apply(change)
        else:
            asyncio.run_coroutine_threadsafe(apply(), self._loop).result()

    def start(self) -> None:
        """Start the thread and wait until the port is bound.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        self._thread = threading.Thread(target=self._run, name="quantroute-simulator", daemon=True)
        self._thread.start()
        if not self._is_ready.wait(_START_S):
            raise ConfigurationError(f"the simulator did not start within {_START_S:g} s")
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def close(self) -> None:
        """Stop the service and wait for its thread; harmless when called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()
        self._loop = None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except ConfigurationError as error:
            self._failure = error
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with self._simulator:
            self._loop = asyncio.get_running_loop()
            self._is_ready.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def serve(
    scenario: Scenario | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    seed: int = 0,
    on_ready: Callable[[str], None] | None = None,
    clock: Clock | None = None,
    backend: Backend | None = None,
    api_key: str = DEFAULT_API_KEY,
) -> None:
    """Run a service until the calling task is cancelled.

    Args:
        on_ready: called once with the base URL when the port is bound.
    Raises:
        ConfigurationError: the address cannot be bound.
    """
    async with Simulator(
        scenario,
        seed=seed,
        host=host,
        port=port,
        clock=clock,
        backend=backend,
        api_key=api_key,
    ) as simulator:
        if on_ready is not None:
            on_ready(simulator.base_url)
        await asyncio.Event().wait()
