"""Every error quantroute raises on purpose.

    QuantrouteError
    |-- ConfigurationError (also ValueError)     you asked for something impossible; fix and rerun
    |   `-- UnknownName                          a provider or tag that matches nothing
    |-- RegistryError                            the endpoint list could not be had
    |   `-- EndpointDataError                    one entry of it is malformed
    |-- NoEligibleEndpoint                       every endpoint is excluded; carries the reasons
    |-- BudgetError
    |   |-- BudgetExceeded                       a reservation does not fit; nothing was sent
    |   |-- EntryStateError                      an entry was resolved twice or never reserved
    |   `-- JournalError                         the ledger's file is damaged, locked or foreign
    |       `-- LedgerUnreachable                the shared ledger's server does not answer
    |-- RequestError                             one request failed; the run goes on
    |   |-- TransportError                       the wire failed; `maybe_billed` says how late
    |   |-- ResponseStatusError                  the service said no
    |   |   |-- RateLimited
    |   |   |-- ProviderDown
    |   |   `-- RequestRefused                   this row can never succeed as it is
    |   `-- InvalidResponse                      an answer that is not one
    |-- AccountError                             the whole run must stop, resumable
    |   |-- CreditsExhausted                     402, or the key's own limit
    |   `-- KeyRejected                          401, or no key at all
    |-- DatasetError                             prompts or rows that cannot be used
    |-- SourceError                              hidden states cannot be had from the target
    `-- StageFailed                              a stage of a pipeline ended badly

Each class builds its own message from keyword facts, keeps them in `facts`, and survives pickling.
Messages never hold a payload, a header or a key; they say what happened and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AccountError",
    "BudgetError",
    "BudgetExceeded",
    "ConfigurationError",
    "CreditsExhausted",
    "DatasetError",
    "EndpointDataError",
    "EntryStateError",
    "InvalidResponse",
    "JournalError",
    "KeyRejected",
    "LedgerUnreachable",
    "NoEligibleEndpoint",
    "ProviderDown",
    "QuantrouteError",
    "RateLimited",
    "RefusedAlike",
    "RegistryError",
    "RequestError",
    "RequestRefused",
    "ResponseStatusError",
    "SourceError",
    "StageFailed",
    "TransportError",
    "UnknownName",
]

_PUSD_PER_USD = 10**12


def _usd(amount_pusd: int) -> str:
    """Money for a message; exact to the pico-dollar, trailing zeros dropped beyond six places."""
    sign = "-" if amount_pusd < 0 else ""
    whole, rest = divmod(abs(amount_pusd), _PUSD_PER_USD)
    fraction = f"{rest:012d}"
    return f"{sign}${whole}.{fraction[:6]}{fraction[6:].rstrip('0')}"


class QuantrouteError(Exception):
    """Root of every error quantroute raises on purpose.

    `facts` are the keyword arguments the error was built from; subclasses take exactly those.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = facts or {"message": message}

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ calls cls(*args), which keyword-only classes refuse.
        return _rebuild, (type(self), self.facts)


def _rebuild(cls: type[QuantrouteError], facts: dict[str, Any]) -> QuantrouteError:
    return cls(**facts)


class ConfigurationError(QuantrouteError, ValueError):
    """A setting is impossible. Nothing was sent; correct it and rerun."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnknownName(ConfigurationError):
    """A provider or tag in a rule matches nothing that was listed."""

    def __init__(self, *, name: str, rule: str, suggestions: Sequence[str] = ()) -> None:
        hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
        super().__init__(f"{rule}: {name!r} matches no listed provider, slug or tag{hint}")
        self.facts = {"name": name, "rule": rule, "suggestions": tuple(suggestions)}
        self.name, self.rule, self.suggestions = name, rule, tuple(suggestions)


class RegistryError(QuantrouteError):
    """The catalogue could not be read. Check the network, the base URL or the model id."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class EndpointDataError(RegistryError):
    """One entry of an endpoint list is malformed; the others were kept."""

    def __init__(self, *, model: str, entry: str, problem: str) -> None:
        super().__init__(f"{model}: entry {entry} left out: {problem}")
        self.facts = {"model": model, "entry": entry, "problem": problem}
        self.model, self.entry, self.problem = model, entry, problem


class NoEligibleEndpoint(QuantrouteError):
    """No endpoint may serve this request. `reasons` holds one line per endpoint."""

    def __init__(self, *, model: str, reasons: Sequence[str]) -> None:
        listing = "".join(f"\n  - {reason}" for reason in reasons)
        advice = (
            f"loosen one of these rules:{listing}"
            if reasons
            else "the service lists none at this moment: nobody serves it; try again later"
        )
        super().__init__(f"no eligible endpoint for {model}; {advice}")
        self.facts = {"model": model, "reasons": tuple(reasons)}
        self.model, self.reasons = model, tuple(reasons)


class BudgetError(QuantrouteError):
    """Something about money; see the subclasses."""


class BudgetExceeded(BudgetError):
    """A reservation did not fit and nothing was sent. Raise the cap, or resume later.

    Units: pico-dollars (1e-12 USD). `account` names the cap that refused.
    """

    def __init__(
        self,
        *,
        account: str,
        requested_pusd: int,
        cap_pusd: int,
        posted_pusd: int,
        pending_pusd: int,
    ) -> None:
        available = cap_pusd - posted_pusd - pending_pusd
        super().__init__(
            f"cap of {_usd(cap_pusd)} on {account!r} reached: {_usd(posted_pusd)} spent, "
            f"{_usd(pending_pusd)} reserved, {_usd(available)} left, "
            f"{_usd(requested_pusd)} needed; raise the cap and rerun to go on"
        )
        self.facts = {
            "account": account,
            "requested_pusd": requested_pusd,
            "cap_pusd": cap_pusd,
            "posted_pusd": posted_pusd,
            "pending_pusd": pending_pusd,
        }
        self.account = account
        self.requested_pusd = requested_pusd
        self.cap_pusd = cap_pusd
        self.posted_pusd = posted_pusd
        self.pending_pusd = pending_pusd

    @property
    def available_pusd(self) -> int:
        """What the cap still admits, in pico-dollars."""
        return self.cap_pusd - self.posted_pusd - self.pending_pusd

    @property
    def can_ever_fit(self) -> bool:
        """Whether releasing what is pending could make room."""
        return self.posted_pusd + self.requested_pusd <= self.cap_pusd


class EntryStateError(BudgetError):
    """An entry cannot make this transition: resolved twice, or never reserved."""

    def __init__(self, *, entry_id: str, state: str, transition: str) -> None:
        super().__init__(f"entry {entry_id} is {state}: cannot {transition}")
        self.facts = {"entry_id": entry_id, "state": state, "transition": transition}
        self.entry_id, self.state, self.transition = entry_id, state, transition


class JournalError(BudgetError):
    """The ledger's storage is damaged, locked by another process, or not a ledger."""

    def __init__(self, *, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.facts = {"path": path, "problem": problem}
        self.path, self.problem = path, problem


class LedgerUnreachable(JournalError):
    """The server of a shared ledger does not answer, or not as the ledger that was opened: nothing
    new is spent until it does.
    """

    def __init__(self, *, path: str, problem: str, advice: str | None = None) -> None:
        super().__init__(path=path, problem=problem)
        self.facts["advice"] = advice
        advice = advice or "run the same command again when the server is back"
        self.args = (
            f"{path}: the shared ledger cannot be used ({problem}); nothing new was sent, what "
            f"was paid for is kept; {advice}",
        )


class RequestError(QuantrouteError):
    """One request failed; others are not affected.

    Attributes: `request_id` ours, `endpoint` the tag asked (or None), `attempt` counted from 1.
    """

    def __init__(
        self, *, problem: str, request_id: str = "", endpoint: str | None = None, attempt: int = 0
    ) -> None:
        where = f" at {endpoint}" if endpoint else ""
        which = f" (attempt {attempt})" if attempt else ""
        name = f" {request_id}" if request_id else ""
        super().__init__(f"request{name}{where}{which}: {problem}")
        self.facts = {
            "problem": problem,
            "request_id": request_id,
            "endpoint": endpoint,
            "attempt": attempt,
        }
        self.problem = problem
        self.request_id = request_id
        self.endpoint = endpoint
        self.attempt = attempt


class TransportError(RequestError):
    """The wire failed. `maybe_billed` is False only if the request provably never left."""

    def __init__(
        self,
        *,
        problem: str,
        maybe_billed: bool,
        request_id: str = "",
        endpoint: str | None = None,
        attempt: int = 0,
    ) -> None:
        super().__init__(problem=problem, request_id=request_id, endpoint=endpoint, attempt=attempt)
        self.facts["maybe_billed"] = maybe_billed
        self.maybe_billed = maybe_billed


class ResponseStatusError(RequestError):
    """The service refused, by status or by an error inside a 200 body."""

    def __init__(
        self,
        *,
        problem: str,
        status: int,
        retry_after_s: float | None = None,
        request_id: str = "",
        endpoint: str | None = None,
        attempt: int = 0,
    ) -> None:
        super().__init__(
            problem=f"status {status}: {problem}",
            request_id=request_id,
            endpoint=endpoint,
            attempt=attempt,
        )
        self.facts |= {"problem": problem, "status": status, "retry_after_s": retry_after_s}
        self.status = status
        self.retry_after_s = retry_after_s


class RateLimited(ResponseStatusError):
    """429 until the time budget for waiting was used up."""


class ProviderDown(ResponseStatusError):
    """The endpoint failed on every attempt."""


class RequestRefused(ResponseStatusError):
    """This row can never succeed as it is: bad parameter, too long, moderated."""


class InvalidResponse(RequestError):
    """The service answered with something that is not an answer, on every attempt."""


class AccountError(QuantrouteError):
    """The account cannot go on; the run stops at once and can be resumed."""

    def __init__(self, *, problem: str, status: int) -> None:
        super().__init__(problem)
        self.facts = {"problem": problem, "status": status}
        self.problem, self.status = problem, status


class CreditsExhausted(AccountError):
    """The service says the account or the key is out of funds (402)."""


class KeyRejected(AccountError):
    """The service does not accept the key (401), or none is set."""


class DatasetError(QuantrouteError):
    """Prompts or stored rows cannot be used as they are."""

    def __init__(self, *, path: str, problem: str, line: int | None = None) -> None:
        where = f"{path}:{line}" if line is not None else path
        super().__init__(f"{where}: {problem}")
        self.facts = {"path": path, "problem": problem, "line": line}
        self.path, self.problem, self.line = path, problem, line


class RefusedAlike(AccountError):
    """Every row is refused with the same words: the rows are not at fault.

    Attributes: `refusal` the service's words, `rows` how many had them one after the other.
    """

    def __init__(self, *, refusal: str, status: int, rows: int) -> None:
        super().__init__(
            problem=f"the service refused {rows} rows in a row alike "
            f"(status {status}: {refusal}); check model, parameters and key",
            status=status,
        )
        self.facts = {"refusal": refusal, "status": status, "rows": rows}
        self.refusal = refusal
        self.rows = rows


class SourceError(QuantrouteError):
    """The target gives no hidden states, or not the right ones. What is stored stays; rerun.

    `source` names the model folder or the server.
    """

    def __init__(self, *, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.facts = {"source": source, "problem": problem}
        self.source, self.problem = source, problem


class StageFailed(QuantrouteError):
    """A pipeline's stage ended badly and said why; what is done stays. The same command goes on.

    `status` is the exit status of the stage's command.
    """

    def __init__(self, *, stage: str, status: int) -> None:
        super().__init__(
            f"stage {stage} ended with status {status} (see above); the same command goes on there"
        )
        self.facts = {"stage": stage, "status": status}
        self.stage, self.status = stage, status
