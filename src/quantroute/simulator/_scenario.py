"""What a simulated service offers and how it misbehaves: one validated, immutable description.

Read from a TOML file, or taken whole from a recorded catalogue. Money is text in the file
("0.00000057"), so that no price ever passes through a float.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from quantroute.errors import ConfigurationError
from quantroute.simulator._faults import Faults
from quantroute.simulator._recorded import RecordedCatalogue, read_recorded

__all__ = [
    "AccountSpec",
    "AnswerSpec",
    "Change",
    "EndpointChange",
    "EndpointSpec",
    "Event",
    "ModelSpec",
    "ProviderSpec",
    "Scenario",
    "TrafficSpec",
    "kimi_mission_scenario",
    "load_scenario",
]


def _no_float(value: object) -> object:
    if isinstance(value, float):
        raise ValueError("write money in quotes, as a decimal string: a float is not exact")
    return value


Money = Annotated[Decimal, BeforeValidator(_no_float), Field(allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
PositiveInt = Annotated[int, Field(gt=0)]

DEFAULT_PARAMETERS: Final = (
    "reasoning",
    "include_reasoning",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ProviderSpec(_Strict):
    """A company: `slug` in requests and tags, `name` in answers."""

    slug: str
    name: str
    headquarters: str | None = None
    datacenters: tuple[str, ...] | None = None


class EndpointSpec(_Strict):
    """One provider serving one model.

    Units: prices in USD per token as decimal strings; limits in tokens; uptimes in percent.
    `status` is derived from `uptime_last_30m` (95 % and 80 % are the borders) unless given.
    `default_output_tokens` is what the provider allows when a request names no `max_tokens`.
    """

    tag: str
    pricing: dict[str, str | list[dict[str, Any]] | int | float]
    quantization: str = "unknown"
    context_length: PositiveInt = 131_072
    max_completion_tokens: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    default_output_tokens: PositiveInt | None = None
    supported_parameters: tuple[str, ...] = DEFAULT_PARAMETERS
    uptime_last_5m: Percent | None = None
    uptime_last_30m: Percent | None = None
    uptime_last_1d: Percent | None = None
    status: int | None = None
    supports_implicit_caching: bool = False
    collects_data: bool = False
    is_zdr: bool = False

    @model_validator(mode="after")
    def _prices_are_text(self) -> Self:
        for key, price in self.pricing.items():
            if key not in ("discount", "overrides") and not isinstance(price, str):
                raise ValueError(f"pricing.{key}: write the price in quotes, USD per token")
        return self

    @property
    def slug(self) -> str:
        """The provider's slug: the tag's first segment."""
        return self.tag.split("/", 1)[0]


class ModelSpec(_Strict):
    """A model and the endpoints that serve it, in listing order."""

    id: str
    endpoints: tuple[EndpointSpec, ...] = ()
    canonical_slug: str | None = None
    name: str | None = None
    description: str = ""
    created: int = 1_769_487_076
    hugging_face_id: str | None = None
    reasoning: dict[str, Any] | None = None


class TrafficSpec(_Strict):
    """How fast a provider answers and how much it takes; real seconds, scaled by `time_scale`.

    `first_token_s` is the median of a log-normal distribution with spread `first_token_sigma`.
    Past `max_concurrent` or `requests_per_s` the provider answers 429. `can_cancel` says whether
    closing a streamed connection stops the work and the bill.
    """

    first_token_s: NonNegative = 0.8
    first_token_sigma: NonNegative = 0.4
    tokens_per_s: Annotated[float, Field(gt=0.0)] = 60.0
    max_concurrent: PositiveInt | None = None
    requests_per_s: Annotated[float, Field(gt=0.0)] | None = None
    can_cancel: bool | None = None


class AnswerSpec(_Strict):
    """The synthetic answers: log-normal lengths, in tokens, and how often a cache is hit."""

    mean_tokens: Annotated[float, Field(gt=0.0)] = 120.0
    sigma: NonNegative = 0.6
    longest_tokens: PositiveInt = 200_000
    reasoning_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    chunk_tokens: PositiveInt = 16
    cache_read_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    cache_write_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    cache_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.75


class AccountSpec(_Strict):
    """Money behind the key. None means without limit.

    `reserve_in_flight`: whether requests still running lower what a new one can afford.
    """

    credits_usd: Money | None = None
    key_limit_usd: Money | None = None
    include_byok_in_limit: bool = False
    reserve_in_flight: bool = False
    byok_fee: Annotated[Decimal, BeforeValidator(_no_float), Field(ge=0)] = Decimal(0)


class EndpointChange(_Strict):
    """What becomes of one listed endpoint; only what is set changes.

    `is_out` makes every attempt at it fail; a new `uptime_last_30m` also gives a new status.
    """

    tag: str
    model: str | None = None
    ordinal: int = 0
    new_tag: str | None = None
    quantization: str | None = None
    pricing: dict[str, str] | None = None
    context_length: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    supported_parameters: tuple[str, ...] | None = None
    uptime_last_30m: Percent | None = None
    status: int | None = None
    is_out: bool | None = None
    removed: bool = False


class EndpointAddition(_Strict):
    """An endpoint that joins a model's list."""

    model: str
    endpoint: EndpointSpec


class Change(_Strict):
    """Something that changes while the service runs: the body of `POST /__sim/set`."""

    credits_usd: Money | None = None
    key_limit_usd: Money | None = None
    add_credits_usd: Money | None = None
    reserve_in_flight: bool | None = None
    faults: Faults | None = None
    provider_faults: dict[str, Faults] = Field(default_factory=dict)
    traffic: TrafficSpec | None = None
    provider_traffic: dict[str, TrafficSpec] = Field(default_factory=dict)
    answers: AnswerSpec | None = None
    time_scale: NonNegative | None = None
    generation_delay_s: NonNegative | None = None
    generation_misses: Annotated[int, Field(ge=0)] | None = None
    endpoints: tuple[EndpointChange, ...] = ()
    add: tuple[EndpointAddition, ...] = ()


class Event(_Strict):
    """A change that happens by itself: after `at_s` seconds, or after so many chat requests."""

    change: Change
    at_s: NonNegative | None = None
    after_requests: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_one_trigger(self) -> Self:
        if (self.at_s is None) == (self.after_requests is None):
            raise ValueError("give exactly one of at_s and after_requests")
        return self


class Scenario(_Strict):
    """Everything a simulated service needs to know.

    `time_scale` multiplies every latency: 0 answers at once, 1 is real time. After an answer,
    `/generation` says 404 for `generation_delay_s` seconds and `generation_misses` look-ups.
    `catalogue` names a recorded catalogue (relative to the scenario file), served whole beside
    `models`.
    """

    name: str = "simulated"
    description: str = ""
    models: tuple[ModelSpec, ...] = ()
    providers: tuple[ProviderSpec, ...] = ()
    catalogue: Path | None = None
    account: AccountSpec = AccountSpec()
    answers: AnswerSpec = AnswerSpec()
    traffic: TrafficSpec = TrafficSpec()
    provider_traffic: dict[str, TrafficSpec] = Field(default_factory=dict)
    faults: Faults = Faults()
    provider_faults: dict[str, Faults] = Field(default_factory=dict)
    platform_requests_per_s: Annotated[float, Field(gt=0.0)] | None = None
    time_scale: NonNegative = 0.0
    generation_delay_s: NonNegative = 0.0
    generation_misses: Annotated[int, Field(ge=0)] = 0
    events: tuple[Event, ...] = ()
    captured_at: datetime | None = None

    _recorded: RecordedCatalogue | None = PrivateAttr(default=None)

    @property
    def recorded(self) -> RecordedCatalogue | None:
        """The recorded catalogue, if the scenario names one."""
        if self._recorded is None and self.catalogue is not None:
            self._recorded = read_recorded(self.catalogue)
        return self._recorded

    @classmethod
    def from_catalogue(cls, file: str | Path, **settings: Any) -> Scenario:
        """A scenario that serves a recorded catalogue whole; `settings` are further fields.

        Args:
            file: `{captured_at, models, providers, endpoints}` as .json or .json.gz.
        Raises:
            ConfigurationError: the file is missing or not such a catalogue.
        """
        settings.setdefault("name", Path(file).name.split(".")[0])
        scenario = cls(catalogue=Path(file), **settings)
        scenario._recorded = read_recorded(Path(file))
        return scenario

    def merged(self, **settings: Any) -> Scenario:
        """A copy with some fields replaced, validated like the original."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate(fields | settings)


def load_scenario(file: str | Path) -> Scenario:
    """The scenario in a TOML file.

    Raises:
        ConfigurationError: the file is missing, is not TOML (with the line), or a field is
            unknown or wrong (with its path).
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"scenario {path}: cannot be read: {error}") from error
    scenario = _parse(text, name=str(path))
    if scenario.catalogue is not None and not scenario.catalogue.is_absolute():
        scenario = scenario.merged(catalogue=path.parent / scenario.catalogue)
    if scenario.catalogue is not None:
        scenario._recorded = read_recorded(scenario.catalogue)
    return scenario


def kimi_mission_scenario(**settings: Any) -> Scenario:
    """The shipped case: Kimi K2.5 behind eleven providers; `settings` replace fields."""
    scenario = Scenario.model_validate(_shipped_fields())
    return scenario.merged(**settings) if settings else scenario


@functools.cache
def _shipped_fields() -> dict[str, Any]:
    file = resources.files("quantroute.simulator") / "scenarios" / "kimi-k2.5.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _parse(text: str, *, name: str) -> Scenario:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"scenario {name}: not TOML: {error}") from error
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        problems = "\n".join(f"  {problem}" for problem in problems_of(error, text))
        raise ConfigurationError(f"scenario {name}:\n{problems}") from error


def parse_change(fields: bytes | Mapping[str, Any]) -> Change:
    """The change that JSON text or plain fields describe.

    Raises:
        ConfigurationError: a field is unknown or wrong.
    """
    try:
        if isinstance(fields, bytes):
            return Change.model_validate_json(fields)
        return Change.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"change: {'; '.join(problems_of(error))}") from error


def problems_of(error: ValidationError, text: str = "") -> list[str]:
    """One line per invalid field: where it stands, its dotted path, what is wrong."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(str(step) for step in problem["loc"])
        number = _line_of(text, problem["loc"])
        where = f"line {number}: " if number else ""
        lines.append(f"{where}{path or 'the whole'}: {problem['msg']}")
    return lines


def _line_of(text: str, location: tuple[int | str, ...]) -> int | None:
    """The first line that assigns or opens the last named step of `location`; None if unsure.

    tomllib keeps no positions, so this only answers when the name occurs once in the file.
    """
    names = [step for step in location if isinstance(step, str)]
    if not names:
        return None
    name = names[-1]
    found = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.split("=", 1)[0].strip().strip('"') == name
        or (line.lstrip().startswith("[") and line.strip().strip("[]").split(".")[-1] == name)
    ]
    return found[0] if len(found) == 1 else None
