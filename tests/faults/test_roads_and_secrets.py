"""Proxies, certificates, redirects and the key (sections H, I and J)."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import shutil
import ssl
import subprocess
import urllib.request
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import quantroute.client
import quantroute.registry
from client_support import fast
from faults.hostile import (
    ONE_TRY,
    Asked,
    Hostile,
    Wire,
    answers,
    chunk,
    completion,
    facing,
    read_request,
    request,
)
from quantroute import Client, ProviderRegistry, Service
from quantroute.client import Answered, GaveUp, RetryPolicy
from quantroute.errors import ConfigurationError, KeyRejected, QuantrouteError, RegistryError
from registry_support import MODEL

pytestmark = pytest.mark.usefixtures("key")

PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxies_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PROXY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


@dataclass
class Proxy:
    """Forwards plain requests to one server, and opens tunnels to it under any name."""

    to: str
    tunnels: bool = True
    is_mute: bool = False
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = urlsplit(self.to).netloc.partition(":")
        pumps: set[asyncio.Task[None]] = set()
        try:
            while (asked := await read_request(reader)) is not None:
                self.asked.append(asked)
                if self.is_mute:
                    await asyncio.sleep(60)
                if asked.method == "CONNECT" and not self.tunnels:
                    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    return
                there, back = await asyncio.open_connection(host, int(port))
                if asked.method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    pumps = {
                        asyncio.ensure_future(_pump(reader, back)),
                        asyncio.ensure_future(_pump(there, writer)),
                    }
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    back.close()
                    return
                path = urlsplit(asked.target)
                head = f"{asked.method} {path.path}?{path.query} HTTP/1.1\r\nConnection: close\r\n"
                lines = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
                back.write((head + lines + "\r\n").encode() + asked.body)
                writer.write(await _whole_answer(there))
                await writer.drain()
                back.close()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(65_536):
        sink.write(piece)
        await sink.drain()


async def _whole_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    return head + await reader.readexactly(length)


@asynccontextmanager
async def proxied(to: str, **settings: Any) -> AsyncIterator[Proxy]:
    proxy = Proxy(to, **settings)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await asyncio.sleep(0.01)


class TestProxies:
    async def test_the_environments_proxy_carries_catalogue_and_requests(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name that only the proxy can reach; its credentials travel in their own header."""
        async with Hostile(answers(completion())) as server, proxied(server.url) as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://user:pass@{proxy.url}")
            service = Service(base_url="http://router.invalid/api/v1")
            assert service.route() == "router.invalid via HTTP_PROXY"
            async with Client(**fast(service=service)) as client:
                assert (await client.chat(MODEL, "x")).content == "Blue."
            assert {asked.method for asked in proxy.asked} == {"GET", "POST"}
            for asked in proxy.asked:
                assert asked.target.startswith("http://router.invalid/")
                assert asked.headers["proxy-authorization"].startswith("Basic ")
                assert "Bearer" in asked.headers["authorization"]

    async def test_loopback_and_no_proxy_go_directly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with facing(answers(completion())) as (_, server), proxied(server.url) as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.url}")
            async with Client(**fast(service=Service(base_url=server.url))) as client:
                assert (await client.chat(MODEL, "x")).content == "Blue."
            assert proxy.asked == []
            monkeypatch.setenv("NO_PROXY", "router.invalid")
            assert Service(base_url="http://router.invalid/api/v1").route().endswith("directly")
            assert Service(base_url="http://other.invalid/api/v1").route().endswith("HTTP_PROXY")
            unused = Service(base_url="http://other.invalid/api/v1", use_env_proxy=False)
            assert unused.route().endswith("directly")

    async def test_a_netrc_file_neither_replaces_the_key_nor_breaks_anything(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
    ) -> None:
        """Many machines have one for other services, some with a default entry."""
        netrc = tmp_path / "netrc"
        netrc.write_text("default login somebody password hunter2\n")
        monkeypatch.setenv("NETRC", str(netrc))
        async with Hostile(answers(completion())) as server, proxied(server.url) as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.url}")
            service = Service(base_url="http://router.invalid/api/v1")
            async with Client(**fast(service=service)) as client:
                assert (await client.chat(MODEL, "x")).content == "Blue."
            assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {key}"}

    @pytest.mark.parametrize("url", ["socks5://user:pass@h:1", "http://", "ftp://h", "http://["])
    async def test_what_is_no_http_proxy_is_a_clear_error(
        self, monkeypatch: pytest.MonkeyPatch, url: str
    ) -> None:
        """And its password is not quoted."""
        monkeypatch.setenv("HTTP_PROXY", url)
        service = Service(base_url="http://router.invalid/api/v1")
        async with (
            Hostile(answers(completion())) as server,
            ProviderRegistry(service=Service(base_url=server.url)) as registry,
            Client(**fast(service=service, registry=registry)) as client,
        ):
            assert "pass" not in repr(client)
            with pytest.raises(ConfigurationError, match="HTTP_PROXY") as caught:
                await client.chat(MODEL, "x")
            assert "pass" not in str(caught.value)
            assert client.ledger.balance().pending_pusd == 0

    def test_a_proxy_without_a_scheme_is_an_http_proxy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "proxy.invalid:3128")
        assert Service().proxy() == "http://proxy.invalid:3128"

    @pytest.mark.parametrize("kind", ["refuses", "is gone"])
    async def test_a_proxy_that_lets_nothing_through_costs_nothing(
        self, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """No tunnel, no request: the reservation is free again. No password in any text."""
        async with (
            Hostile(answers(completion())) as server,
            proxied(server.url, tunnels=False) as proxy,
            ProviderRegistry(service=Service(base_url=server.url)) as registry,
        ):
            address = proxy.url if kind == "refuses" else "127.0.0.1:9"
            monkeypatch.setenv("HTTPS_PROXY", f"http://user:hunter2@{address}")
            service = Service(base_url="https://router.invalid/api/v1")
            settings = fast(service=service, registry=registry, retry=ONE_TRY)
            async with Client(**settings) as client:
                gave_up = await client.complete(request())
                assert isinstance(gave_up, GaveUp)
                assert "hunter2" not in gave_up.problem
                assert client.ledger.balance().pending_pusd == 0
                assert client.ledger.balance().voided_entries == 1


@dataclass(frozen=True)
class TLS:
    """A certificate of our own for `router.invalid`."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = TLS(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:router.invalid,DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(made.key), "-out", str(made.certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return made


@asynccontextmanager
async def encrypted(server: Hostile, tls: TLS) -> AsyncIterator[str]:
    """The same service behind TLS; yields its address."""
    listening = await asyncio.start_server(server._serve, "127.0.0.1", 0, ssl=tls.context())
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


class TestTLS:
    async def test_a_custom_ca_file_is_trusted_also_through_a_tunnel(
        self, monkeypatch: pytest.MonkeyPatch, tls: TLS
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # asyncio's, of the server's side
            async with Hostile(answers(completion())) as server, encrypted(server, tls) as address:
                service = Service(base_url=f"https://{address}/api/v1", ca_file=tls.certificate)
                async with Client(**fast(service=service)) as client:
                    assert (await client.chat(MODEL, "x")).content == "Blue."
                async with proxied(f"http://{address}") as proxy:
                    monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.url}")
                    service = Service(
                        base_url="https://router.invalid/api/v1", ca_file=tls.certificate
                    )
                    async with Client(**fast(service=service)) as client:
                        assert (await client.chat(MODEL, "x")).content == "Blue."
                    assert {asked.method for asked in proxy.asked} == {"CONNECT"}
                    assert "authorization" not in proxy.asked[0].headers

    async def test_a_stranger_certificate_is_refused_before_anything_is_sent(
        self, tls: TLS
    ) -> None:
        async with Hostile(answers(completion())) as server, encrypted(server, tls) as address:
            registry = ProviderRegistry(service=Service(base_url=server.url))
            service = Service(base_url=f"https://{address}/api/v1")
            settings = fast(service=service, registry=registry, retry=ONE_TRY)
            async with registry, Client(**settings) as client:
                gave_up = await client.complete(request())
                assert isinstance(gave_up, GaveUp)
                assert "certificate" in gave_up.problem.lower()
                assert server.chats == []
                assert client.ledger.balance().pending_pusd == 0

    async def test_a_ca_file_that_is_none_is_named(self, tmp_path: Path) -> None:
        for file in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
            (tmp_path / "empty.pem").write_text("nothing")
            service = Service(base_url="https://127.0.0.1:1/api/v1", ca_file=file)
            async with Client(**fast(service=service)) as client:
                with pytest.raises(ConfigurationError, match=file.name):
                    await client.chat(MODEL, "x")


class TestKey:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_key_that_is_set_or_changed_after_opening_is_cut_out_too(
        self, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        """It is read at each request, so it is known at each request."""
        monkeypatch.delenv("OPENROUTER_API_KEY")
        late = "sk-or-v1-late-0123456789abcdef0123456789abcdef"

        async def chat(wire: Wire, asked: Asked) -> None:
            echo = asked.headers["authorization"]
            if not stream:
                body = completion(f"You sent {echo}", id=f"gen-{late}")
                body["choices"][0]["native_finish_reason"] = late
                return await wire.answer(body, headers=[f"X-Generation-Id: gen-{late}"])
            await wire.start_stream()
            await wire.say(chunk(f"You sent {echo[:20]}"))
            last = {"finish_reason": "stop", "native_finish_reason": late}
            await wire.say(chunk(echo[20:], choice=last), "data: [DONE]\n\n")
            return await wire.hang_up()

        async with facing(chat) as (client, _):
            monkeypatch.setenv("OPENROUTER_API_KEY", late)
            done = await client.complete(request(is_streamed=stream))
            assert isinstance(done, Answered)
            assert late not in repr(done)
            assert "secret_redacted" in done.answer.flags
            rows = client.ledger.store.read(lambda c: c.execute("SELECT * FROM journal").fetchall())
            assert late not in repr(rows)

    @pytest.mark.parametrize("where", [0, 150, 290, 3_990])
    async def test_a_key_at_the_cut_of_a_long_message_leaves_no_piece(
        self, where: int, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Shortening comes after redacting: half a key is key material too."""
        error = {"code": 400, "message": "x" * where + " " + key + " " + "y" * 5_000}
        with caplog.at_level(logging.DEBUG):
            async with facing(answers({"error": error}, status="400 Bad Request")) as (client, _):
                refused = await client.complete(request())
        for piece in (key, key[:16], key[-12:]):
            assert piece not in repr(refused)
            assert piece not in caplog.text

    def test_an_unopened_client_pickles_without_the_key_and_an_open_one_not_at_all(
        self, key: str
    ) -> None:
        """Fault 80: no client crosses a process with a session in it."""
        client = Client(cap_usd="1")
        assert key.encode() not in pickle.dumps(client)
        assert repr(pickle.loads(pickle.dumps(client))) == repr(client)

        async def main() -> None:
            async with facing(answers(completion())) as (opened, _):
                await opened.chat(MODEL, "x")
                with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                    pickle.dumps(opened)

        asyncio.run(main())

    def test_every_error_of_the_package_survives_pickle_and_copy(self) -> None:
        """Also those that modules keep to themselves."""
        assert quantroute.client
        assert quantroute.registry
        left, seen = [QuantrouteError], []
        while left:
            kind = left.pop()
            left += kind.__subclasses__()
            seen.append(kind)
        assert len(seen) > 20
        for kind in seen:
            if kind.__module__ == "quantroute.errors":
                continue  # each of those has its own case in test_errors
            error = kind("no such model")
            for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
                assert (type(twin), str(twin)) == (kind, str(error))

    async def test_no_key_reserves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with facing(answers(completion())) as (client, server):
            for text in ("", "two words", "k\u00e9y-0123456789"):
                monkeypatch.setenv("OPENROUTER_API_KEY", text)
                with pytest.raises(KeyRejected) as caught:
                    await client.chat(MODEL, "x")
                assert text == "" or text not in str(caught.value)
            assert server.chats == []
            assert client.ledger.balance().open_entries == 0


class TestLoops:
    @pytest.mark.parametrize("rows", [150, pytest.param(500, marks=pytest.mark.slow)])
    def test_many_requests_leave_no_socket_and_no_warning(self, rows: int) -> None:
        """Half of them cut by the server; warnings of unclosed things are errors."""

        async def main() -> None:
            count = 0

            async def chat(wire: Wire, asked: Asked) -> None:
                nonlocal count
                count += 1
                if count % 2:
                    await wire.say("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
                    await wire.hang_up()
                else:
                    await wire.answer(completion())

            retry = RetryPolicy(base_s=0.0, max_attempts=40, max_paid_attempts=40)
            async with facing(chat, cap_usd="1000", retry=retry) as (client, server):
                done = await asyncio.gather(
                    *(client.complete(request(f"p{n}")) for n in range(rows))
                )
                assert all(isinstance(item, Answered) for item in done)
                assert len(server.chats) >= 2 * rows
            await asyncio.sleep(0.02)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(main())
            gc.collect()

    def test_a_notebook_can_await_in_one_cell_after_another(self) -> None:
        """One running loop, a client opened in one cell and used and closed in later ones."""
        loop = asyncio.new_event_loop()
        server = Hostile(answers(completion()))
        try:
            loop.run_until_complete(server.__aenter__())
            client = Client(**fast(service=Service(base_url=server.url)))
            loop.run_until_complete(client.__aenter__())
            for _ in range(2):
                answer = loop.run_until_complete(client.chat(MODEL, "x"))
                assert answer.content == "Blue."
            loop.run_until_complete(client.aclose())
            loop.run_until_complete(server.__aexit__())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


class TestCatalogueOnTheWay:
    """The registry fails or changes while rows are under way."""

    async def test_a_catalogue_that_goes_away_is_served_stale(self) -> None:
        """Also when every listing is stale at once: rows go on with what was read."""
        async with Hostile(answers(completion())) as server:
            service = Service(base_url=server.url)
            registry = ProviderRegistry(service=service, ttl_s=0.0, timeout_s=0.05)
            async with registry, Client(**fast(service=service, registry=registry)) as client:
                assert isinstance(await client.complete(request("a")), Answered)

                async def broken(wire: Wire, asked: Asked) -> None:
                    if asked.method == "POST":
                        return await wire.answer(completion())
                    return await wire.answer("<html>", status="403 Forbidden")

                server._answer = broken  # type: ignore[method-assign]
                done = await asyncio.gather(*(client.complete(request(f"p{n}")) for n in range(20)))
                assert all(isinstance(item, Answered) for item in done)
                assert (await registry.endpoints(MODEL)).is_stale

    async def test_a_catalogue_that_was_never_there_is_one_error_and_costs_nothing(self) -> None:
        async with Hostile(answers(completion())) as server:

            async def broken(wire: Wire, asked: Asked) -> None:
                await wire.answer({"error": {"code": 403, "message": "no"}}, status="403 Forbidden")

            server._answer = broken  # type: ignore[method-assign]
            async with Client(**fast(service=Service(base_url=server.url))) as client:
                results = await asyncio.gather(
                    *(client.complete(request(f"p{n}")) for n in range(50)), return_exceptions=True
                )
                assert all(isinstance(item, RegistryError) for item in results)
                assert len(server.asked) <= 4
                assert client.ledger.balance().open_entries == 0

    async def test_a_retry_after_beyond_all_numbers_does_not_raise(self) -> None:
        async with Hostile(answers(completion())) as server:

            async def broken(wire: Wire, asked: Asked) -> None:
                headers = ["Retry-After: " + "9" * 400]
                await wire.answer("x", status="503 Service Unavailable", headers=headers)

            server._answer = broken  # type: ignore[method-assign]
            async with ProviderRegistry(service=Service(base_url=server.url)) as registry:
                with pytest.raises(RegistryError, match="status 503"):
                    await registry.endpoints(MODEL)


def test_proxies_of_this_machine_are_not_used_here() -> None:
    """The fixture above really shields these tests."""
    assert not {"http", "https"} & set(urllib.request.getproxies())
