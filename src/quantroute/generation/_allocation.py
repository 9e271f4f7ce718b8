"""How a sum of money is shared among datasets. Pure; integers and exact fractions only.

Everybody gets money until his need is met, at speeds in proportion to the weights: water running
into vessels of different height through a common pipe. What a small need leaves over so goes to
the others. Shares are rounded down, so together they never exceed what there is; at most a
pico-dollar per dataset stays unassigned, which keeps every share monotone in the sum.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Allocation", "Claim", "allocate", "share_out"]


class Allocation(enum.Enum):
    """The rule by which datasets share a cap."""

    EQUAL = "equal"  # the same for each, up to its need; weights and priorities are ignored
    WEIGHTED = "weighted"  # in proportion to the weights, up to the need
    PRIORITY = "priority"  # lower numbers first; equal numbers share in proportion to weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one dataset may ask for. Units: pico-dollars.

    `need_pusd` is what it can use, `limit_pusd` its own cap (None: only the run's).
    """

    name: str
    need_pusd: int
    limit_pusd: int | None = None
    weight: Fraction = Fraction(1)
    priority: int = 1

    @property
    def bounded_need_pusd(self) -> int:
        """The need, as far as the dataset's own cap admits it."""
        need = max(0, self.need_pusd)
        return need if self.limit_pusd is None else min(need, max(0, self.limit_pusd))


def allocate(amount_pusd: int, claims: Sequence[Claim], rule: Allocation) -> dict[str, int]:
    """Shares of `amount_pusd` by name, none above its need; together at most the amount.

    Units: pico-dollars.
    """
    left_pusd = max(0, amount_pusd)
    shares: dict[str, int] = {}
    for group in _in_turn(claims, rule):
        given = _fill(left_pusd, group, rule)
        left_pusd -= sum(given.values())
        shares |= given
    return {claim.name: shares[claim.name] for claim in claims}


def share_out(amount_pusd: int, claims: Sequence[Claim], rule: Allocation) -> dict[str, int]:
    """Shares of the whole amount: first to the needs, then what is left beyond them.

    Needs are estimates. Money that no estimate asks for is better spread, where a low estimate can
    use it, than kept. Only own caps bound the second round.
    """
    shares = allocate(amount_pusd, claims, rule)
    left_pusd = max(0, amount_pusd) - sum(shares.values())
    open_claims = [
        Claim(
            name=claim.name,
            need_pusd=left_pusd,
            limit_pusd=(
                None if claim.limit_pusd is None else claim.limit_pusd - shares[claim.name]
            ),
            weight=claim.weight,
            priority=claim.priority,
        )
        for claim in claims
    ]
    more = allocate(left_pusd, open_claims, rule)
    return {name: share + more[name] for name, share in shares.items()}


def _in_turn(claims: Iterable[Claim], rule: Allocation) -> list[list[Claim]]:
    """Groups that are served one after the other; all together unless priorities count."""
    groups: dict[int, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.priority if rule is Allocation.PRIORITY else 0, []).append(claim)
    return [groups[priority] for priority in sorted(groups)]


def _fill(amount_pusd: int, claims: Sequence[Claim], rule: Allocation) -> Mapping[str, int]:
    """Water-filling: `min(need, level * weight)` for the one level at which the money is used."""

    def weight_of(claim: Claim) -> Fraction:
        return Fraction(1) if rule is Allocation.EQUAL else claim.weight

    shares: dict[str, int] = {}
    left, weights = Fraction(amount_pusd), sum((weight_of(item) for item in claims), Fraction(0))
    for claim in sorted(claims, key=lambda item: item.bounded_need_pusd / weight_of(item)):
        weight = weight_of(claim)
        # The level if all who are still to come shared what is left; it only rises on the way.
        share = min(Fraction(claim.bounded_need_pusd), left * weight / weights)
        shares[claim.name] = int(share)
        left, weights = left - share, weights - weight
    return shares
