"""A server that answers as vLLM does when it is started to extract hidden states.

`POST /v1/completions` runs the prompt through a small model and puts the states in a file under a
lock, as the connector does: the lock is held until the file is written.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web


@contextmanager
def serve(folder: Path, hidden_of: Callable[[list[int]], Any], *, model: str) -> Iterator[str]:
    """The base URL, up to and with /v1. Files appear in `folder`."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[str] = []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(_app(folder, hidden_of, model))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        found.append(f"http://{host}:{port}/v1")
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _app(folder: Path, hidden_of: Callable[[list[int]], Any], model: str) -> web.Application:
    numbers = itertools.count()

    async def models(request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        ids = body["prompt"] if isinstance(body["prompt"][0], int) else body["prompt"][0]
        path = folder / f"cmpl-{next(numbers)}.safetensors"
        _write(path, ids, hidden_of(ids))
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": ids}
        return web.json_response(
            {
                "id": path.stem,
                "object": "text_completion",
                "created": 0,
                "model": model,
                "choices": [choice],
                "kv_transfer_params": {"hidden_states_path": str(path)},
            }
        )

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    return app


def _write(path: Path, ids: list[int], hidden: Any) -> None:
    import torch
    from safetensors.torch import save_file

    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save_file({"hidden_states": hidden.contiguous(), "token_ids": torch.tensor(ids)}, path)
