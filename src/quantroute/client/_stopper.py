"""Outcomes after which no other row would fare better: they stop the whole run."""

from __future__ import annotations

from quantroute.client._classify import Classified, Kind
from quantroute.errors import AccountError, CreditsExhausted, KeyRejected
from quantroute.secrets import EnvKey

__all__ = ["stopper_of"]


def stopper_of(outcome: Classified, key: EnvKey) -> AccountError | None:
    """What must stop the whole run, if the outcome says so."""
    match outcome.kind:
        case Kind.KEY_REJECTED:
            return KeyRejected(problem=_key_advice(key), status=outcome.status)
        case Kind.OUT_OF_FUNDS:
            return CreditsExhausted(
                problem="the account or the key's limit is out of funds; top up and rerun "
                f"to go on ({outcome.problem})",
                status=outcome.status,
            )
        case Kind.MISDIRECTED:
            return AccountError(
                problem=f"status {outcome.status} did not come from the service but from "
                "something in between; check base_url and the proxy and rerun to go on",
                status=outcome.status,
            )
        case _:
            return None


def _key_advice(key: EnvKey) -> str:
    return f"the service does not accept the key in {key.variable}; check it and rerun to go on"
