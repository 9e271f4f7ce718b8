"""A drafter against an untrained one, against broken inputs, and in real decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError
from quantroute.evaluation._acceptance import Acceptance, Sample, measure, speed_up
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


def evaluate(head: DraftHead, samples: Sequence[Sample], *, depth: int = 3) -> Evaluation:
    """Acceptance on held-out samples, of the head, of an untrained one, and of controls.

    Raises:
        ConfigurationError: the samples have other layers than the head takes.
        DatasetError: none is long enough.
    """
    wanted = len(head.wiring.layers)
    for sample in samples:
        if sample.auxiliary.shape[1] != wanted:
            raise ConfigurationError(
                f"the head takes {wanted} layers, the states have {sample.auxiliary.shape[1]}"
            )
    controls = {
        name: measure(head, _broken(samples, wrong), depth=depth)[0]
        for name, wrong in _WRONG.items()
    }
    return Evaluation(
        trained=tuple(measure(head, samples, depth=depth)),
        untrained=measure(head.untrained(), samples, depth=depth)[0],
        controls=controls,
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


def _broken(
    samples: Sequence[Sample], wrong: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[Sample]:
    for sample in samples:
        yield replace(sample, auxiliary=wrong(sample.auxiliary))


def _other_places(states: torch.Tensor) -> torch.Tensor:
    generator = need("torch").Generator().manual_seed(0)
    return states[need("torch").randperm(len(states), generator=generator)]


def _one_late(states: torch.Tensor) -> torch.Tensor:
    return states.roll(1, dims=0)


def _other_order(states: torch.Tensor) -> torch.Tensor:
    return states.roll(1, dims=1)


_WRONG: Final = {
    "states of other places": _other_places,
    "states one place late": _one_late,
    "layers in another order": _other_order,
}
