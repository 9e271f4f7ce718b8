"""Exit codes: what a script can tell from how the command ended."""

from __future__ import annotations

import enum

from quantroute.errors import (
    AccountError,
    BudgetExceeded,
    ConfigurationError,
    CreditsExhausted,
    DatasetError,
    JournalError,
    KeyRejected,
    NoEligibleEndpoint,
    QuantrouteError,
    RegistryError,
    RequestError,
    SourceError,
    StageFailed,
)

__all__ = ["ExitCode", "code_for"]


class ExitCode(enum.IntEnum):
    """Documented in the README; a test compares the two."""

    DONE = 0
    CONFIGURATION = 2  # a wrong option, name, file or setting; nothing was spent
    CAP_REACHED = 3  # stopped by the cap; raise it and rerun to go on
    INCOMPLETE = 4  # finished, but rows failed or targets are out of reach; reconcile: unknown
    NO_ENDPOINT = 5  # the policy leaves nothing, or the catalogue cannot be had
    ACCOUNT = 6  # key rejected, or the account is out of funds
    STORAGE = 7  # the run's files are damaged, locked or of another run
    INTERRUPTED = 130  # Ctrl+C; rerun to go on


def code_for(error: QuantrouteError) -> ExitCode:
    """The exit code that stands for an error."""
    match error:
        case BudgetExceeded():
            return ExitCode.CAP_REACHED
        case CreditsExhausted() | KeyRejected() | AccountError():
            return ExitCode.ACCOUNT
        case NoEligibleEndpoint() | RegistryError():
            return ExitCode.NO_ENDPOINT
        case JournalError():
            return ExitCode.STORAGE
        case ConfigurationError() | DatasetError():
            return ExitCode.CONFIGURATION
        case StageFailed() if error.status in set(ExitCode):
            return ExitCode(error.status)
        case RequestError() | SourceError() | StageFailed():
            return ExitCode.INCOMPLETE
        case _:
            return ExitCode.CONFIGURATION
