"""The garbage collector's thresholds during a run, and what is left of it afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quantroute.generation._collector import calm_collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    if was_enabled:
        gc.enable()


def test_it_looks_more_seldom_and_then_as_before() -> None:
    """Also when the block ends with an error."""
    gc.set_threshold(700, 9, 8)

    def fail_inside() -> None:
        with calm_collector():
            assert gc.get_threshold() == (100_000, 9, 8)
            raise LookupError

    with pytest.raises(LookupError):
        fail_inside()
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.parametrize("threshold", [0, 500_000])
def test_what_the_application_chose_stays(threshold: int) -> None:
    """A collector that is off, or calmer already, is left alone."""
    gc.set_threshold(threshold, 10, 10)
    with calm_collector():
        assert gc.get_threshold() == (threshold, 10, 10)
    assert gc.get_threshold() == (threshold, 10, 10)


def test_a_switched_off_collector_stays_off() -> None:
    """`gc.disable` is a choice too."""
    gc.set_threshold(700, 10, 10)
    gc.disable()
    with calm_collector():
        assert not gc.isenabled()
        assert gc.get_threshold() == (700, 10, 10)


def test_a_choice_made_meanwhile_is_not_undone() -> None:
    """Whoever sets the thresholds during the run has the last word."""
    gc.set_threshold(700, 10, 10)
    with calm_collector():
        gc.set_threshold(5_000, 5, 5)
    assert gc.get_threshold() == (5_000, 5, 5)
