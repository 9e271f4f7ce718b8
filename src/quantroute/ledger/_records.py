"""What a ledger is made of: accounts, charges, and the immutable records of its journal."""

from __future__ import annotations

import enum
import functools
from typing import Final, NewType, final

from msgspec import Struct

from quantroute.errors import ConfigurationError
from quantroute.money import Cap
from quantroute.pricing import TokenUsage

__all__ = [
    "ROOT",
    "Account",
    "Basis",
    "CapSet",
    "Charge",
    "EntryId",
    "EntryStatus",
    "Held",
    "Identified",
    "Noted",
    "Posted",
    "Record",
    "Reserved",
    "Voided",
    "check_account",
    "lineage",
]

EntryId = NewType("EntryId", str)
"""Identifies one attempt; made by us and on disk before any byte of the request leaves."""

Account = NewType("Account", str)
"""A path such as `run-7/mt-bench`; what it spends counts for every account above it."""

ROOT: Final = Account("")


class Basis(enum.Enum):
    """What a posted amount rests on, from best to worst."""

    REPORTED = "reported"  # the answer's own `cost`
    RECORD = "record"  # the generation record
    KEY_USAGE = "key usage"  # the remainder of the key's own usage
    PRICED = "priced"  # reported tokens at the listed price
    BOUND = "bound"  # the whole reservation


class EntryStatus(enum.Enum):
    """Where an entry stands; see `quantroute.ledger._state` for the transitions."""

    RESERVED = "reserved"
    HELD = "held"
    POSTED = "posted"
    VOIDED = "voided"


class Charge(Struct, frozen=True, kw_only=True):
    """A known charge. `amount_pusd` is what the service takes, pico-dollars."""

    amount_pusd: int
    basis: Basis
    usage: TokenUsage | None = None
    generation_id: str | None = None
    flags: tuple[str, ...] = ()


@final
class CapSet(Struct, frozen=True, kw_only=True):
    """The cap of one account was set, raised or lowered."""

    account: Account
    cap: Cap
    at_s: float


@final
class Reserved(Struct, frozen=True, kw_only=True):
    """Money was set aside for one attempt. `owner` names the process that will resolve it."""

    entry_id: EntryId
    account: Account
    amount_pusd: int
    endpoint: str
    request_id: str
    attempt: int
    owner: str
    at_s: float


@final
class Identified(Struct, frozen=True, kw_only=True):
    """The service named the generation, before its answer was complete."""

    entry_id: EntryId
    generation_id: str
    at_s: float


@final
class Posted(Struct, frozen=True, kw_only=True):
    """The charge is known and final."""

    entry_id: EntryId
    charge: Charge
    at_s: float


@final
class Voided(Struct, frozen=True, kw_only=True):
    """The attempt provably cost nothing."""

    entry_id: EntryId
    reason: str
    at_s: float


@final
class Held(Struct, frozen=True, kw_only=True):
    """The outcome is unknown: the reservation stays until somebody finds out."""

    entry_id: EntryId
    reason: str
    generation_id: str | None
    at_s: float


@final
class Noted(Struct, frozen=True, kw_only=True):
    """A small fact that later settlement needs, such as the key's usage at the start."""

    key: str
    value: str
    at_s: float


# Which one a record is, is asked by `type(record) is Posted`: mypy follows it, as these are final.
# To find by `isinstance` what a Struct is not costs 2,000 instructions (2026-11, Python 3.11): its
# metaclass is then asked. The two records of a row would ask six times, for 4 % of all that is
# done to write it.
Record = CapSet | Reserved | Identified | Posted | Voided | Held | Noted


@functools.lru_cache(maxsize=1_024)  # asked several times per entry, for a handful of accounts
def check_account(path: str) -> Account:
    """`path` as an account.

    Raises:
        ConfigurationError: empty segments, or characters that do not print.
    """
    if path and (not path.isprintable() or not all(path.split("/"))):
        raise ConfigurationError(
            f"an account is a path like 'run/dataset' without empty parts, not {path!r}"
        )
    return Account(path)


@functools.lru_cache(maxsize=1_024)
def lineage(account: Account) -> tuple[Account, ...]:
    """The root, every account on the way, and the account itself."""
    if not account:
        return (ROOT,)
    parts = account.split("/")
    return (ROOT, *(Account("/".join(parts[: end + 1])) for end in range(len(parts))))
