"""Does an endpoint really serve the model it claims? Statistics over the tokens it produced."""

from quantroute.audit._causes import Cause, CauseKind, Hypothesis, name_cause
from quantroute.audit._claim import SamplingClaim
from quantroute.audit._formats import rounded, served_as
from quantroute.audit._scores import RowScores
from quantroute.audit._scoring import score_logits
from quantroute.audit._statistics import (
    Drift,
    Outside,
    RankTest,
    Strata,
    TemperatureFit,
    combined_p,
    drift,
    fit_temperature,
    holm,
    outside_test,
    rank_test,
    strata_test,
    tokens_needed,
)

__all__ = [
    "Cause",
    "CauseKind",
    "Drift",
    "Hypothesis",
    "Outside",
    "RankTest",
    "RowScores",
    "SamplingClaim",
    "Strata",
    "TemperatureFit",
    "combined_p",
    "drift",
    "fit_temperature",
    "holm",
    "name_cause",
    "outside_test",
    "rank_test",
    "rounded",
    "score_logits",
    "served_as",
    "strata_test",
    "tokens_needed",
]
