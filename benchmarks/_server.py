"""A server that costs next to nothing: every chat request gets one fixed answer after a fixed time.

Speaks just as much HTTP and OpenRouter as `throughput.py` needs, in one small asyncio protocol, so
that it does not become the bottleneck of what is measured. For anything else take the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random

MODEL = "moonshotai/kimi-k2.5"
_WORDS = [
    "model",
    "token",
    "draft",
    "target",
    "state",
    "verify",
    "layer",
    "budget",
    "price",
    "route",
]


def _text(characters: int) -> str:
    """English-like words, always the same: not a text that repeats, which would count as a loop."""
    rng = random.Random(7)
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(rng.choice(_WORDS) + rng.choice(("", "", "s", "ed", "ing")))
    return " ".join(words)


def _response(body: object) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


_PROVIDERS = (
    ("Alpha", "0.0000004", "0.000002"),
    ("Beta", "0.0000005", "0.0000024"),
    ("Gamma", "0.0000006", "0.000003"),
)
_TEXT = _text(2_000)


def _chat(provider: str) -> bytes:
    return _response(
        {
            "id": "gen-1",
            "object": "chat.completion",
            "model": MODEL,
            "provider": provider,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "native_finish_reason": "stop",
                    "message": {"role": "assistant", "content": _TEXT},
                }
            ],
            "usage": {
                "prompt_tokens": 400,
                "completion_tokens": 600,
                "total_tokens": 1000,
                "cost": 0.001,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        }
    )


#: What a request that is pinned to a provider holds, and the answer that names it.
_CHATS = {f'"{name.lower()}/int4"'.encode(): _chat(name) for name, _, _ in _PROVIDERS}
_LISTING = _response(
    {
        "data": {
            "id": MODEL,
            "name": "Kimi",
            "endpoints": [
                {
                    "name": f"{name} | {MODEL}",
                    "provider_name": name,
                    "tag": f"{name.lower()}/int4",
                    "context_length": 262_144,
                    "max_completion_tokens": 65_536,
                    "pricing": {"prompt": prompt, "completion": completion},
                    "quantization": "int4",
                    "supported_parameters": ["max_tokens"],
                    "status": 0,
                }
                for name, prompt, completion in _PROVIDERS
            ],
        }
    }
)
_CHAT = _chat("Alpha")
_KEY = _response({"data": {"usage": 0, "limit": None, "limit_remaining": None}})


class _Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time, as our clients send them."""

    latency_s = 1.0

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank or len(body) < _content_length(head):
            return
        self._received = b""
        if head.startswith(b"POST"):
            answer = next((found for pin, found in _CHATS.items() if pin in body), _CHAT)
            asyncio.get_running_loop().call_later(self.latency_s, self._answer, answer)
        else:
            self._transport.write(_LISTING if b"/endpoints " in head else _KEY)

    def _answer(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _content_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def _serve(latency_s: float) -> None:
    _Connection.latency_s = latency_s
    server = await asyncio.get_running_loop().create_server(
        _Connection, "127.0.0.1", 0, backlog=4_096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency-s", type=float, default=1.0)
    asyncio.run(_serve(parser.parse_args().latency_s))
