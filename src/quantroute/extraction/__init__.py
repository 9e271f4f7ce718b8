"""Answers to hidden states: rows -> token ids and loss mask -> states -> a trainer's own format.

Needs the extra `quantroute[extract]`. Nothing here talks to a paid service.
"""

from quantroute.extraction._examples import TokenSettings, examples_from_rows
from quantroute.extraction._kimi_style import KIMI_STYLE_TEMPLATE, write_kimi_style_tokenizer
from quantroute.extraction._records import Example, LayerConvention, LayerIds, States
from quantroute.extraction._rows import Turn, read_row_files, turns_of
from quantroute.extraction._template import Rerender, TemplateProfile, probe_template
from quantroute.extraction._tokenizer import TargetTokenizer
from quantroute.extraction._tokens_report import (
    CountComparison,
    Refusal,
    RefusalReason,
    TokensReport,
)

__all__ = [
    "KIMI_STYLE_TEMPLATE",
    "CountComparison",
    "Example",
    "LayerConvention",
    "LayerIds",
    "Refusal",
    "RefusalReason",
    "Rerender",
    "States",
    "TargetTokenizer",
    "TemplateProfile",
    "TokenSettings",
    "TokensReport",
    "Turn",
    "examples_from_rows",
    "probe_template",
    "read_row_files",
    "turns_of",
    "write_kimi_style_tokenizer",
]
