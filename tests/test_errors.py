"""Errors carry facts, say what to do, and survive pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from quantroute import errors
from quantroute.errors import QuantrouteError

SAMPLES: dict[str, Any] = {
    "message": "m",
    "problem": "p",
    "name": "Fireworks",
    "rule": "exclude",
    "suggestions": ("fireworks",),
    "model": "m/x",
    "entry": "3",
    "reasons": ("a: down",),
    "account": "run",
    "requested_pusd": 5,
    "cap_pusd": 10,
    "posted_pusd": 3,
    "pending_pusd": 4,
    "entry_id": "e",
    "state": "posted",
    "transition": "void",
    "path": "f",
    "advice": "a",
    "line": 3,
    "request_id": "r",
    "endpoint": "a/int4",
    "attempt": 2,
    "maybe_billed": True,
    "status": 429,
    "retry_after_s": 1.5,
    "refusal": "x",
    "rows": 25,
    "source": "target",
    "stage": "train",
}
CLASSES = [
    cls
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, QuantrouteError)
]


def build(cls: type[QuantrouteError]) -> QuantrouteError:
    parameters = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return cls(**{name: SAMPLES[name] for name in parameters})


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickle_and_copy_with_its_facts(cls: type[QuantrouteError]) -> None:
    error = build(cls)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == str(error)
        assert twin.facts == error.facts
        assert {**vars(twin)} == {**vars(error)}


def test_all_lists_every_class() -> None:
    assert set(errors.__all__) == {cls.__name__ for cls in CLASSES}


def test_budget_errors_speak_in_dollars_and_say_the_next_step() -> None:
    error = errors.BudgetExceeded(
        account="run-1",
        requested_pusd=2 * 10**12,
        cap_pusd=5 * 10**12,
        posted_pusd=4 * 10**12,
        pending_pusd=5 * 10**11,
    )
    assert "$5.000000" in str(error)
    assert "raise the cap" in str(error)
    assert error.available_pusd == 5 * 10**11
    assert not error.can_ever_fit


def test_configuration_errors_are_value_errors() -> None:
    assert isinstance(errors.ConfigurationError("x"), ValueError)
