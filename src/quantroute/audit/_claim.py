"""What an endpoint claims about each token: the sampling settings that turn logits into odds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantroute.errors import ConfigurationError

__all__ = ["SamplingClaim"]

#: Settings that change a distribution in ways the target alone does not tell.
_UNTESTABLE = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingClaim:
    """The sampling that was asked for, applied in the engines' order: temperature, then top_k,
    then top_p, then min_p, each on what the one before left.

    Attributes:
        temperature: above 0; greedy answers hold no randomness to test.
        top_k: 0 keeps every token.
        top_p: 1.0 keeps every token.
        min_p: 0.0 keeps every token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigurationError(
                f"an audit needs sampled answers: temperature must be above 0, "
                f"not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must be within (0, 1], not {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ConfigurationError(f"min_p must be within [0, 1), not {self.min_p}")
        if self.top_k < 0:
            raise ConfigurationError(f"top_k must not be negative, not {self.top_k}")

    @property
    def cuts(self) -> bool:
        """Whether some tokens are forbidden, not only unlikely."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @classmethod
    def of(cls, sampling: Mapping[str, Any]) -> SamplingClaim:
        """From the `sampling` object of a row; what it leaves out is the service's default, 1.0.

        Raises:
            ConfigurationError: greedy, or penalties that depend on the text so far.
        """
        if used := [name for name in _UNTESTABLE if sampling.get(name) not in (None, 0, 0.0)]:
            neutral = used == ["repetition_penalty"] and sampling["repetition_penalty"] == 1
            if not neutral:
                raise ConfigurationError(f"answers sampled with {', '.join(used)} are not audited")

        def value(name: str, default: float) -> float:
            given = sampling.get(name)
            return default if given is None else float(given)

        return cls(
            temperature=value("temperature", 1.0),
            top_k=int(value("top_k", 0)),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
        )
