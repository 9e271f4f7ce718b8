"""Answers to hidden states: rows -> token ids and loss mask -> states -> a trainer's own format.

Needs the extra `quantroute[extract]`. Nothing here talks to a paid service.
"""

from quantroute._shard import Shard
from quantroute.extraction._examples import TokenSettings, examples_from_rows
from quantroute.extraction._formats import (
    FormatReport,
    Norm,
    StatesFacts,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from quantroute.extraction._inputs import ExampleFiles, read_pretokenized
from quantroute.extraction._job import (
    Extraction,
    ExtractionProgress,
    ExtractionReport,
    StoreSettings,
)
from quantroute.extraction._kimi_style import KIMI_STYLE_TEMPLATE, write_kimi_style_tokenizer
from quantroute.extraction._norm import FinalNorm
from quantroute.extraction._plan import DiskNeed, Plan, Selection, StateLayout
from quantroute.extraction._pool import PoolEvent
from quantroute.extraction._ray import ActorPool, RayExtraction
from quantroute.extraction._records import Example, LayerConvention, LayerIds, States
from quantroute.extraction._rows import Turn, read_row_files, turns_of
from quantroute.extraction._sglang import SglangSource
from quantroute.extraction._source import Lost, ProbeReport, StateSource, probe, probe_examples
from quantroute.extraction._spec import ExtractSpec, load_extract_spec
from quantroute.extraction._store import StateStore
from quantroute.extraction._target import Target
from quantroute.extraction._template import Rerender, TemplateProfile, probe_template
from quantroute.extraction._tokenizer import TargetTokenizer
from quantroute.extraction._tokens_report import (
    CountComparison,
    Refusal,
    RefusalReason,
    TokensReport,
)
from quantroute.extraction._training_data import TRAINERS, write_training_data
from quantroute.extraction._transformers import TransformersSource
from quantroute.extraction._vllm import VllmSource
from quantroute.extraction._vocabulary import (
    DraftVocabulary,
    count_supervised,
    special_token_ids,
)

__all__ = [
    "KIMI_STYLE_TEMPLATE",
    "TRAINERS",
    "ActorPool",
    "CountComparison",
    "DiskNeed",
    "DraftVocabulary",
    "Example",
    "ExampleFiles",
    "ExtractSpec",
    "Extraction",
    "ExtractionProgress",
    "ExtractionReport",
    "FinalNorm",
    "FormatReport",
    "LayerConvention",
    "LayerIds",
    "Lost",
    "Norm",
    "Plan",
    "PoolEvent",
    "ProbeReport",
    "RayExtraction",
    "Refusal",
    "RefusalReason",
    "Rerender",
    "Selection",
    "SglangSource",
    "Shard",
    "StateLayout",
    "StateSource",
    "StateStore",
    "States",
    "StatesFacts",
    "StoreSettings",
    "Target",
    "TargetTokenizer",
    "TemplateProfile",
    "TokenSettings",
    "TokensReport",
    "TransformersSource",
    "Turn",
    "VllmSource",
    "count_supervised",
    "examples_from_rows",
    "load_extract_spec",
    "probe",
    "probe_examples",
    "probe_template",
    "read_pretokenized",
    "read_row_files",
    "special_token_ids",
    "turns_of",
    "write_kimi_style_tokenizer",
    "write_modelopt",
    "write_specforge",
    "write_speculators",
    "write_training_data",
]
