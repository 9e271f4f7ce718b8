"""What a drafter is worth: acceptance on held-out answers, and real speculative decoding.

Needs the extra `quantroute[extract]`; no trainer is imported.
"""

from quantroute.evaluation._acceptance import Acceptance, Sample, measure, speed_up
from quantroute.evaluation._head import DraftHead, Wiring
from quantroute.evaluation._target import Decoded, LocalTarget

__all__ = [
    "Acceptance",
    "Decoded",
    "DraftHead",
    "LocalTarget",
    "Sample",
    "Wiring",
    "measure",
    "speed_up",
]
