"""Fakes for tests of code that uses quantroute; shipped, public, and never imported by it."""

from quantroute.testing._clock import FakeClock

__all__ = ["FakeClock"]
