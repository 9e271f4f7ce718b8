"""Does an endpoint really serve the model it claims? Statistics over the tokens it produced."""

from quantroute.audit._blackbox import (
    PROBES,
    StringsEndpoint,
    StringsReport,
    StringsSettings,
    audit_strings,
)
from quantroute.audit._causes import Cause, CauseKind, Hypothesis, fit_of, name_cause
from quantroute.audit._claim import SamplingClaim
from quantroute.audit._compare import Gap, drift_gap, rank_gap_p
from quantroute.audit._formats import rounded, served_as
from quantroute.audit._judging import AuditSettings, judge_scores
from quantroute.audit._page import audit_html, strings_html
from quantroute.audit._report import AuditReport, EndpointReport, Finding, Outcome
from quantroute.audit._rows import AuditRow, Intake, audit_rows_of, example_row, with_system
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
from quantroute.audit._stored import TargetHead, audit_states, score_states
from quantroute.audit._strings import Agreement, StringTest, greedy_agreement, string_test
from quantroute.audit._target import Target, score_rows
from quantroute.audit._verdicts import evidence_of
from quantroute.audit._weights import audit_weights

__all__ = [
    "PROBES",
    "Agreement",
    "AuditReport",
    "AuditRow",
    "AuditSettings",
    "Cause",
    "CauseKind",
    "Drift",
    "EndpointReport",
    "Finding",
    "Gap",
    "Hypothesis",
    "Intake",
    "Outcome",
    "Outside",
    "RankTest",
    "RowScores",
    "SamplingClaim",
    "Strata",
    "StringTest",
    "StringsEndpoint",
    "StringsReport",
    "StringsSettings",
    "Target",
    "TargetHead",
    "TemperatureFit",
    "audit_html",
    "audit_rows_of",
    "audit_states",
    "audit_strings",
    "audit_weights",
    "combined_p",
    "drift",
    "drift_gap",
    "evidence_of",
    "example_row",
    "fit_of",
    "fit_temperature",
    "greedy_agreement",
    "holm",
    "judge_scores",
    "name_cause",
    "outside_test",
    "rank_gap_p",
    "rank_test",
    "rounded",
    "score_logits",
    "score_rows",
    "score_states",
    "served_as",
    "strata_test",
    "string_test",
    "strings_html",
    "tokens_needed",
    "with_system",
]
