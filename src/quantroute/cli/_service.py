"""Which service a command talks to: the real one, another URL, or the embedded simulator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from quantroute._http import OPENROUTER_URL, Service
from quantroute.client import ensure_descriptors
from quantroute.domain import Endpoint
from quantroute.errors import ConfigurationError
from quantroute.secrets import EnvKey

if TYPE_CHECKING:
    from quantroute.simulator import Scenario, Simulator

__all__ = ["Target", "opened_target", "read_scenario", "source_class"]

_SIMULATOR_KEY: Final = "QUANTROUTE_SIMULATOR_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A service, the key for it, and the simulator behind it, if it is embedded."""

    service: Service
    key: EnvKey
    simulator: Simulator | None = None

    def check_key(self, endpoints: Iterable[Endpoint]) -> None:
        """Refuse to begin without the service's key; servers of one's own do not need it.

        Args:
            endpoints: all that may be asked.

        Raises:
            KeyRejected: one of them is the service's, and there is no key.
        """
        if not all(endpoint.is_local for endpoint in endpoints):
            self.key.read()

    def check_descriptors(self, requests: int) -> None:
        """Refuse at once what would run out of sockets; an embedded simulator has the other ends.

        Raises:
            ConfigurationError: the system gives this process too few.
        """
        ensure_descriptors(requests, sockets_each=1 if self.simulator is None else 2)


@contextlib.asynccontextmanager
async def opened_target(
    *,
    base_url: str,
    ca_file: Path | None,
    simulate: bool,
    catalogue: Path | None = None,
    scenario: Path | None = None,
    seed: int = 0,
) -> AsyncIterator[Target]:
    """The target for the length of a command.

    Raises:
        ConfigurationError: a scenario, but nobody to play it.
    """
    if not simulate:
        if scenario is not None:
            raise ConfigurationError("--scenario is for --simulate; give both, or neither")
        yield Target(service=Service(base_url=base_url, ca_file=ca_file), key=EnvKey())
        return
    from quantroute.simulator import Simulator

    async with Simulator(read_scenario(catalogue, scenario), seed=seed) as simulator:
        os.environ[_SIMULATOR_KEY] = simulator.api_key
        yield Target(
            service=Service(base_url=simulator.base_url),
            key=EnvKey(_SIMULATOR_KEY),
            simulator=simulator,
        )


def source_class(base_url: str, *, is_simulated: bool) -> str:
    """Which service answers, if it is not OpenRouter: a rehearsal never ends in a real run."""
    if is_simulated:
        return "simulated:"
    host = urlsplit(base_url).hostname or ""
    return "" if host == urlsplit(OPENROUTER_URL).hostname else f"{host}:"


def read_scenario(catalogue: Path | None, scenario: Path | None) -> Scenario:
    """The scenario from a file, a recorded catalogue, or the one that ships with the package."""
    from quantroute.simulator import Scenario, kimi_mission_scenario, load_scenario

    if scenario is not None:
        return load_scenario(scenario)
    if catalogue is not None:
        return Scenario.from_catalogue(catalogue)
    return kimi_mission_scenario()
