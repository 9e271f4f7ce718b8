"""`run.toml`: a whole run in one file, read into frozen values.

Everything is checked before anything is read or sent. An error names file, line and field, and says
what would be allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quantroute._runfile import RunFile, Table
from quantroute.client import LocalEndpoint
from quantroute.domain import Sampling
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation._allocation import Allocation
from quantroute.generation._config import DatasetSettings, RunConfig, check_rollouts
from quantroute.generation._deadline import deadline_s
from quantroute.generation._prompts import (
    DatasetSource,
    Prompt,
    builtin_prompts,
    check_rereadable,
    dataset_name,
    read_prompts,
)
from quantroute.generation._run_name import run_name, run_stores
from quantroute.ledger import Account
from quantroute.money import Cap, PicoUSD, cap_pusd
from quantroute.policy import EvidenceTable, ExclusionPolicy
from quantroute.routing import RoutingMode

__all__ = ["DatasetSpec", "RunSpec", "load_run_spec", "policy_class"]

BUILTIN: Final = "builtin"
_DEFAULT_MAX_IN_FLIGHT: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One dataset of a run.

    Attributes: `prompts` a file, None for the embedded set. `target_output_tokens` or `target_rows`
    count accepted answers; with neither, every row is wanted. `cap_pusd` is the dataset's own
    (pico-dollars), None if only the run's holds. `expected_*` stand in for what no answer has shown
    yet: output tokens per answer, reasoning included, and the share of them that is reasoning.
    """

    name: str
    prompts: Path | None
    max_output_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    rollouts: int = 1
    target_output_tokens: int | None = None
    target_rows: int | None = None
    cap_pusd: PicoUSD | None = None
    weight: Fraction = Fraction(1)
    priority: int = 1
    expected_output_tokens: int | None = None
    expected_reasoning_share: float | None = None

    def __post_init__(self) -> None:
        if self.name != dataset_name(self.name):
            raise ConfigurationError(
                f"a dataset's name is made of letters, digits and . _ -, not {self.name!r}"
            )
        if self.target_output_tokens is not None and self.target_rows is not None:
            raise ConfigurationError("give target_output_tokens or target_rows, not both")
        check_rollouts(self.rollouts, self.sampling)
        expected = self.expected_output_tokens
        if expected is not None and expected > self.max_output_tokens:
            raise ConfigurationError(
                f"expected_output_tokens ({expected}) exceeds max_output_tokens "
                f"({self.max_output_tokens}): every answer would be cut"
            )

    def read(self, *, on_error: Callable[[DatasetError], None] | None = None) -> Iterator[Prompt]:
        """The prompts, lazily, under this dataset's name; see `read_prompts`.

        Raises:
            DatasetError: a line cannot be used (without `on_error`), or the file cannot be read.
        """
        if self.prompts is not None:
            check_rereadable(self.prompts)
            return read_prompts(self.prompts, dataset=self.name, on_error=on_error)
        return (replace(prompt, dataset=self.name) for prompt in builtin_prompts())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run as its file describes it. `cap_pusd` (pico-dollars) is hard and for all datasets.

    `source_class` names the service that answers if it is not the usual one, e.g. "simulated:"; it
    is part of what a row is, so that no rehearsal ends in a real run. `ledger` is the address of a
    shared ledger's server; without one the money is counted in the run's own file.
    """

    name: str
    model: str
    cap_pusd: PicoUSD
    datasets: tuple[DatasetSpec, ...]
    out: Path
    policy: ExclusionPolicy = field(default_factory=ExclusionPolicy)
    max_in_flight: int = _DEFAULT_MAX_IN_FLIGHT
    allocation: Allocation = Allocation.EQUAL
    elastic_limits: bool = True
    routing: RoutingMode = RoutingMode.PINNED
    local: tuple[LocalEndpoint, ...] = ()
    deadline_s: float | None = None
    replay_reasoning: bool = False
    source_class: str = ""
    ledger: str | None = None

    def __post_init__(self) -> None:
        names = [item.name for item in self.datasets]
        if not names:
            raise ConfigurationError("a run needs at least one dataset")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigurationError(f"two datasets are called {', '.join(twice)}")
        if self.deadline_s is not None and self.routing is RoutingMode.DELEGATED:
            raise ConfigurationError("a deadline needs pinned routing")
        # Whatever a run would refuse, it refuses here; the prompt files are not read yet.
        RunConfig(name=self.name, model=self.model, max_output_tokens=1)

    def rehearsal(self) -> RunSpec:
        """The same run in a folder and under a name of its own, for made-up rows."""
        out = self.out.with_name(f"{self.out.name}-simulated")
        # Without local servers: they are real.
        name = run_name(out)
        return replace(self, name=name, out=out, source_class="simulated:", local=(), ledger=None)

    def account_of(self, dataset: str) -> Account:
        """The ledger account that pays for a dataset."""
        return Account(f"{self.name}/{dataset}")

    def config(self) -> RunConfig:
        """The configuration of the run that these settings describe.

        Raises:
            ConfigurationError: a setting is impossible.
            DatasetError: a prompt file cannot be read.
        """
        first = self.datasets[0]
        return RunConfig(
            name=self.name,
            model=self.model,
            max_output_tokens=first.max_output_tokens,
            sampling=first.sampling,
            datasets=tuple(item.name for item in self.datasets),
            settings=tuple(
                DatasetSettings(
                    dataset=item.name,
                    max_output_tokens=item.max_output_tokens,
                    sampling=item.sampling,
                    rollouts=item.rollouts,
                )
                for item in self.datasets
            ),
            policy_class=self.source_class + policy_class(self.policy),
            replay_reasoning=self.replay_reasoning,
            sources=tuple(
                DatasetSource.of(item.prompts, name=item.name)
                for item in self.datasets
                if item.prompts is not None
            ),
        )


def policy_class(policy: ExclusionPolicy) -> str:
    """Which formats rows may come from: rows made under different answers to that never meet."""
    described = policy.as_dict()
    unknown = described["accept_unknown"]
    parts = [described["native"] or "native", *described["accept"]]
    if unknown is True:
        parts.append("unknown")
    elif unknown:
        parts.extend(f"unknown:{name}" for name in sorted(unknown))
    return "+".join(parts)


# -- the file's form ------------------------------------------------------------------------------

_Count = Annotated[int, Field(strict=True, ge=1)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1)]


class _RunTable(Table):
    model: StrictStr
    cap_usd: StrictStr
    name: StrictStr | None = None
    out: StrictStr | None = None
    max_in_flight: _Count = _DEFAULT_MAX_IN_FLIGHT
    allocation: Literal["equal", "weighted", "priority"] = "equal"
    elastic_limits: bool = True
    routing: Literal["pinned", "delegated"] = "pinned"
    deadline: StrictStr | None = None
    replay_reasoning: StrictBool = False
    deadline_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    ledger: StrictStr | None = None


class _PolicyTable(Table):
    native: StrictStr | None = None
    accept: tuple[StrictStr, ...] = ()
    accept_unknown: StrictBool | tuple[StrictStr, ...] = ()
    only: tuple[StrictStr, ...] = ()
    exclude: tuple[StrictStr, ...] = ()
    allow_degraded: StrictBool = True
    min_uptime_percent: _Number | None = None
    max_input_usd_per_million: StrictStr | None = None
    max_output_usd_per_million: StrictStr | None = None
    min_context_tokens: _Count | None = None
    min_output_tokens: _Count | None = None
    required_parameters: tuple[StrictStr, ...] = ()
    data_collection: Literal["allow", "deny"] | None = None
    zdr: StrictBool = False
    enforce_distillable_text: StrictBool = False
    requires_bounded_price: StrictBool = True
    evidence: StrictStr | None = None


class _SamplingTable(Table):
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: Annotated[int, Field(strict=True, ge=0)] | None = None
    min_p: _Number | None = None
    seed: StrictInt | None = None
    stop: tuple[StrictStr, ...] = ()
    frequency_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    repetition_penalty: _Number | None = None
    reasoning: StrictBool | None = None
    reasoning_effort: StrictStr | None = None


class _LocalTable(Table):
    name: StrictStr
    base_url: StrictStr
    quantization: StrictStr
    serves: StrictStr | None = None
    model: StrictStr | None = None
    input_usd_per_million: StrictStr = "0"
    output_usd_per_million: StrictStr = "0"
    usd_per_gpu_hour: StrictStr | None = None
    gpus: _Count = 1
    output_tokens_per_s: _Count | None = None
    max_in_flight: _Count = 64
    context_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    key_variable: StrictStr | None = None
    reasoning_switch: tuple[StrictStr, ...] = ("thinking", "enable_thinking")
    answers_as: StrictStr | None = None
    replay_as: StrictStr = "reasoning_content"


class _DatasetTable(Table):
    name: StrictStr
    max_output_tokens: _Count
    prompts: StrictStr
    sampling: _SamplingTable = _SamplingTable()
    rollouts: _Count = 1
    target_output_tokens: _Count | None = None
    target_rows: _Count | None = None
    cap_usd: StrictStr | None = None
    weight: Annotated[int, Field(strict=True, ge=1)] | StrictStr = 1
    priority: StrictInt = 1
    expected_output_tokens: _Count | None = None
    expected_reasoning_share: _Share | None = None


class _File(Table):
    run: _RunTable
    policy: _PolicyTable = _PolicyTable()
    sampling: _SamplingTable = _SamplingTable()
    local: tuple[_LocalTable, ...] = ()
    dataset: Annotated[list[_DatasetTable], Field(min_length=1)]


# -- reading --------------------------------------------------------------------------------------


def load_run_spec(path: Path | str) -> RunSpec:
    """The run that the file describes. Paths in it are relative to the file.

    Raises:
        ConfigurationError: not readable, not TOML, or a setting that cannot be meant.
    """
    source = RunFile.load(path)
    return _run_spec(source.parse(_File), source)


def _run_spec(file: _File, source: RunFile) -> RunSpec:
    folder = source.path.parent
    name, out = _name_and_out(file.run, source)
    try:
        policy = _policy(file.policy, folder)
    except ConfigurationError as error:
        raise source.error(("policy",), error) from error
    datasets = tuple(
        _dataset(table, file.sampling, source, number) for number, table in enumerate(file.dataset)
    )
    local = tuple(
        _local(table, file.run.model, source, number) for number, table in enumerate(file.local)
    )
    cap = _cap(file.run.cap_usd, ("run", "cap_usd"), source)
    seconds = _deadline(file.run, source)
    try:
        return RunSpec(
            name=name,
            model=file.run.model,
            cap_pusd=cap,
            datasets=datasets,
            out=out,
            policy=policy,
            max_in_flight=file.run.max_in_flight,
            allocation=Allocation(file.run.allocation),
            elastic_limits=file.run.elastic_limits,
            routing=RoutingMode(file.run.routing),
            local=local,
            deadline_s=seconds,
            replay_reasoning=file.run.replay_reasoning,
            ledger=file.run.ledger,
        )
    except ConfigurationError as error:
        raise source.error(("run",), error) from error


def _name_and_out(run: _RunTable, source: RunFile) -> tuple[str, Path]:
    """The run's name and folder; a new run is called as its folder."""
    out = source.run_folder
    name = run_name(out)
    if run.name in (None, name):
        return name, out
    if run_stores(out):
        problem = f"{out} holds the run {name!r}: call it so, or choose another folder as out"
        raise source.error(("run", "name"), problem)
    if run.out is None:
        return run.name, out  # no name that a run can have: refused with the rest
    problem = f"the folder is called as the run: end it in /{run.name}, or leave one of them out"
    raise source.error(("run", "out"), problem)


def _policy(table: _PolicyTable, folder: Path) -> ExclusionPolicy:
    settings = table.model_dump()
    evidence = settings.pop("evidence")
    settings["required_parameters"] = frozenset(settings["required_parameters"])
    known = EvidenceTable.builtin()
    if evidence is not None:
        known = known.merged(EvidenceTable.load(folder / evidence))
    return ExclusionPolicy(**settings, evidence=known)


def _dataset(
    table: _DatasetTable, defaults: _SamplingTable, source: RunFile, number: int
) -> DatasetSpec:
    here = ("dataset", number)
    own = table.sampling.model_dump(include=table.sampling.model_fields_set)
    merged = defaults.model_dump() | own
    merged["stop"] = tuple(merged["stop"])
    cap = None
    if table.cap_usd is not None:
        cap = _cap(table.cap_usd, (*here, "cap_usd"), source)
    weight = _weight(table.weight, (*here, "weight"), source)
    folder = source.path.parent
    try:
        return DatasetSpec(
            name=table.name,
            prompts=None if table.prompts == BUILTIN else folder / table.prompts,
            max_output_tokens=table.max_output_tokens,
            sampling=Sampling(**merged),
            rollouts=table.rollouts,
            target_output_tokens=table.target_output_tokens,
            target_rows=table.target_rows,
            cap_pusd=cap,
            weight=weight,
            priority=table.priority,
            expected_output_tokens=table.expected_output_tokens,
            expected_reasoning_share=table.expected_reasoning_share,
        )
    except ConfigurationError as error:
        raise source.error(here, error) from error


def _deadline(run: _RunTable, source: RunFile) -> float | None:
    if run.deadline is None:
        return run.deadline_s
    if run.deadline_s is not None:
        raise source.error(("run", "deadline_s"), "give deadline or deadline_s, not both")
    try:
        return deadline_s(run.deadline)
    except ConfigurationError as error:
        raise source.error(("run", "deadline"), error) from error


def _local(table: _LocalTable, model: str, source: RunFile, number: int) -> LocalEndpoint:
    settings = table.model_dump()
    settings["serves"] = table.serves or model
    try:
        return LocalEndpoint(**settings)
    except ConfigurationError as error:
        raise source.error(("local", number), error) from error


def _cap(text: str, location: tuple[str | int, ...], source: RunFile) -> PicoUSD:
    try:
        cap: Cap = cap_pusd(text)
    except ConfigurationError as error:
        raise source.error(location, error) from error
    assert isinstance(cap, int)  # text is never NO_CAP
    return cap


def _weight(given: int | str, location: tuple[str | int, ...], source: RunFile) -> Fraction:
    try:
        weight = Decimal(given)
    except InvalidOperation:
        weight = Decimal(0)
    if not weight.is_finite() or not 0 < weight <= 1_000_000:
        raise source.error(location, f"a weight is a positive number, 2 or '0.5', not {given!r}")
    return Fraction(weight)
