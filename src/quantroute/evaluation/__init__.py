"""What a drafter is worth: acceptance on held-out answers, and real speculative decoding.

Needs the extra `quantroute[extract]`; no trainer is imported.
"""

from quantroute.evaluation._acceptance import Acceptance, Sample, measure, speed_up
from quantroute.evaluation._evaluate import Evaluation, Speculation, evaluate, speculate
from quantroute.evaluation._head import DraftHead, Wiring
from quantroute.evaluation._stored import TargetWeights, is_held_out, stored_samples
from quantroute.evaluation._target import Decoded, LocalTarget, cache_name

__all__ = [
    "Acceptance",
    "Decoded",
    "DraftHead",
    "Evaluation",
    "LocalTarget",
    "Sample",
    "Speculation",
    "TargetWeights",
    "Wiring",
    "cache_name",
    "evaluate",
    "is_held_out",
    "measure",
    "speculate",
    "speed_up",
    "stored_samples",
]
