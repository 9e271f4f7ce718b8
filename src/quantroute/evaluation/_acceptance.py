"""How many drafted tokens a target would accept, on text it wrote itself.

A chain starts after each token of an answer. At depth k the drafter is given the text's own tokens
and its own last hidden state; the target's word is the distribution at the same place. Greedy: the
two first choices agree. Sampled: the chance that speculative sampling keeps the token, which is
the sum over the vocabulary of the smaller of both probabilities (Leviathan et al. 2023). Tokens
that the draft vocabulary lacks can never be drafted and count as misses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantroute._extra import need
from quantroute.errors import DatasetError
from quantroute.evaluation._head import DraftHead

if TYPE_CHECKING:
    import torch

__all__ = ["Acceptance", "Sample", "Tally", "measure", "speed_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer with what the target computed for it.

    Attributes:
        ids: [S]; mask: [S], true on what the target wrote.
        auxiliary: [S, L, H], states of the head's layers.
        logits: [S, V], the target's, at each place for the token after it.
        last: [S, H], the state before the final norm; normed: [S, L, H], `auxiliary` after that
            norm. Both are for controls only.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    auxiliary: torch.Tensor
    logits: torch.Tensor
    dataset: str | None = None
    last: torch.Tensor | None = None
    normed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Shares over all chains of a dataset (None: of all).

    Attributes:
        conditional: per depth, among the chains that were right so far.
        cumulative: per depth, right so far and here.
        sampled: per depth, the chance that this and all drafts before are kept at temperature 1.
        outside: share of the target's choices that the draft vocabulary lacks.
    """

    dataset: str | None
    chains: int
    conditional: tuple[float, ...]
    cumulative: tuple[float, ...]
    sampled: tuple[float, ...]
    outside: float

    @property
    def length(self) -> float:
        """Tokens per pass of the target when it decodes greedily: the sure one and those kept."""
        return 1 + sum(self.cumulative)

    @property
    def sampled_length(self) -> float:
        """The same at temperature 1."""
        return 1 + sum(self.sampled)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "dataset": self.dataset,
            "chains": self.chains,
            "length": self.length,
            "sampled_length": self.sampled_length,
            "conditional": list(self.conditional),
            "cumulative": list(self.cumulative),
            "sampled": list(self.sampled),
            "outside_draft_vocabulary": self.outside,
        }


class Tally:
    """Counts chains of one head, a sample at a time."""

    def __init__(self, head: DraftHead, *, depth: int) -> None:
        self._head, self._depth = head, depth
        self._parts: dict[str | None, list[Any]] = defaultdict(list)

    def add(self, sample: Sample) -> None:
        """The chains of one more answer; it is not kept."""
        with need("torch").inference_mode():
            found = _chains(self._head, sample, depth=self._depth)
        if found is not None:
            self._parts[sample.dataset].append(found)

    def __bool__(self) -> bool:
        """Whether any answer was long enough for a chain."""
        return bool(self._parts)

    def found(self) -> list[Acceptance]:
        """Of all samples together, then of each dataset by name.

        Raises:
            DatasetError: no answer was long enough for one chain.
        """
        if not self:
            problem = f"none has {self._depth + 2} generated tokens"
            raise DatasetError(path="held-out rows", problem=problem)
        torch, parts = need("torch"), self._parts
        chains = [item for group in parts.values() for item in group]
        named = sorted(name for name in parts if name is not None)
        return [
            _summed(None, torch.cat(chains, dim=1)),
            *(_summed(name, torch.cat(parts[name], dim=1)) for name in named),
        ]


def measure(head: DraftHead, samples: Iterable[Sample], *, depth: int = 3) -> list[Acceptance]:
    """Acceptance of all samples together, then of each dataset by name.

    Raises:
        DatasetError: no answer is long enough for one chain.
    """
    tally = Tally(head, depth=depth)
    for sample in samples:
        tally.add(sample)
    return tally.found()


def speed_up(length: Sequence[float], *, draft_cost: float) -> tuple[float, int]:
    """The best expected speed-up and the depth that gives it.

    Args:
        length: cumulative acceptance per depth.
        draft_cost: time of one draft step as a share of one pass of the target.
    """
    best, at = 1.0, 0
    for depth in range(1, len(length) + 1):
        gained = (1 + sum(length[:depth])) / (1 + draft_cost * depth)
        if gained > best:
            best, at = gained, depth
    return best, at


def _chains(head: DraftHead, sample: Sample, *, depth: int) -> torch.Tensor | None:
    """Of every chain, [3, chains, depth]: agreed, chance when sampled, outside the vocabulary.

    The chain at t has the feature of token t and the token t+1, and drafts t+2, t+3, ...
    """
    torch = need("torch")
    count = len(sample.ids) - 1 - depth
    if count < 1:
        return None
    starts = sample.mask[1 : 1 + count].nonzero().flatten()
    if not len(starts):
        return None
    known = torch.zeros(sample.logits.shape[-1], dtype=torch.bool)
    known[head.target_ids] = True
    columns = []
    tokens, fused = sample.ids[1:], head.fuse(sample.auxiliary[:-1])
    for step, (logits, handed) in enumerate(head.unroll(tokens, fused, depth=depth)):
        wanted, drafted = sample.logits[starts + 1 + step].float(), logits[starts]
        choice = wanted.argmax(-1)
        agreed = head.target_ids[drafted.argmax(-1)] == choice
        theirs = wanted.softmax(-1)[:, head.target_ids]
        kept = torch.minimum(theirs, drafted.softmax(-1)).sum(-1)
        columns.append(torch.stack([agreed.double(), kept.double(), (~known[choice]).double()]))
        # The text's own tokens go on; behind its end nothing is looked at.
        handed.ids = torch.cat([tokens[1 + step :], tokens.new_zeros(1 + step)])
    return torch.stack(columns, dim=-1)


def _summed(dataset: str | None, chains: torch.Tensor) -> Acceptance:
    agreed, kept, outside = chains
    right = agreed.cumprod(-1)
    cumulative = right.mean(0).tolist()
    before = [1.0, *cumulative[:-1]]
    return Acceptance(
        dataset=dataset,
        chains=chains.shape[1],
        conditional=tuple(
            now / then if then else 0.0 for now, then in zip(cumulative, before, strict=True)
        ),
        cumulative=tuple(cumulative),
        sampled=tuple(kept.cumprod(-1).mean(0).tolist()),
        outside=float(outside[:, 0].mean()),
    )
