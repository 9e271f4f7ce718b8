"""Where hidden states come from, and the probe that a source passes before any bulk run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from quantroute._extra import need
from quantroute.errors import SourceError
from quantroute.extraction._norm import FinalNorm
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.extraction._target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["Lost", "ProbeReport", "StateSource", "check_layers", "probe", "probe_examples"]

_MIN_MEAN_COSINE: Final = 0.99
_PROBE_EXAMPLES: Final = 4
_PROBE_TOKENS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An example without usable states. The run goes on; `reason` is a short stable word."""

    example: Example
    reason: str
    detail: str = ""


class StateSource(Protocol):
    """Gives the states of examples. Made for one target and one choice of layers."""

    @property
    def name(self) -> str:
        """What errors call it: a folder or a URL."""

    @property
    def target(self) -> Target:
        """The model."""

    @property
    def layers(self) -> LayerIds:
        """The auxiliary layers; the last state comes besides."""

    @property
    def dtype(self) -> str:
        """Of the states it gives, as torch names it: "bfloat16"."""

    def final_norm(self) -> FinalNorm:
        """What is to be applied to the last state before the head."""

    def states(self, examples: Iterable[Example]) -> AsyncIterator[States | Lost]:
        """One result per example, in any order, with a bounded number of them in memory.

        Raises:
            SourceError: the source as a whole gave up; what came before is good.
        """

    async def close(self) -> None:
        """Let go of memory and connections; idempotent."""


def check_layers(target: Target, layers: LayerIds) -> None:
    """Refuse ids that the target does not have.

    Raises:
        SourceError: the highest id is not below the number of layers.
    """
    if layers.boundary[-1] >= target.num_layers:
        raise SourceError(
            source=str(target.folder),
            problem=f"layer ids {list(layers.boundary)} (boundary convention) must be below "
            f"{target.num_layers}, its number of layers; the state that leaves the last layer is "
            "always taken besides",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the probe saw. `cosine` per slot: of a batch with single requests, mean over tokens."""

    examples: int
    tokens: int
    cosine: tuple[float, ...]
    min_cosine: float


def probe_examples(
    examples: Iterable[Example], *, count: int = _PROBE_EXAMPLES, max_tokens: int = _PROBE_TOKENS
) -> list[Example]:
    """A few examples of different lengths, cut short: the beginning of those that come first."""
    chosen: dict[str, Example] = {}
    for example in examples:
        # Unequal lengths, so that padding is part of what is tried.
        ids = example.input_ids[: max(2, max_tokens - 7 * len(chosen))]
        short = replace(example, input_ids=ids, loss_mask=np.ones(len(ids), dtype=np.bool_))
        chosen.setdefault(short.key, short)
        if len(chosen) == count:
            break
    return list(chosen.values())


async def probe(
    source: StateSource,
    examples: Sequence[Example],
    *,
    reference: StateSource | None = None,
    min_mean_cosine: float = _MIN_MEAN_COSINE,
) -> ProbeReport:
    """Ask for a few examples one by one and all at once, and compare.

    Catches: a missing last layer, lost rows, states of somebody else's request in a batch, wrong
    width, NaN. With `reference`, single requests go there: another engine on the same target.

    Raises:
        SourceError: something is wrong; the message says what.
    """
    torch = need("torch")
    singles = []
    for example in examples:
        singles += [item.hidden for item in await _collect(reference or source, [example])]
    together = {item.example.key: item.hidden for item in await _collect(source, examples)}
    slots = len(source.layers.boundary) + 1
    cosines = []
    for example, single in zip(examples, singles, strict=True):
        batched = together[example.key]
        for hidden in (single, batched):
            _check(source, example, hidden, slots)
        cosines.append(torch.nn.functional.cosine_similarity(single.double(), batched.double(), -1))
    tokens = torch.cat(cosines)
    mean = tuple(float(value) for value in tokens.mean(0))
    worst = min(range(slots), key=lambda slot: mean[slot])
    if mean[worst] < min_mean_cosine:
        what = "the reference" if reference else "single requests"
        raise SourceError(
            source=source.name,
            problem=f"states of a batch do not agree with {what}: slot {worst} of {slots} has a "
            f"mean cosine of {mean[worst]:.4f} over {tokens.shape[0]} tokens (at least "
            f"{min_mean_cosine} is wanted); layer ids, batching or the model differ",
        )
    return ProbeReport(
        examples=len(examples),
        tokens=int(tokens.shape[0]),
        cosine=mean,
        min_cosine=float(tokens.min()),
    )


async def _collect(source: StateSource, examples: Sequence[Example]) -> list[States]:
    found: list[States] = []
    async for item in source.states(examples):
        if isinstance(item, Lost):
            raise SourceError(
                source=source.name,
                problem=f"the probe lost an example: {item.reason} {item.detail}",
            )
        found.append(item)
    if len(found) != len(examples):
        raise SourceError(
            source=source.name,
            problem=f"the probe asked for {len(examples)} examples and got {len(found)}",
        )
    return found


def _check(source: StateSource, example: Example, hidden: torch.Tensor, slots: int) -> None:
    torch = need("torch")
    wanted = (len(example), slots, source.target.hidden_size)
    if tuple(hidden.shape) != wanted:
        raise SourceError(
            source=source.name,
            problem=f"states have the shape {tuple(hidden.shape)} instead of {wanted} "
            "(tokens, layers + 1, hidden size); is the last layer among the ids it was started "
            "with, and are prefix caching and chunked prefill off?",
        )
    if not torch.isfinite(hidden).all():
        raise SourceError(source=source.name, problem="states are not finite (NaN or infinite)")
    if len({hidden[:, slot].double().sum().item() for slot in range(slots)}) != slots:
        raise SourceError(source=source.name, problem="two layers gave the very same states")
