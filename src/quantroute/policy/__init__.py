"""Which endpoints may serve a request, and why not the others. Pure: no network, no clock.

An `ExclusionPolicy` says what is wanted; `judge` holds one endpoint against it, `bind` a whole
listing, with names resolved. What a label does not say, the `EvidenceTable` may. A verdict always
carries reasons that a person can read, and the precision with the source that decided it.
"""

from quantroute.policy._bound import BoundPolicy
from quantroute.policy._evidence import EvidenceRow, EvidenceTable, NativeRow
from quantroute.policy._plausible import implausible_prices
from quantroute.policy._policy import ExclusionPolicy
from quantroute.policy._preferences import pinned_preferences
from quantroute.policy._served import served_among, served_by
from quantroute.policy._verdict import Precision, Reason, Verdict

__all__ = [
    "BoundPolicy",
    "EvidenceRow",
    "EvidenceTable",
    "ExclusionPolicy",
    "NativeRow",
    "Precision",
    "Reason",
    "Verdict",
    "implausible_prices",
    "pinned_preferences",
    "served_among",
    "served_by",
]
