"""Logits to scores: the one place where the audit touches a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quantroute.audit._claim import SamplingClaim
from quantroute.audit._scores import TEMPERATURE_FACTORS, RowScores

if TYPE_CHECKING:
    import torch

__all__ = ["score_logits"]

#: Tokens x vocabulary that are worked on at once: 8 Mi floats are 32 MiB a copy.
_CELLS_AT_ONCE: Final = 8 * 2**20


def score_logits(
    logits: torch.Tensor, ids: torch.Tensor, claim: SamplingClaim, *, is_heated: bool = True
) -> RowScores:
    """Score generated tokens.

    Args:
        logits: [T, V], row t being the target's logits for the place of `ids[t]`.
        ids: int64 [T], the generated tokens.
        claim: the sampling that was asked for.
        is_heated: also score at other temperatures; without, it takes a third of the time.
    """
    import torch

    rows = max(1, _CELLS_AT_ONCE // max(1, logits.shape[-1]))
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        for start in range(0, ids.shape[0], rows):
            part = logits[start : start + rows].to(torch.float32)
            parts.append(_score(part, ids[start : start + rows], claim, is_heated))
    columns: dict[str, Any] = {
        name: torch.cat([part[name] for part in parts], dim=-1).double().cpu().numpy()
        for name in parts[0]
    }
    return RowScores(position=np.arange(ids.shape[0], dtype=np.float64), **columns)


def _score(
    logits: torch.Tensor, ids: torch.Tensor, claim: SamplingClaim, is_heated: bool
) -> dict[str, torch.Tensor]:
    import torch

    plain = _log_odds(logits, claim)
    own = plain.gather(-1, ids[:, None])
    places = _Places(likelier=plain > own, same=plain == own, ids=ids[:, None])
    claimed = places.measure(plain)
    odds = plain.exp()
    second = torch.where(odds > 0, odds * plain.square(), 0).sum(-1)
    heated = [
        claimed if factor == 1.0 else places.measure((plain / factor).log_softmax(-1))
        for factor in (TEMPERATURE_FACTORS if is_heated else ())
    ]
    none = ids.new_zeros((0, ids.shape[0]))
    return {
        **claimed,
        "varentropy": (second - claimed["entropy"].square()).clamp_min(0),
        **{
            f"heated_{name}": torch.stack([item[name] for item in heated]) if heated else none
            for name in ("surprise", "entropy", "above", "mass")
        },
    }


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens stand in the ranking, the same at every temperature: masks [T, V]."""

    likelier: torch.Tensor
    same: torch.Tensor
    ids: torch.Tensor

    def measure(self, log_odds: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        odds = log_odds.exp()
        surprise = -log_odds.gather(-1, self.ids)[:, 0]
        is_out = surprise.isinf()
        return {
            "surprise": surprise,
            "entropy": torch.special.entr(odds).sum(-1),
            "above": torch.where(is_out, 1.0, (odds * self.likelier).sum(-1)),
            "mass": torch.where(is_out, 0.0, (odds * self.same).sum(-1)),
        }


def _log_odds(logits: torch.Tensor, claim: SamplingClaim) -> torch.Tensor:
    """Log probabilities [T, V] as the engine samples them; -inf where it does not."""
    import torch

    scaled = logits / claim.temperature
    if claim.top_k and claim.top_k < scaled.shape[-1]:
        least = scaled.topk(claim.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if claim.top_p < 1:
        odds, order = scaled.softmax(-1).sort(dim=-1, descending=True)
        before = odds.cumsum(-1) - odds  # a token stays if those before it do not reach top_p yet
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= claim.top_p)
        scaled = scaled.masked_fill(drop, -torch.inf)
    if claim.min_p > 0:
        odds = scaled.softmax(-1)
        least = odds.amax(-1, keepdim=True) * claim.min_p
        scaled = scaled.masked_fill(odds < least, -torch.inf)
    return scaled.log_softmax(-1)
