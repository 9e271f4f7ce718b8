"""Run `specforge train` where there is no GPU. A script: never imported by quantroute.

SpecForge 0.2.0 trains on a CPU unchanged if triton interprets its loss kernel, at several seconds
per step. The same loss in plain torch takes a hundredth of that; it is put in the kernel's place
before the command is imported. Rehearsals and tests only.
"""

import sys

import torch
from specforge.core import loss


class PlainLogSoftmaxLoss:
    """Cross-entropy against the target's distribution, mean over all positions."""

    @staticmethod
    def apply(
        logits: torch.Tensor, target: torch.Tensor, position_mask: torch.Tensor
    ) -> torch.Tensor:
        """Scalar; `logits` and `target` [B, T, V], `position_mask` [B, T, 1]."""
        likelihood = torch.log_softmax(logits.float(), dim=-1)
        return -(position_mask * target * likelihood).sum(-1).mean()


if __name__ == "__main__":
    loss.LogSoftmaxLoss = PlainLogSoftmaxLoss
    from specforge.cli import main

    sys.exit(main())
