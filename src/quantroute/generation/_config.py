"""What a run is: everything that determines its rows, as one value with one hash."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from quantroute.domain import RowKey, Sampling, canonical_json, row_key
from quantroute.errors import ConfigurationError
from quantroute.generation._prompts import DatasetSource, Prompt, dataset_name
from quantroute.generation._quality import RowClass

__all__ = [
    "DatasetSettings",
    "Mode",
    "RunConfig",
    "check_rollouts",
    "config_difference",
    "describe_difference",
    "is_extension",
    "is_other_limit",
    "new_run_name",
]

#: Locks and ledgers on a server are called after their run; a file's name may have 255 bytes.
_LONGEST_NAME_BYTES: Final = 100
_GROWING: Final = ("rollouts", "datasets", "settings")
_OVERRIDDEN: Final = frozenset({"max_output_tokens", "sampling", "rollouts"})
#: After these there is nothing (or nothing valid) that could stand in a conversation's history.
_DEAD_ENDS: Final = frozenset(
    {
        RowClass.WRONG_PROVIDER,
        RowClass.ERROR,
        RowClass.REFUSED,
        RowClass.EMPTY,
        RowClass.REASONING_ONLY,
    }
)


def new_run_name(text: str) -> str:
    """`text`, such as a folder's name, made fit to be a run's."""
    whole = dataset_name(text).lstrip("._-")
    return whole.encode()[:_LONGEST_NAME_BYTES].decode(errors="ignore") or "run"


class Mode(enum.Enum):
    """How the model was asked to think; a row of one mode must not be rendered as another."""

    THINKING = "thinking"
    INSTANT = "instant"
    DEFAULT = "default"  # nothing was said: the model's own default

    @classmethod
    def of(cls, sampling: Sampling) -> Mode:
        """The mode that these parameters ask for."""
        if sampling.reasoning is False or sampling.reasoning_effort == "none":
            return cls.INSTANT
        if sampling.reasoning or sampling.reasoning_effort is not None:
            return cls.THINKING
        return cls.DEFAULT


def check_rollouts(rollouts: int, sampling: Sampling) -> None:
    """Refuse to pay for one answer several times.

    Raises:
        ConfigurationError: several rollouts would be asked for with one seed.
    """
    if rollouts > 1 and sampling.seed is not None:
        raise ConfigurationError(
            f"{rollouts} rollouts with one seed ask for the same answer each time: leave seed out, "
            "or set rollouts to 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """How one dataset is asked, where that differs from the run's own settings."""

    dataset: str
    max_output_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    rollouts: int = 1

    def identity(self) -> dict[str, Any]:
        """What determines the rows of the dataset, as plain JSON values."""
        return {
            "max_output_tokens": self.max_output_tokens,
            "sampling": self.sampling.parameters(),
            "rollouts": self.rollouts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of one run. Budget, concurrency and prompts' order are not among them.

    Args:
        name: names the run in its store, and its account in the ledger.
        model: as the service lists it.
        max_output_tokens: per answer, reasoning included. There is no default: a hidden limit cuts
            long answers and leaves thinking models without any.
        rollouts: answers per prompt, each a row of its own.
        datasets: names of the datasets, each an account below the run's.
        settings: datasets that are asked in a way of their own; see `of`.
        policy_class: in a word, the exclusion policy; rows of different policies never meet.
        replay_reasoning: send the model's earlier reasoning along with its earlier answers. Off, as
            chat templates drop the reasoning of past turns; Moonshot's own endpoint refuses later
            turns of a Kimi that thinks without it.
        continue_after: a conversation goes on after answers of these classes; after any other it
            ends, since its later turns would be paid for and then not exported.
        is_streamed: how answers travel; not part of what a row is.
    """

    name: str
    model: str
    max_output_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    rollouts: int = 1
    datasets: tuple[str, ...] = ()
    settings: tuple[DatasetSettings, ...] = ()
    policy_class: str = ""
    replay_reasoning: bool = False
    continue_after: frozenset[RowClass] = frozenset({RowClass.GOOD})
    is_streamed: bool = False
    sources: tuple[DatasetSource, ...] = ()

    def __post_init__(self) -> None:
        if self.name != (possible := new_run_name(self.name)):
            raise ConfigurationError(
                "a run's name is made of letters, digits and . _ -, begins with a letter or digit "
                f"and has at most {_LONGEST_NAME_BYTES} bytes: {possible!r}, not {self.name!r}"
            )
        if not self.model:
            raise ConfigurationError("a run needs a model")
        if self.max_output_tokens < 1:
            raise ConfigurationError(
                f"max_output_tokens must be at least 1, not {self.max_output_tokens}"
            )
        if self.rollouts < 1:
            raise ConfigurationError(f"rollouts must be at least 1, not {self.rollouts}")
        check_rollouts(self.rollouts, self.sampling)
        if dead_ends := self.continue_after & _DEAD_ENDS:
            names = ", ".join(sorted(item.value for item in dead_ends))
            raise ConfigurationError(f"a conversation cannot continue after {names}")
        for name in self.datasets:
            if name != dataset_name(name):
                raise ConfigurationError(f"{name!r} cannot name a dataset")
        for item in self.settings:
            self.of(item.dataset)  # raises if its settings are impossible

    @property
    def mode(self) -> Mode:
        """How the model is asked to think."""
        return Mode.of(self.sampling)

    def of(self, dataset: str) -> RunConfig:
        """The configuration as it is for the rows of one dataset."""
        own = next((item for item in self.settings if item.dataset == dataset), None)
        if own is None:
            return self
        return replace(
            self,
            max_output_tokens=own.max_output_tokens,
            sampling=own.sampling,
            rollouts=own.rollouts,
            settings=(),
        )

    def identity(self) -> dict[str, Any]:
        """What makes this run this run, as plain JSON values."""
        return {
            "model": self.model,
            "max_output_tokens": self.max_output_tokens,
            "sampling": self.sampling.parameters(),
            "rollouts": self.rollouts,
            "datasets": sorted(self.datasets),
            "settings": {item.dataset: item.identity() for item in self.settings},
            "policy_class": self.policy_class,
            "replay_reasoning": self.replay_reasoning,
            "continue_after": sorted(item.value for item in self.continue_after),
        }

    def config_hash(self) -> str:
        """Hex SHA-256 of the identity: equal for equal settings, whatever the run is called."""
        return hashlib.sha256(canonical_json(self.identity()).encode()).hexdigest()

    def to_json(self) -> str:
        """The record kept in the store: name, identity, sources."""
        record = {
            "name": self.name,
            **self.identity(),
            "sources": [
                {"name": item.name, "location": item.location, "sha256": item.sha256}
                for item in self.sources
            ],
        }
        return canonical_json(record)

    def row_key(self, prompt: Prompt, rollout: int) -> RowKey:
        """The key of one row of this run."""
        # Replayed reasoning changes what later turns are asked, so it is part of the salt.
        salt = self.policy_class + ("+replay_reasoning" if self.replay_reasoning else "")
        return row_key(
            model=self.model,
            messages=prompt.messages(),
            sampling=self.sampling,
            rollout=rollout,
            salt=salt,
        )


def config_difference(
    stored: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, as name -> (stored, wanted).

    Where every dataset has settings of its own, the run's decide nothing: in a run file they are
    those of whichever dataset stands first.
    """
    unused = _OVERRIDDEN if all(map(_is_all_overridden, (stored, wanted))) else ()
    return {
        name: (stored.get(name), wanted.get(name))
        for name in wanted
        if stored.get(name) != wanted.get(name) and name not in unused
    }


def _is_all_overridden(identity: Mapping[str, Any]) -> bool:
    datasets = set(identity.get("datasets") or ())
    return bool(datasets) and datasets <= (identity.get("settings") or {}).keys()


def is_extension(difference: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether the change can only add rows: more rollouts, more datasets, nothing else."""
    for name, (stored, wanted) in difference.items():
        if name not in _GROWING:
            return False
        match name:
            case "rollouts":
                is_larger = wanted >= stored
            case "settings":
                is_larger = _settings_grow(stored or {}, wanted)
            case _:
                is_larger = set(stored or ()) <= set(wanted)
        if not is_larger:
            return False
    return True


def _settings_grow(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(
        name in wanted
        and wanted[name]["rollouts"] >= own["rollouts"]
        and wanted[name] | {"rollouts": 0} == own | {"rollouts": 0}
        for name, own in stored.items()
    )


def is_other_limit(difference: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether nothing but output limits changed: what redoing truncated rows needs."""
    if not set(difference) <= {"max_output_tokens", "settings"}:
        return False
    stored, wanted = difference.get("settings", ({}, {}))
    return (stored or {}).keys() == wanted.keys() and all(
        wanted[name] | {"max_output_tokens": 0} == own | {"max_output_tokens": 0}
        for name, own in (stored or {}).items()
    )


def describe_difference(difference: Mapping[str, tuple[Any, Any]]) -> str:
    """One clause per changed setting, for people; where datasets have their own, each by itself."""
    own = _dataset_clauses(*difference.get("settings", ({}, {})))
    clauses = [
        _clause(name, stored, wanted)
        for name, (stored, wanted) in difference.items()
        if name != "settings" and not any(clause.startswith(f"{name} of ") for clause in own)
    ]
    return "; ".join(clauses + own)


def _dataset_clauses(
    stored: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None
) -> list[str]:
    stored, wanted = stored or {}, wanted or {}
    clauses = [f"dataset {name} is gone" for name in stored if name not in wanted]
    for name in stored.keys() & wanted.keys():
        clauses += [
            _clause(f"{key} of {name}", value, wanted[name].get(key))
            for key, value in stored[name].items()
            if value != wanted[name].get(key)
        ]
    return sorted(clauses)


def _clause(name: str, stored: Any, wanted: Any) -> str:
    return f"{name} was {json.dumps(stored)} and is {json.dumps(wanted)}"
