"""File descriptors for the sockets of a run: looked after before the first request.

Each request in flight is a socket. Where the limit is below that, connections fail in the middle
of a run with errors that look like the network's. The soft limit is ours to raise, the hard one is
not.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from quantroute._log import get_logger
from quantroute.errors import ConfigurationError

__all__ = ["ensure_descriptors"]

log = get_logger("quantroute.client")

#: The store's files and locks, catalogue and accounting requests, the loop's own, some air.
_SPARE: Final = 128


def ensure_descriptors(requests: int, *, sockets_each: int = 1) -> None:
    """See to it that so many requests can be in flight beside what is open now.

    `sockets_each` is 2 where this process serves them as well. Raises the process's soft limit if
    it has to; does nothing where there is no such limit.
    Raises:
        ConfigurationError: the hard limit is too low.
    """
    if sys.platform == "win32":
        return
    import resource

    other = _open_now() + _SPARE
    wanted = other + requests * sockets_each
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise _too_low(wanted, hard, fitting=(hard - other) // sockets_each)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # a limit of the system's below its own hard limit
        raise _too_low(wanted, soft, fitting=(soft - other) // sockets_each) from error
    log.info("descriptor limit raised", before=soft, now=wanted, hard=hard)


def _too_low(wanted: int, limit: int, *, fitting: int) -> ConfigurationError:
    lower = f", or ask with max_in_flight={fitting} or less" if fitting > 0 else ""
    return ConfigurationError(
        f"the requests in flight need {wanted:,} file descriptors, and this process may have "
        f"{limit:,}: raise the limit (`ulimit -n {wanted}` in the shell, as root or in "
        f"/etc/security/limits.conf if that is refused){lower}"
    )


def _open_now() -> int:
    """Descriptors in use; a small guess where the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 16
