"""Catalogue bodies over HTTP: a few attempts, faults told apart, nothing secret in an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from quantroute._headers import retry_after_s
from quantroute._http import Service, SessionPool
from quantroute._json import dumps, loads
from quantroute._log import get_logger
from quantroute.clock import Clock
from quantroute.errors import KeyRejected, RegistryError
from quantroute.registry._source import ModelNotListed, Params, Reading, is_error_body
from quantroute.secrets import EnvKey, Redactor

__all__ = ["HttpSource"]

_log = get_logger("quantroute.registry")

_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_LONGEST_QUOTE: Final = 200
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})


class _Passing(Exception):
    """A fault that may be gone at the next attempt."""

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.problem, self.retry_after_s = problem, retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    content_type: str
    retry_after_s: float
    location: str | None
    text: str


class HttpSource:
    """The service's catalogue paths. They need no key; one that is set goes along."""

    def __init__(
        self, *, service: Service, key: EnvKey | None, timeout_s: float, clock: Clock
    ) -> None:
        self._service = service
        self._key = key
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self._sessions = SessionPool(service)

    @property
    def name(self) -> str:
        return self._service.base_url

    @property
    def is_live(self) -> bool:
        return True

    async def endpoints(self, model: str) -> Reading:
        return await self._read(f"/models/{quote(model, safe='/:~@')}/endpoints", model=model)

    async def models(self, params: Params) -> Reading:
        return await self._read("/models", params=params)

    async def providers(self) -> Reading:
        return await self._read("/providers")

    async def close(self) -> None:
        await self._sessions.close()

    async def _read(self, path: str, *, params: Params = (), model: str | None = None) -> Reading:
        """The body at `path`, after up to three attempts."""
        url = URL(f"{self._service.base_url}{path}", encoded=True).with_query(list(params))
        redactor = self._key.redactor() if self._key else Redactor()
        wait_s = _BACKOFF_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = await self._ask(url, redactor)
                body = _body(answer, path=path, model=model, redactor=redactor)
                return Reading(body=body, at_s=self._clock.time_s())
            except _Passing as fault:
                problem, asked_s = fault.problem, fault.retry_after_s
            if attempt == _ATTEMPTS or asked_s > _LONGEST_WAIT_S:
                break
            await self._clock.sleep(max(wait_s, asked_s))
            wait_s *= 2
        raise RegistryError(
            f"catalogue {path} not read after {attempt} attempts ({self._service.route()}): "
            f"{problem}; check the network and base_url, or work from a snapshot"
        )

    async def _ask(self, url: URL, redactor: Redactor) -> _Answer:
        """One exchange, keyless if the service does not accept the key: these paths need none."""
        headers = self._headers()
        answer = await self._exchange(url, headers, redactor)
        if headers and answer.status in (401, 403):
            _log.warning("catalogue_key_refused", status=answer.status, variable=self._variable())
            answer = await self._exchange(url, {}, redactor)
        return answer

    async def _exchange(self, url: URL, headers: Mapping[str, str], redactor: Redactor) -> _Answer:
        try:
            session = self._sessions.get()
            async with session.get(
                url,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
                proxy=self._sessions.proxy_url,
            ) as response:
                raw = await response.read()
        except TimeoutError:
            raise _Passing(f"no answer within {self._timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            # Not chained: aiohttp's texts can hold proxy URLs with passwords.
            detail = redactor.text(f"{type(error).__name__}: {error}")[:_LONGEST_QUOTE]
            raise _Passing(detail) from None
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _Passing("the body is not UTF-8") from None
        now = datetime.fromtimestamp(self._clock.time_s(), UTC)
        return _Answer(
            status=response.status,
            content_type=response.content_type,
            retry_after_s=retry_after_s(response.headers, now=now) or 0.0,
            location=response.headers.get("Location"),
            text=redactor.answer(text),
        )

    def _headers(self) -> dict[str, str]:
        try:
            return self._key.headers() if self._key else {}
        except KeyRejected:
            return {}

    def _variable(self) -> str:
        return self._key.variable if self._key else ""


def _body(answer: _Answer, *, path: str, model: str | None, redactor: Redactor) -> object:
    """The parsed body of a good answer.

    Raises:
        _Passing: worth another attempt.
        ModelNotListed: there is no such model.
        RegistryError: asking again is pointless.
    """
    if 300 <= answer.status < 400:
        raise RegistryError(
            f"catalogue {path} is redirected to {_host(answer.location)}; correct base_url"
        )
    body = _parsed(answer, redactor)
    status = answer.status
    if status == 200 and is_error_body(body):
        status = _inner_code(body)
    if status == 200:
        if body is None:
            raise _Passing(f"status 200 with {_kind(answer)}, not JSON (cut, or a proxy's page?)")
        return body
    said = redactor.text(_message(body))[:_LONGEST_QUOTE]
    problem = f"status {status}" + (f", {said!r}" if said else f" with {_kind(answer)}")
    if status in _PASSING:
        raise _Passing(problem, answer.retry_after_s)
    if status == 404 and model is not None and body is not None:
        raise ModelNotListed(f"the service lists no model {model}; check base_url and the model id")
    raise RegistryError(f"catalogue {path}: {problem}; check base_url and the model id")


def _host(location: str | None) -> str:
    try:
        return URL(location or "").host or "another place"
    except ValueError:
        return "another place"


def _parsed(answer: _Answer, redactor: Redactor) -> object:
    """The JSON value, None if it is none; free of the key even where it was sent escaped."""
    try:
        body = loads(answer.text)
        # "\u0073k-or-..." is the key to every reader of the JSON, but not to a search in its text.
        if "\\u00" in answer.text:
            body = loads(redactor.answer(dumps(body)))
    except ValueError:
        return None
    return body


def _inner_code(body: object) -> int:
    """The status inside an error body: int, digits, or 502 for a code that is a word."""
    error = body.get("error") if isinstance(body, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 502


def _message(body: object) -> str:
    error = body.get("error") if isinstance(body, Mapping) else None
    said = error.get("message") if isinstance(error, Mapping) else error
    return said if isinstance(said, str) else ""


def _kind(answer: _Answer) -> str:
    return f"{answer.content_type} of {len(answer.text)} characters"
