"""Answers to hidden states: rows -> token ids and loss mask -> states -> a trainer's own format.

Needs the extra `quantroute[extract]`. Nothing here talks to a paid service.
"""

from quantroute.extraction._examples import TokenSettings, examples_from_rows
from quantroute.extraction._formats import (
    FormatReport,
    Norm,
    StatesFacts,
    write_modelopt,
    write_specforge,
    write_speculators,
)
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
from quantroute.extraction._vocabulary import (
    DraftVocabulary,
    count_supervised,
    special_token_ids,
)

__all__ = [
    "KIMI_STYLE_TEMPLATE",
    "CountComparison",
    "DraftVocabulary",
    "Example",
    "FormatReport",
    "LayerConvention",
    "LayerIds",
    "Norm",
    "Refusal",
    "RefusalReason",
    "Rerender",
    "States",
    "StatesFacts",
    "TargetTokenizer",
    "TemplateProfile",
    "TokenSettings",
    "TokensReport",
    "Turn",
    "count_supervised",
    "examples_from_rows",
    "probe_template",
    "read_row_files",
    "special_token_ids",
    "turns_of",
    "write_kimi_style_tokenizer",
    "write_modelopt",
    "write_specforge",
    "write_speculators",
]
