"""A drafter against an untrained one, against broken inputs, and in real decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError
from quantroute.evaluation._acceptance import Acceptance, Sample, Tally, speed_up
from quantroute.evaluation._head import DraftHead
from quantroute.evaluation._target import LocalTarget

if TYPE_CHECKING:
    import torch

__all__ = ["Evaluation", "Speculation", "evaluate", "speculate"]

_COSTS: Final = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Real greedy decoding of some prompts. `identical` texts are those plain decoding wrote."""

    prompts: int
    identical: int
    tokens: int
    target_passes: int
    untrained_passes: int

    @property
    def tokens_per_pass(self) -> float:
        """Plain decoding has 1."""
        return self.tokens / self.target_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a drafter is worth. Lists begin with all datasets together.

    Attributes:
        controls: the trained drafter on inputs that are wrong on purpose; its acceptance falls if
            it really reads them.
        depth: drafts per chain, so an acceptance length is at most `depth + 1`.
    """

    trained: tuple[Acceptance, ...]
    untrained: Acceptance
    controls: dict[str, Acceptance]
    depth: int
    speculation: Speculation | None = None

    @property
    def length(self) -> float:
        """Acceptance length over everything held out."""
        return self.trained[0].length

    def speed_ups(self) -> list[dict[str, float]]:
        """Expected gain by what a draft step costs, as a share of a pass of the target."""
        found = []
        for cost in _COSTS:
            gain, depth = speed_up(self.trained[0].cumulative, draft_cost=cost)
            found.append({"draft_cost": cost, "speed_up": gain, "depth": depth})
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        real = self.speculation
        return {
            "depth": self.depth,
            "trained": [item.as_dict() for item in self.trained],
            "untrained": self.untrained.as_dict(),
            "controls": {name: item.as_dict() for name, item in self.controls.items()},
            "speed_ups": self.speed_ups(),
            "speculation": None
            if real is None
            else {
                "prompts": real.prompts,
                "identical": real.identical,
                "tokens": real.tokens,
                "target_passes": real.target_passes,
                "untrained_passes": real.untrained_passes,
                "tokens_per_pass": real.tokens_per_pass,
            },
        }


def evaluate(head: DraftHead, samples: Iterable[Sample], *, depth: int = 3) -> Evaluation:
    """Acceptance on held-out samples, of the head, of an untrained one, and of controls.

    The samples are read once, one in memory at a time: their logits are as wide as the vocabulary.

    Raises:
        ConfigurationError: the samples have other layers than the head takes.
        DatasetError: none is long enough.
    """
    wanted = len(head.wiring.layers)
    trained, untrained = Tally(head, depth=depth), Tally(head.untrained(), depth=depth)
    controls = {name: Tally(head, depth=depth) for name in _WRONG}
    for sample in samples:
        if sample.auxiliary.shape[1] != wanted:
            raise ConfigurationError(
                f"the head takes {wanted} layers, the states have {sample.auxiliary.shape[1]}"
            )
        trained.add(sample)
        untrained.add(sample)
        for name, wrong in _WRONG.items():
            if (states := wrong(sample)) is not None:
                controls[name].add(replace(sample, auxiliary=states))
    return Evaluation(
        trained=tuple(trained.found()),
        untrained=untrained.found()[0],
        controls={name: tally.found()[0] for name, tally in controls.items() if tally},
        depth=depth,
    )


def speculate(
    target: LocalTarget,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    depth: int = 3,
    end: int | None = None,
) -> Speculation:
    """Decode prompts (token ids) plainly, with the drafter, and with an untrained one."""
    identical = written = passes = untrained = 0
    fresh = head.untrained()
    for prompt in prompts:
        plain = target.decode(prompt, tokens=tokens, end=end)
        drafted = target.speculate(head, prompt, tokens=tokens, depth=depth, end=end)
        other = target.speculate(fresh, prompt, tokens=tokens, depth=depth, end=end)
        identical += plain.ids == drafted.ids == other.ids
        written += len(drafted.ids)
        passes += drafted.target_passes
        untrained += other.target_passes
    return Speculation(
        prompts=len(prompts),
        identical=identical,
        tokens=written,
        target_passes=passes,
        untrained_passes=untrained,
    )


def _other_places(sample: Sample) -> torch.Tensor:
    states, generator = sample.auxiliary, need("torch").Generator().manual_seed(0)
    return states[need("torch").randperm(len(states), generator=generator)]


def _one_late(sample: Sample) -> torch.Tensor:
    return sample.auxiliary.roll(1, dims=0)


def _other_order(sample: Sample) -> torch.Tensor:
    return sample.auxiliary.roll(1, dims=1)


def _other_layers(sample: Sample) -> torch.Tensor | None:
    """Each slot has the layer of the next, the last slot that in front of the final norm."""
    if sample.last is None:
        return None
    return need("torch").cat([sample.auxiliary[:, 1:], sample.last.unsqueeze(1)], dim=1)


def _normed(sample: Sample) -> torch.Tensor | None:
    return sample.normed


#: None where a sample does not have what it takes.
_WRONG: Final[Mapping[str, Callable[[Sample], torch.Tensor | None]]] = {
    "states of other places": _other_places,
    "states one place late": _one_late,
    "layers in another order": _other_order,
    "higher layers": _other_layers,
    "states after the final norm": _normed,
}
