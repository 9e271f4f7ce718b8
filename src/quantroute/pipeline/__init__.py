"""One run.toml from prompts to a judged drafter; each stage by itself, resumable, anywhere."""

from quantroute.pipeline._data import held_out_states, write_training_data
from quantroute.pipeline._judge import judge_drafter
from quantroute.pipeline._pipeline import (
    StageStatus,
    final_manifest,
    run_pipeline,
    status_of,
)
from quantroute.pipeline._presets import PRESETS, Preset, preset
from quantroute.pipeline._spec import PipelineSpec, load_pipeline_spec
from quantroute.pipeline._stages import STAGES, Stage

__all__ = [
    "PRESETS",
    "STAGES",
    "PipelineSpec",
    "Preset",
    "Stage",
    "StageStatus",
    "final_manifest",
    "held_out_states",
    "judge_drafter",
    "load_pipeline_spec",
    "preset",
    "run_pipeline",
    "status_of",
    "write_training_data",
]
