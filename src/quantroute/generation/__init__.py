"""Prompts to rows: generate, resume, judge, export."""

from quantroute._rowfile import read_rows
from quantroute._shard import Shard
from quantroute.generation._alarms import QualityAlarm, quality_alarms
from quantroute.generation._allocation import Allocation, Claim, allocate
from quantroute.generation._census import Census, take_census
from quantroute.generation._config import DatasetSettings, Mode, RunConfig
from quantroute.generation._conversation import ChatClient
from quantroute.generation._dataset_folder import DatasetReport, export_dataset
from quantroute.generation._datasets import (
    DatasetOutcome,
    DatasetRun,
    DatasetsProgress,
    DatasetsReport,
    plan_run,
    probe_run,
    run_datasets,
)
from quantroute.generation._deadline import Deadline, Pace, deadline_s
from quantroute.generation._expect import Expectation
from quantroute.generation._export import ExportReport, export_rows
from quantroute.generation._failures import RowFailures, read_failures
from quantroute.generation._feed import Feed, FeedProgress, Purse, Target
from quantroute.generation._hybrid import Way, compare_ways
from quantroute.generation._look import Onlooker, RunLook, Speeds, merged_looks
from quantroute.generation._measure import (
    Accepted,
    Standing,
    read_qualities,
    read_standings,
)
from quantroute.generation._plan import DatasetPlan, Demand, Plan, PlannedEndpoint
from quantroute.generation._planner import make_plan
from quantroute.generation._prompts import (
    DatasetSource,
    Prompt,
    builtin_prompts,
    dataset_name,
    read_prompts,
)
from quantroute.generation._qualities import EndpointQuality, Stratum, merged_qualities, stratum_of
from quantroute.generation._quality import Judgement, RowClass, classify, loop_score
from quantroute.generation._readings import known_reading
from quantroute.generation._records import (
    Reading,
    RowCounts,
    RowState,
    StoredRow,
    StoredRun,
    TurnRecord,
)
from quantroute.generation._report import Progress, RunReport, StopReason, truncation_rates
from quantroute.generation._rows import RowStore
from quantroute.generation._run import DEFAULT_DRAIN_S, Run
from quantroute.generation._run_name import run_name, run_stores
from quantroute.generation._shards import RowSource, ShardedRows
from quantroute.generation._spec import DatasetSpec, RunSpec, load_run_spec, policy_class
from quantroute.generation._statistical import StatisticalReserve, worst_request_pusd

__all__ = [
    "DEFAULT_DRAIN_S",
    "Accepted",
    "Allocation",
    "Census",
    "ChatClient",
    "Claim",
    "DatasetOutcome",
    "DatasetPlan",
    "DatasetReport",
    "DatasetRun",
    "DatasetSettings",
    "DatasetSource",
    "DatasetSpec",
    "DatasetsProgress",
    "DatasetsReport",
    "Deadline",
    "Demand",
    "EndpointQuality",
    "Expectation",
    "ExportReport",
    "Feed",
    "FeedProgress",
    "Judgement",
    "Mode",
    "Onlooker",
    "Pace",
    "Plan",
    "PlannedEndpoint",
    "Progress",
    "Prompt",
    "Purse",
    "QualityAlarm",
    "Reading",
    "RowClass",
    "RowCounts",
    "RowFailures",
    "RowSource",
    "RowState",
    "RowStore",
    "Run",
    "RunConfig",
    "RunLook",
    "RunReport",
    "RunSpec",
    "Speeds",
    "Standing",
    "StatisticalReserve",
    "Shard",
    "ShardedRows",
    "StopReason",
    "StoredRow",
    "StoredRun",
    "Stratum",
    "Target",
    "TurnRecord",
    "allocate",
    "builtin_prompts",
    "classify",
    "dataset_name",
    "deadline_s",
    "export_dataset",
    "export_rows",
    "known_reading",
    "load_run_spec",
    "loop_score",
    "Way",
    "compare_ways",
    "make_plan",
    "merged_looks",
    "plan_run",
    "merged_qualities",
    "policy_class",
    "probe_run",
    "read_failures",
    "read_prompts",
    "quality_alarms",
    "stratum_of",
    "read_qualities",
    "read_rows",
    "read_standings",
    "run_name",
    "run_stores",
    "run_datasets",
    "take_census",
    "truncation_rates",
    "worst_request_pusd",
]
