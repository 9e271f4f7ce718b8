"""An OpenRouter-compatible service over real HTTP, for rehearsals, demos, tests and load.

It speaks the service's paths and bodies, enforces provider preferences, bills to the last digit,
runs out of credits, and shows every odd shape that recorded traffic has shown, by scenario and
seed. It stands outside the client: what they share are the words of the domain, not code paths.
"""

from quantroute.simulator._backend import (
    AnswerRequest,
    Backend,
    EchoBackend,
    SimulatedAnswer,
    SyntheticBackend,
    count_prompt_tokens,
    count_tokens,
    prompt_id,
)
from quantroute.simulator._bill import Bill, GenerationRecord, Stats
from quantroute.simulator._faults import Faults
from quantroute.simulator._scenario import (
    AccountSpec,
    AnswerSpec,
    Change,
    EndpointChange,
    EndpointSpec,
    Event,
    ModelSpec,
    ProviderSpec,
    Scenario,
    TrafficSpec,
    kimi_mission_scenario,
    load_scenario,
)
from quantroute.simulator._service import (
    DEFAULT_API_KEY,
    Simulator,
    ThreadedSimulator,
    serve,
)

__all__ = [
    # running it
    "DEFAULT_API_KEY",
    "Simulator",
    "ThreadedSimulator",
    "serve",
    # what it offers and how it misbehaves
    "AccountSpec",
    "AnswerSpec",
    "Change",
    "EndpointChange",
    "EndpointSpec",
    "Event",
    "Faults",
    "ModelSpec",
    "ProviderSpec",
    "Scenario",
    "TrafficSpec",
    "kimi_mission_scenario",
    "load_scenario",
    # its books
    "Bill",
    "GenerationRecord",
    "Stats",
    # who answers
    "AnswerRequest",
    "Backend",
    "EchoBackend",
    "SimulatedAnswer",
    "SyntheticBackend",
    "count_prompt_tokens",
    "count_tokens",
    "prompt_id",
]
