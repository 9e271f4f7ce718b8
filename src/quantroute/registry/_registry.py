"""ProviderRegistry: the catalogue, cached, shared by all callers, honest about its age."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from quantroute._log import get_logger
from quantroute.clock import Clock, SystemClock
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError, RegistryError, UnknownName
from quantroute.registry._cache import FlightCache
from quantroute.registry._changes import Change, compare
from quantroute.registry._endpoints import EndpointList, parse_endpoints
from quantroute.registry._models import ModelList, ModelQuery, closest, parse_models
from quantroute.registry._providers import ProviderDirectory, parse_providers
from quantroute.registry._snapshot import Snapshot, read_snapshot, write_snapshot
from quantroute.registry._source import ModelNotListed, Source
from quantroute.secrets import EnvKey

if TYPE_CHECKING:
    from quantroute._http import Service

__all__ = ["ProviderRegistry"]

_log = get_logger("quantroute.registry")

_DEFAULT_KEY: Final = EnvKey()
_PARALLEL_READS: Final = 8
_MODEL_ID: Final = re.compile(r"~?[^\s/?#%\\]+(?:/[^\s/?#%\\]+)+")

OnChange = Callable[[tuple[Change, ...]], None]
L = TypeVar("L", EndpointList, ModelList, ProviderDirectory)


@dataclass(frozen=True, slots=True)
class _Held(Generic[L]):
    """A parsed list with the body it came from, which a snapshot writes as it was."""

    value: L
    body: object


class ProviderRegistry:
    """Who serves which model, at what price and precision.

    >>> async with ProviderRegistry() as registry:
    ...     listing = await registry.endpoints("moonshotai/kimi-k2.5")

    One registry per event loop at a time; after `aclose` it can be entered again, also on another
    loop, and still has what it read. A registry from a snapshot needs no entering.

    Args:
        service: where to ask; OpenRouter by default.
        key: sent where set; the catalogue needs none. None never sends one.
        ttl_s: seconds for which an answer is taken from memory.
        max_stale_s: seconds for which an old answer stands in while the service cannot be read.
        timeout_s: seconds for one attempt, of which there are up to three.
        clock: for tests.
    """

    def __init__(
        self,
        *,
        service: Service | None = None,
        key: EnvKey | None = _DEFAULT_KEY,
        ttl_s: float = 60.0,
        max_stale_s: float = 86_400.0,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        for name, seconds in (("ttl_s", ttl_s), ("max_stale_s", max_stale_s)):
            if not 0.0 <= seconds < math.inf:
                raise ConfigurationError(f"{name} must be finite and not negative, not {seconds}")
        if not 0.0 < timeout_s < math.inf:
            raise ConfigurationError(f"timeout_s must be positive and finite, not {timeout_s}")
        clock = clock or SystemClock()
        self._set_up(
            _online(service, key=key, timeout_s=timeout_s, clock=clock),
            clock=clock,
            ttl_s=ttl_s,
            max_stale_s=max_stale_s,
        )

    @classmethod
    def from_snapshot(cls, path: str | Path, *, clock: Clock | None = None) -> Self:
        """A registry that answers from a file, without a network; `refresh` changes nothing there.

        Reads what `snapshot` wrote, and catalogues `{captured_at, models, providers, endpoints}`.

        Raises:
            RegistryError: no such file, or not a catalogue.
        """
        registry = cls.__new__(cls)
        registry._set_up(
            read_snapshot(Path(path)),
            clock=clock or SystemClock(),
            ttl_s=math.inf,
            max_stale_s=math.inf,
        )
        return registry

    def _set_up(self, source: Source, *, clock: Clock, ttl_s: float, max_stale_s: float) -> None:
        self._source = source
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_open = False
        self._observers: list[OnChange] = []
        self._warned: set[tuple[str, str, str]] = set()
        caching = {"ttl_s": ttl_s, "max_stale_s": max_stale_s}
        self._lists = FlightCache[_Held[EndpointList]](clock=clock, staled=self._stale, **caching)
        self._models = FlightCache[_Held[ModelList]](clock=clock, staled=self._stale, **caching)
        self._providers = FlightCache[_Held[ProviderDirectory]](
            clock=clock, staled=self._stale, **caching
        )

    def __repr__(self) -> str:
        return f"ProviderRegistry({self._source.name})"

    # -- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ConfigurationError("this registry is already open; use the one `async with`")
        self._loop, self._was_open = asyncio.get_running_loop(), True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reads in flight and close the sockets; harmless when not open."""
        self._loop = None
        for cache in (self._lists, self._models, self._providers):
            await cache.close()
        await self._source.close()

    def _check_open(self) -> None:
        if not self._source.is_live or self._loop is asyncio.get_running_loop():
            return
        if self._loop is not None:
            raise ConfigurationError("this registry is open on another event loop; use one each")
        state = "closed" if self._was_open else "not open"
        raise ConfigurationError(f"this registry is {state}; use `async with ProviderRegistry()`")

    # -- reading ----------------------------------------------------------------------------------

    async def endpoints(
        self, model: str, *, refresh: bool = False, wait: bool = True
    ) -> EndpointList:
        """The endpoints of `model`; the same object until it is read again.

        An empty list is an answer: the model is known and nobody serves it now. A dated id or a
        variant such as `x:free` is a list of its own. While the service cannot be read, the last
        list stands in, with `is_stale` set.

        Args:
            refresh: read now, whatever is cached.
            wait: False for the last list at once, while a new one is being read: for callers whom
                a slow service must not hold up. After a long silence it is waited for all the same.
        Raises:
            RegistryError: the list cannot be had and no usable one is cached.
        """
        return (await self._endpoints(model, refresh=refresh, wait=wait)).value

    async def models(self, query: ModelQuery | None = None, *, refresh: bool = False) -> ModelList:
        """The models that `query` asks for; all that give text by default.

        From a snapshot, filters are applied here; those that only the service can answer raise.

        Raises:
            RegistryError: the list cannot be had and none is cached.
            UnknownName: the query names a provider that is not listed.
            ConfigurationError: a snapshot cannot answer this query.
        """
        query = query or ModelQuery()
        if query.providers:
            query = replace(query, providers=await self._provider_names(query.providers))
        if self._source.is_live:
            return (await self._model_list(query, refresh=refresh)).value
        whole = (await self._model_list(ModelQuery(), refresh=False)).value
        if query.providers:
            whole = await self._served_by(whole, query.providers)
        return whole.filter(replace(query, providers=()))

    async def providers(self, *, refresh: bool = False) -> ProviderDirectory:
        """All providers, by slug and by display name.

        Raises:
            RegistryError: the list cannot be had and none is cached.
        """
        return (await self._directory(refresh=refresh)).value

    def on_change(self, callback: OnChange) -> Callable[[], None]:
        """Call `callback` with the changes whenever a list that was read before differs.

        It runs on the event loop, within the read: it must be quick and not raise. Returns a
        function that takes it off again.
        """
        self._observers.append(callback)
        return lambda: self._observers.remove(callback) if callback in self._observers else None

    async def snapshot(self, path: str | Path, *, models: Iterable[str]) -> None:
        """Write the model list, the providers and the endpoint lists of `models` to one file.

        Bodies are written as the service sent them (without the key, should it have echoed it);
        a name ending in `.gz` is compressed. `captured_at` is the time of the oldest part.

        Raises:
            RegistryError: a part cannot be had, or the file cannot be written; nothing was.
        """
        catalogue = await self._model_list(ModelQuery(), refresh=False)
        directory = await self._directory(refresh=False)
        lists = await self._read_lists(dict.fromkeys(models))
        ages = [catalogue.value.fetched_at_s, directory.value.fetched_at_s]
        await asyncio.to_thread(
            write_snapshot,
            Path(path),
            captured_at_s=min([*ages, *(held.value.fetched_at_s for held in lists.values())]),
            models=catalogue.body,
            providers=directory.body,
            endpoints={model: held.body for model, held in lists.items()},
        )

    # -- one cached read of each kind -------------------------------------------------------------

    async def _endpoints(
        self, model: str, *, refresh: bool, wait: bool = True
    ) -> _Held[EndpointList]:
        self._check_open()
        is_id = _MODEL_ID.fullmatch(model) and model.isprintable()  # no lone surrogates
        if not is_id or not {".", ".."}.isdisjoint(model.split("/")):
            raise ModelNotListed(
                f"{model!r} is no model id such as 'moonshotai/kimi-k2.5'{self._hint(model)}"
            )

        async def read() -> _Held[EndpointList]:
            reading = await self._source.endpoints(model)
            listing = parse_endpoints(
                model, reading.body, fetched_at_s=reading.at_s, source=self._source.name
            )
            self._report(listing)
            self._announce(self._lists.kept(model), listing)
            return _Held(listing, reading.body)

        try:
            return await self._lists.get(
                model, read, refresh=refresh and self._source.is_live, wait=wait
            )
        except ModelNotListed as error:
            hint = self._hint(model) if self._source.is_live else ""
            raise ModelNotListed(f"{error}{hint}") from None

    async def _model_list(self, query: ModelQuery, *, refresh: bool) -> _Held[ModelList]:
        self._check_open()
        params = query.params()

        async def read() -> _Held[ModelList]:
            reading = await self._source.models(params)
            parsed = parse_models(reading.body, fetched_at_s=reading.at_s, source=self._source.name)
            return _Held(parsed, reading.body)

        return await self._models.get(params, read, refresh=refresh)

    async def _directory(self, *, refresh: bool) -> _Held[ProviderDirectory]:
        self._check_open()

        async def read() -> _Held[ProviderDirectory]:
            reading = await self._source.providers()
            parsed = parse_providers(
                reading.body, fetched_at_s=reading.at_s, source=self._source.name
            )
            return _Held(parsed, reading.body)

        return await self._providers.get("providers", read, refresh=refresh)

    async def _read_lists(self, models: Iterable[str]) -> dict[str, _Held[EndpointList]]:
        """Endpoint lists by model, a few at a time, in the order given."""
        found: dict[str, _Held[EndpointList] | None] = dict.fromkeys(models)
        remaining = iter(tuple(found))

        async def worker() -> None:
            for model in remaining:
                found[model] = await self._endpoints(model, refresh=False)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_PARALLEL_READS):
                    group.create_task(worker())
        except* RegistryError as failures:
            raise _first(failures) from None
        return {model: held for model, held in found.items() if held is not None}

    # -- provider names in queries ----------------------------------------------------------------

    async def _provider_names(self, spellings: Iterable[str]) -> tuple[str, ...]:
        """Display names, which the model list's filter wants; requests want slugs."""
        directory = await self.providers()
        names = []
        for spelling in spellings:
            found = directory.find(spelling)
            if found is None:
                near = closest(spelling, (provider.name for provider in directory))
                raise UnknownName(name=spelling, rule="providers", suggestions=near)
            names.append(found.name)
        return tuple(names)

    async def _served_by(self, models: ModelList, names: tuple[str, ...]) -> ModelList:
        """The models of a snapshot that one of the named providers serves."""
        assert isinstance(self._source, Snapshot)
        lists = await self._read_lists(m.id for m in models if m.id in self._source.lists)
        served = {
            model
            for model, held in lists.items()
            if any(endpoint.provider_name in names for endpoint in held.value)
        }
        return replace(models, models=tuple(m for m in models if m.id in served))

    # -- events -----------------------------------------------------------------------------------

    def _stale(self, held: _Held[L], error: RegistryError) -> _Held[L]:
        _log.warning(
            "catalogue_stale",
            held=repr(held.value),
            age_s=round(held.value.age_s(self._clock.time_s()), 1),
            problem=str(error),
        )
        return replace(held, value=replace(held.value, is_stale=True))

    def _report(self, listing: EndpointList) -> None:
        """Warn once of each entry left out and each label that is in no vocabulary we know."""
        for problem in listing.problems:
            if self._is_news(listing.model, problem.entry, problem.problem):
                _log.warning("endpoint_left_out", model=listing.model, problem=str(problem))
        for endpoint in listing:
            label = endpoint.quantization_label
            if endpoint.quantization is not Quantization.UNKNOWN or label is None:
                continue
            is_unseen = label.strip().lower() != Quantization.UNKNOWN.value
            if is_unseen and self._is_news(listing.model, endpoint.tag, label):
                _log.warning(
                    "quantization_label_unseen",
                    model=listing.model,
                    endpoint=str(endpoint.key),
                    label=label,
                )

    def _is_news(self, *warning: str) -> bool:
        model, subject, text = warning
        known = (model, subject, text) in self._warned
        self._warned.add((model, subject, text))
        return not known

    def _announce(self, before: _Held[EndpointList] | None, after: EndpointList) -> None:
        if before is None or not self._observers:
            return
        if changes := compare(before.value, after):
            for observer in tuple(self._observers):
                observer(changes)

    def _hint(self, model: str) -> str:
        """Ids that may have been meant, from a model list that was read before."""
        held = self._models.kept(ModelQuery().params())
        near = held.value.suggest(model) if held is not None else ()
        return f"; did you mean {', '.join(near)}?" if near else ""


def _online(
    service: Service | None, *, key: EnvKey | None, timeout_s: float, clock: Clock
) -> Source:
    """The HTTP source; imported here, so that work from a snapshot never loads aiohttp."""
    from quantroute._http import Service
    from quantroute.registry._fetch import HttpSource

    return HttpSource(service=service or Service(), key=key, timeout_s=timeout_s, clock=clock)


def _first(failures: BaseExceptionGroup[RegistryError]) -> RegistryError:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RegistryError)
    return error
