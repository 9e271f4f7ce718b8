"""Small services for the user of this machine alone: pages and figures about a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from quantroute.errors import ConfigurationError, QuantrouteError

__all__ = ["LOOPBACK", "LOOPBACK_NAMES", "is_loopback", "is_own_page", "served"]

LOOPBACK: Final = "127.0.0.1"
#: Names by which a loopback address is rightly called. A web page that was led here under another
#: name by its own name server must neither spend money nor read what a run did.
LOOPBACK_NAMES: Final = frozenset({"localhost", LOOPBACK, "::1"})


def is_loopback(host: str) -> bool:
    """Whether a request's `Host` header, port included, names this machine itself."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name in LOOPBACK_NAMES


def is_own_page(origin: str | None) -> bool:
    """Whether a request's `Origin` header is of this machine; None, of no browser at all, is, too.

    Any page may have a browser send a request here that spends money, under our own name; it only
    cannot read the answer.
    """
    if origin is None:
        return True
    try:
        return urlsplit(origin).hostname in LOOPBACK_NAMES
    except ValueError:
        return False


@asynccontextmanager
async def served(routes: Mapping[str, Handler], *, port: int) -> AsyncIterator[int]:
    """Serve these paths (GET) on 127.0.0.1 within the block; yields the port.

    Requests under another name than this machine's own are refused; an error of ours becomes
    status 503 with its message.

    Args:
        port: 0 picks a free one.

    Raises:
        ConfigurationError: the port is taken.
    """
    app = web.Application(middlewares=[_loopback_only])
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {LOOPBACK} port {port}: {error.strerror}; name another port"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@web.middleware
async def _loopback_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not is_loopback(request.host):
        raise web.HTTPForbidden(text="this service answers to 127.0.0.1 and localhost only\n")
    try:
        return await handler(request)
    except QuantrouteError as error:
        raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
