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

#: Tokens x vocabulary that are worked on at once. A CPU is several times faster while all copies,
#: of 512 KiB each, stay in its cache; a GPU wants much at once.
_CELLS_ON_CPU: Final = 2**17
_CELLS_ON_GPU: Final = 2**23
#: Stands for the log odds of a forbidden token where sums are taken: its odds are exactly zero, and
#: zero times this is zero, unlike zero times infinity.
_FORBIDDEN_LOG: Final = -1e6


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

    cells = _CELLS_ON_CPU if logits.device.type == "cpu" else _CELLS_ON_GPU
    rows = max(1, cells // max(1, logits.shape[-1]))
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

    table = _Table.of(_log_odds(logits, claim), ids)
    heated = [table.measure(factor) for factor in (TEMPERATURE_FACTORS if is_heated else ())]
    none = ids.new_zeros((0, ids.shape[0]))
    return {
        **table.measure(1.0),
        "varentropy": table.varentropy(),
        **{
            f"heated_{name}": torch.stack([item[name] for item in heated]) if heated else none
            for name in ("surprise", "entropy", "above", "mass")
        },
    }


@dataclass(frozen=True, slots=True)
class _Table:
    """What all temperatures share.

    Attributes:
        logs: [T, V] claimed log odds, zero for the likeliest token.
        likelier: [T, V] 1.0 for tokens likelier than the generated one, else 0.0.
        own: [T] the generated token's log odds; `same`: how many tokens share them.
    """

    logs: torch.Tensor
    likelier: torch.Tensor
    own: torch.Tensor
    same: torch.Tensor

    @classmethod
    def of(cls, logs: torch.Tensor, ids: torch.Tensor) -> _Table:
        logs = (logs - logs.amax(-1, keepdim=True)).clamp_min_(_FORBIDDEN_LOG)
        own = logs.gather(-1, ids[:, None])
        likelier = (logs > own).to(logs.dtype)
        return cls(logs=logs, likelier=likelier, own=own[:, 0], same=(logs == own).sum(-1))

    def measure(self, factor: float) -> dict[str, torch.Tensor]:
        """Each token's scores at a multiple of the claimed temperature, [T] each."""
        import torch

        odds = (self.logs / factor).exp_()
        total = odds.sum(-1)
        mean = torch.linalg.vecdot(odds, self.logs) / total / factor
        above = torch.linalg.vecdot(odds, self.likelier) / total
        log_total = total.log()
        own = self.own / factor - log_total
        is_out = self.own <= _FORBIDDEN_LOG
        return {
            "surprise": torch.where(is_out, torch.inf, -own),
            "entropy": log_total - mean,
            "above": torch.where(is_out, 1.0, above),
            "mass": torch.where(is_out, 0.0, own.exp() * self.same),
        }

    def varentropy(self) -> torch.Tensor:
        """Variance of the surprise under the claim, [T], nats^2."""
        import torch

        odds = self.logs.exp()
        odds /= odds.sum(-1, keepdim=True)
        mean = torch.linalg.vecdot(odds, self.logs)
        return torch.linalg.vecdot(odds, (self.logs - mean[:, None]).square_())


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
