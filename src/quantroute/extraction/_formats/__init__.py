"""Hidden states as each trainer reads them."""

from quantroute.extraction._formats._common import FormatReport, Norm, StatesFacts
from quantroute.extraction._formats._modelopt import write_modelopt
from quantroute.extraction._formats._specforge import write_specforge
from quantroute.extraction._formats._speculators import write_speculators

__all__ = [
    "FormatReport",
    "Norm",
    "StatesFacts",
    "write_modelopt",
    "write_specforge",
    "write_speculators",
]
