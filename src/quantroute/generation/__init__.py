"""Prompts to rows: generate, resume, judge, export."""

from quantroute.generation._config import Mode, RunConfig
from quantroute.generation._conversation import ChatClient
from quantroute.generation._export import ExportReport, export_rows
from quantroute.generation._prompts import (
    DatasetSource,
    Prompt,
    builtin_prompts,
    dataset_name,
    read_prompts,
)
from quantroute.generation._quality import Judgement, RowClass, classify, loop_score
from quantroute.generation._records import RowState, StoredRow, TurnRecord
from quantroute.generation._report import Progress, RunReport, StopReason, truncation_rates
from quantroute.generation._rows import RowCounts, RowStore, StoredRun
from quantroute.generation._run import DEFAULT_DRAIN_S, Run
from quantroute.generation._writers import read_rows

__all__ = [
    "DEFAULT_DRAIN_S",
    "ChatClient",
    "DatasetSource",
    "ExportReport",
    "Judgement",
    "Mode",
    "Progress",
    "Prompt",
    "RowClass",
    "RowCounts",
    "RowState",
    "RowStore",
    "Run",
    "RunConfig",
    "RunReport",
    "StopReason",
    "StoredRow",
    "StoredRun",
    "TurnRecord",
    "builtin_prompts",
    "classify",
    "dataset_name",
    "export_rows",
    "loop_score",
    "read_prompts",
    "read_rows",
    "truncation_rates",
]
