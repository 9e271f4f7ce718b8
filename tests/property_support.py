"""How long property tests look: quickly at each change, `HYPOTHESIS_PROFILE=ci` thoroughly."""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["examples", "load_profile"]

_WHOLE = 100  # Hypothesis' own default

# A busy machine is no failure: no deadline for an example.
settings.register_profile("quick", max_examples=_WHOLE // 4, deadline=None)
settings.register_profile("ci", max_examples=_WHOLE, deadline=None)


def load_profile() -> None:
    """The profile that the environment names, else the quick one."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def examples(thorough: int) -> int:
    """`max_examples` of a test whose examples are dear, or many: that many under `ci`."""
    return max(3, thorough * settings().max_examples // _WHOLE)
