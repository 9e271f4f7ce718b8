"""States from a vLLM server, through its hidden-states connector and a shared folder.

The server writes a file per request and answers with its path. "200 with a path" is a promise, not
a result: the file is waited for (a lock beside it is held while it is written), then looked into.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.clock import Clock, SystemClock
from quantroute.errors import ConfigurationError, SourceError
from quantroute.extraction._norm import FinalNorm, read_norm
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.extraction._server import Refused, StateServer, spread
from quantroute.extraction._source import Lost, check_layers
from quantroute.extraction._target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["VllmSource", "vllm_flags"]

_SCALES: Final = "hidden_states_scales"
_FIRST_POLL_S: Final = 0.002
_LONGEST_POLL_S: Final = 0.25
_HEALTH_EVERY_S: Final = 2.0


class VllmSource:
    """Asks for prompts of token ids, reads the files, deletes them.

    Args:
        target: local folder with the config and the final norm of what the server serves.
        server: its URL.
        path_map: (folder as the server names it, the same folder here), where the two differ.
        in_flight: requests at a time; the server batches them.
        file_timeout_s: from the answer until the file is there.

    Raises:
        ConfigurationError: a folder or a number that cannot be meant.
        SourceError: the target does not have these layers.
    """

    def __init__(
        self,
        target: Path | str,
        layers: LayerIds | None = None,
        *,
        server: str,
        dtype: str | None = None,
        path_map: tuple[str, Path] | None = None,
        in_flight: int = 16,
        retries: int = 4,
        timeout_s: float = 600.0,
        file_timeout_s: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        self.target = Target.read(target)
        self.layers = layers or LayerIds.default(self.target.num_layers)
        self.dtype = dtype or self.target.dtype
        check_layers(self.target, self.layers)
        if in_flight < 1:
            raise ConfigurationError("in_flight must be positive")
        self._clock = clock or SystemClock()
        self._server = StateServer(server, retries=retries, timeout_s=timeout_s, clock=self._clock)
        self.name = self._server.url
        self._path_map = path_map
        self._file_timeout_s = file_timeout_s
        self._limit = in_flight
        self._slots = asyncio.Semaphore(in_flight)
        self._model: str | None = None

    def final_norm(self) -> FinalNorm:
        """Out of the target's checkpoint: a server does not tell it."""
        return read_norm(self.target.folder, self.target.config)

    async def states(self, examples: Iterable[Example]) -> AsyncIterator[States | Lost]:
        """As they come; see `StateSource.states`."""
        if self._model is None:
            self._model = await self._served_model()
        async for result in spread(examples, self._ask, limit=self._limit):
            yield result

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    async def _served_model(self) -> str:
        try:
            models = (await self._server.get("/v1/models"))["data"]
            return str(models[0]["id"])
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise SourceError(
                source=self.name, problem=f"/v1/models names no model ({error})"
            ) from error

    async def _ask(self, example: Example) -> States | Lost:
        async with self._slots:
            problem = ""
            for attempt in range(1, self._server.retries + 2):
                if attempt > 1:
                    await self._server.pause(attempt - 1)
                try:
                    return States(example=example, hidden=await self._attempt(example))
                except Refused as refusal:
                    return Lost(example=example, reason="refused", detail=str(refusal))
                except _Broken as broken:
                    problem = str(broken)
            return Lost(example=example, reason="broken_answer", detail=problem)

    async def _attempt(self, example: Example) -> torch.Tensor:
        ids = example.input_ids.tolist()
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await self._server.post("/v1/completions", body)
        path = self._path_of(answer)
        try:
            # First the file, whatever the answer says: deleted too early, it would stay for good.
            hidden = await self._file(path, ids)
            seen = _prompt_ids(answer)
            if seen is not None and seen != ids:
                raise _Broken("the server saw other token ids than were sent")
            return hidden
        finally:
            for leftover in (path, _lock_of(path)):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def _path_of(self, answer: dict[str, Any]) -> Path:
        text = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(text, str):
            raise SourceError(
                source=self.name,
                problem="its answers name no file of hidden states; start it with "
                f"{vllm_flags(self.target, self.layers, 'FOLDER')}",
            )
        if not text.endswith(".safetensors"):  # it is deleted after reading: take no other file
            raise SourceError(source=self.name, problem=f"not a safetensors file: {text}")
        if self._path_map is None:
            return Path(text)
        theirs, ours = self._path_map
        try:
            return ours / PurePosixPath(text).relative_to(theirs)
        except ValueError:
            raise SourceError(
                source=self.name, problem=f"{text} is not in {theirs}; correct the path map"
            ) from None

    async def _file(self, path: Path, ids: list[int]) -> torch.Tensor:
        """Wait until the file is whole, and read it."""
        began_s = looked_s = self._clock.now_s()
        poll_s = _FIRST_POLL_S
        while True:
            found = await asyncio.to_thread(_read_when_whole, path)
            if found is not None:
                return self._checked(found, ids)
            now_s = self._clock.now_s()
            is_late = now_s - began_s > self._file_timeout_s
            if is_late or now_s - looked_s > _HEALTH_EVERY_S:
                looked_s = now_s
                await self._require_alive(path)
            if is_late:
                raise _Broken(f"no file after {self._file_timeout_s:g} s: {path}")
            await self._clock.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    async def _require_alive(self, path: Path) -> None:
        if not await self._server.is_alive():
            raise SourceError(
                source=self.name,
                problem=f"it promised {path} with status 200 and then died; its log tells why "
                "(the stock connector needs an accelerator)",
            )

    def _checked(self, found: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        torch = need("torch")
        if not {"hidden_states", "token_ids"} <= found.keys():
            raise _Broken(f"the file holds {sorted(found)}")
        hidden, seen = found["hidden_states"], found["token_ids"].tolist()
        if hidden.ndim != 3 or hidden.shape[0] != len(ids) or seen != ids:
            raise _Broken(
                f"the file holds {hidden.shape[0]} rows of states and {len(seen)} token ids for "
                f"{len(ids)} tokens sent; start the server with --no-enable-prefix-caching and "
                "--no-enable-chunked-prefill"
            )
        wanted = (len(self.layers.boundary) + 1, self.target.hidden_size)
        if tuple(hidden.shape[1:]) != wanted:
            raise SourceError(
                source=self.name,
                problem=f"states have (layers, width) {tuple(hidden.shape[1:])}, not {wanted}; "
                "start it with "
                f"{vllm_flags(self.target, self.layers, 'FOLDER')} (vLLM before 0.32 "
                "leaves the last layer of DeepSeek-like models out)",
            )
        if _SCALES in found:
            return (hidden.float() * found[_SCALES].float()).to(getattr(torch, self.dtype))
        if hidden.dtype != getattr(torch, self.dtype):
            raise SourceError(
                source=self.name, problem=f"it gives {hidden.dtype}; set dtype accordingly"
            )
        return hidden


class _Broken(Exception):
    """An answer without usable states; asking again may help."""


def vllm_flags(target: Target, layers: LayerIds, folder: str) -> str:
    """The flags that a server of this target needs, to be copied into a shell."""
    ids = ",".join(str(layer) for layer in (*layers.boundary, target.num_layers))
    return (
        '--speculative-config \'{"method":"extract_hidden_states","num_speculative_tokens":1,'
        f'"draft_model_config":{{"hf_config":{{"eagle_aux_hidden_state_layer_ids":[{ids}]}}}}}}\' '
        '--kv-transfer-config \'{"kv_connector":"ExampleHiddenStatesConnector",'
        '"kv_role":"kv_producer","kv_connector_extra_config":'
        f'{{"shared_storage_path":"{folder}"}}}}\' '
        "--no-enable-prefix-caching --no-enable-chunked-prefill"
    )


def _prompt_ids(answer: dict[str, Any]) -> list[int] | None:
    choices = answer.get("choices") or [{}]
    ids = choices[0].get("prompt_token_ids") or answer.get("prompt_token_ids")
    return ids if isinstance(ids, list) else None


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _read_when_whole(path: Path) -> dict[str, torch.Tensor] | None:
    """The file's tensors, None while it is not there, being written, or torn."""
    safetensors = need("safetensors")
    try:
        lock = os.open(_lock_of(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        lock = None  # no lock in use, or not yet: then the file itself has to be whole
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return None
    finally:
        if lock is not None:
            os.close(lock)
