"""How the package talks HTTP: one session per event loop, proxies and CAs honoured, no secrets.

Shared by the registry and the client; everything about *what* is said lives there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from quantroute._version import __version__
from quantroute.errors import ConfigurationError

__all__ = ["OPENROUTER_URL", "Service", "SessionPool"]

OPENROUTER_URL: Final = "https://openrouter.ai/api/v1"
_USER_AGENT: Final = f"quantroute/{__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where requests go and by which road.

    Args:
        base_url: up to and including `/api/v1`; no user info, query or fragment, since a key put
            there would end in logs.
        ca_file: a PEM bundle to trust instead of the system's.
        use_env_proxy: honour HTTP_PROXY, HTTPS_PROXY and NO_PROXY; loopback never uses a proxy.
    """

    base_url: str = OPENROUTER_URL
    ca_file: Path | None = None
    use_env_proxy: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError("base_url must be an http(s) URL with a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            # The URL itself is not quoted: it may hold a key.
            raise ConfigurationError(
                "base_url must not hold user info, a query or a fragment; "
                "keys belong into the environment variable"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))

    @property
    def is_loopback(self) -> bool:
        """Whether the service runs on this machine."""
        host = urlsplit(self.base_url).hostname or ""
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def proxy(self) -> str | None:
        """The proxy that the environment names for this service, with its credentials.

        Raises:
            ConfigurationError: it is not an HTTP proxy.
        """
        parts = urlsplit(self.base_url)
        if not self.use_env_proxy or self.is_loopback or proxy_bypass(parts.netloc):
            return None
        url = getproxies().get(parts.scheme)
        if not url:
            return None
        if "://" not in url:
            url = f"http://{url}"  # "proxy:3128" is what many machines say
        if not _is_http(url):
            # The URL itself is not quoted: it may hold a password.
            raise ConfigurationError(
                f"{parts.scheme.upper()}_PROXY must be an http(s) URL with a host; "
                "other kinds of proxy are not supported"
            )
        return url

    def route(self) -> str:
        """One line for diagnostics: the host and whether a proxy variable applies."""
        parts = urlsplit(self.base_url)
        try:
            is_proxied = self.proxy() is not None
        except ConfigurationError:
            is_proxied = True  # it will be told when the road is taken
        variable = f"{parts.scheme}_proxy".upper()
        return f"{parts.netloc} {'via ' + variable if is_proxied else 'directly'}"

    def ssl_context(self) -> ssl.SSLContext | bool:
        """True (the defaults) or a context that trusts `ca_file`.

        Raises:
            ConfigurationError: the file is missing or holds no certificate.
        """
        if self.ca_file is None:
            return True
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"ca_file {self.ca_file}: {error}") from error


@dataclass(slots=True)
class SessionPool:
    """The aiohttp session of the loop it was first used on; owned and closed by one holder.

    No pool limit: whoever sends requests bounds them, so waiting for a connection is never
    mistaken for a slow server. aiohttp's own total timeout of 300 s is switched off for the same
    reason: limits are set per request.
    """

    service: Service
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False, repr=False)
    _proxy_url: str | None = field(default=None, init=False, repr=False)

    def get(self) -> aiohttp.ClientSession:
        """The session for the running loop, opened at the first call.

        Raises:
            ConfigurationError: opened on another loop that was not closed; use one holder per loop.
        """
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed:
            self._proxy_url = self.service.proxy()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=self.service.ssl_context(), keepalive_timeout=60.0
                ),
                timeout=aiohttp.ClientTimeout(total=None),
                # Not `trust_env`: it also sends what ~/.netrc holds for the host instead of the
                # key, and reads both, per request, on a thread.
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": _USER_AGENT},
                auto_decompress=True,
                read_bufsize=2**18,
            )
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigurationError(
                "this object is open on another event loop; close it there first, "
                "or make one for each loop"
            )
        return self._session

    @property
    def proxy_url(self) -> str | None:
        """What each request of the open session passes as `proxy`; holds a password, print it not.

        Texts of errors that quote it are redacted by whoever makes them into ours.
        """
        return self._proxy_url

    async def close(self) -> None:
        """Close the session and wait for its sockets to go; harmless when nothing is open."""
        session, self._session, self._loop = self._session, None, None
        if session is not None and not session.closed:
            await session.close()


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
