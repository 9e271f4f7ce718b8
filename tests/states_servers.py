"""Servers that speak the wire formats of vLLM and SGLang, with a tiny target behind them."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from states_support import WrittenOut

Fault = str | None


class FakeVllm:
    """`/v1/models`, `/v1/completions` with a hidden-states connector, `/health`.

    `faults` are taken one per request, None for a good answer; when they run out all are good.
    """

    def __init__(
        self,
        target: Path,
        folder: Path,
        *,
        boundary: Sequence[int] = (2, 4, 5),
        faults: Iterable[Fault] = (),
        named_folder: str | None = None,
        fp8: bool = False,
    ) -> None:
        self._model, self._boundary, self._folder = WrittenOut(target), boundary, folder
        self._faults, self._named, self._fp8 = iter(faults), named_folder or str(folder), fp8
        self.is_dead = False
        self.requests: list[list[int]] = []
        self.open = self.most_open = 0
        self._later: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_dead else 200)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = body["prompt"]
        assert (body["model"], body["max_tokens"], body["return_token_ids"]) == ("tiny", 1, True)
        self.requests.append(ids)
        number = len(self.requests)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0)
            return self._answer(ids, number, next(self._faults, None))
        finally:
            self.open -= 1

    def _answer(self, ids: list[int], number: int, fault: Fault) -> web.Response:
        if self.is_dead:
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        if fault is not None and fault.isdecimal():
            return web.json_response({"error": {"message": "no"}}, status=int(fault))
        name = f"cmpl-{number}.safetensors"
        path = self._folder / name
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fault in ("dies", "never"):
            self.is_dead = fault == "dies"
            os.close(lock)  # what a crashed engine leaves: an empty lock, and no file
        else:
            task = asyncio.ensure_future(self._write(path, lock, ids, fault))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        told = ids[1:] if fault == "other_ids" else ids
        answer = {
            "choices": [{"index": 0, "text": "x", "prompt_token_ids": told, "token_ids": [5]}],
            "kv_transfer_params": {"hidden_states_path": f"{self._named}/{name}"},
        }
        if fault == "no_path":
            del answer["kv_transfer_params"]
        return web.json_response(answer)

    async def _write(self, path: Path, lock: int, ids: list[int], fault: Fault) -> None:
        import torch
        from safetensors.torch import save

        for _ in range(5):
            await asyncio.sleep(0)  # the answer is on its way before the file is
        hidden = self._model.states(ids, self._boundary).bfloat16()
        tensors: dict[str, Any] = {"token_ids": torch.tensor(ids), "hidden_states": hidden}
        match fault:
            case "short":  # what prefix caching does
                tensors["hidden_states"] = hidden[2:].contiguous()
            case "no_last_layer":
                tensors["hidden_states"] = hidden[:, :-1].contiguous()
            case "file_of_another":
                tensors["token_ids"] = torch.tensor(ids).flip(0).contiguous()
            case "no_keys":
                del tensors["hidden_states"]
        if self._fp8:
            scales = hidden.float().abs().amax((1, 2), keepdim=True) / 448
            tensors["hidden_states"] = (hidden.float() / scales).to(torch.float8_e4m3fn)
            tensors["hidden_states_scales"] = scales
        raw = save(tensors)
        await asyncio.to_thread(path.write_bytes, raw[:-100] if fault == "torn" else raw)
        os.close(lock)


class FakeSglang:
    """`/generate` in the mode that returns auxiliary states; `loss` is what it does to rows."""

    def __init__(
        self,
        target: Path,
        *,
        boundary: Sequence[int] = (2, 4, 5),
        has_last: bool = True,
        loss: Callable[[list[Any]], list[Any]] = lambda rows: rows,
        is_on: bool = True,
    ) -> None:
        self._model, self._boundary = WrittenOut(target), boundary
        self._has_last, self._loss, self._is_on = has_last, loss, is_on

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = body["input_ids"]
        assert body["return_hidden_states"] is True
        meta: dict[str, Any] = {"id": "1", "prompt_tokens": len(ids), "completion_tokens": 1}
        if self._is_on:
            hidden = self._model.states(ids, self._boundary)
            hidden = hidden if self._has_last else hidden[:, :-1]
            meta["hidden_states"] = [self._loss(hidden.flatten(1).tolist())]
        return web.json_response({"text": "x", "output_ids": [5], "meta_info": meta})


def serving(fake: FakeVllm | FakeSglang) -> TestServer:
    """An async context manager: a server on loopback."""
    return TestServer(fake.app(), host="127.0.0.1")
