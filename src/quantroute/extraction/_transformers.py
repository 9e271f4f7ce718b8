"""States from a model in this process, through transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.errors import ConfigurationError, SourceError
from quantroute.extraction._norm import FinalNorm, norm_of_module
from quantroute.extraction._records import Example, LayerIds, States
from quantroute.extraction._source import Lost, check_layers
from quantroute.extraction._target import DTYPE_BYTES, Target

if TYPE_CHECKING:
    import torch

__all__ = ["TransformersSource", "batches", "windows"]

_LAYER_LISTS: Final = ("layers", "h", "blocks", "block")
_NORMS: Final = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
_WINDOW_BATCHES: Final = 16


class TransformersSource:
    """Runs the target's decoder over batches of like length; the head is never computed.

    Args:
        target: local folder of any causal language model; nothing is fetched.
        layers: default `LayerIds.default` of its number of layers.
        device: "cpu", "cuda", "cuda:1", or "auto" to spread it over all (needs accelerate).
        dtype: "bfloat16", "float16", "float32"; default the model's own.
        batch_tokens: padded tokens of one forward pass; a longer example runs alone.
        attention: transformers' `attn_implementation`; default its own choice.
        trust_remote_code: run Python code that lies in the folder.

    Raises:
        ConfigurationError: torch or transformers is missing, or the dtype is not one of the three.
        SourceError: not loadable, or its layers or final norm cannot be found.
    """

    def __init__(
        self,
        target: Path | str,
        layers: LayerIds | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        batch_tokens: int = 16_384,
        attention: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.target = Target.read(target)
        self.layers = layers or LayerIds.default(self.target.num_layers)
        self.dtype = dtype or self.target.dtype
        self.name = str(self.target.folder)
        check_layers(self.target, self.layers)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPE_BYTES)}")
        if batch_tokens < 1:
            raise ConfigurationError("batch_tokens must be positive")
        self._batch_tokens = batch_tokens
        self._model: Any = _load(self.target, device, self.dtype, attention, trust_remote_code)
        self._taps = _Taps(self._model, self.target, self.layers)

    def final_norm(self) -> FinalNorm:
        """As the loaded module computes it."""
        return norm_of_module(self._taps.norm)

    async def states(self, examples: Iterable[Example]) -> AsyncIterator[States | Lost]:
        """Sorted by length within a window of some batches; see `StateSource.states`."""
        for window in windows(examples, tokens=_WINDOW_BATCHES * self._batch_tokens):
            fitting = []
            for example in window:
                lost = self._refused(example)
                if lost is None:
                    fitting.append(example)
                else:
                    yield lost
            for batch in batches(fitting, tokens=self._batch_tokens):
                for result in await asyncio.to_thread(self._run, batch):
                    yield result

    async def close(self) -> None:
        """Unload the model."""
        if self._model is not None:
            self._taps.remove()
            self._model = None
            torch = need("torch")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _refused(self, example: Example) -> Lost | None:
        limit = self.target.max_tokens
        if limit is not None and len(example) > limit:
            return Lost(example=example, reason="too_long", detail=f"{len(example)} > {limit}")
        if int(example.input_ids.max()) >= self.target.vocab_size or example.input_ids.min() < 0:
            return Lost(example=example, reason="foreign_token_ids", detail="not in the vocabulary")
        return None

    def _run(self, batch: Sequence[Example]) -> list[States | Lost]:
        """One forward pass; out of device memory, the halves of the batch one after the other."""
        torch = need("torch")
        try:
            packed = self._forward(batch)
        except torch.cuda.OutOfMemoryError:
            packed = None
        if packed is not None:
            parts = packed.split([len(example) for example in batch])
            return [
                States(example=example, hidden=hidden)
                for example, hidden in zip(batch, parts, strict=True)
            ]
        # Not where the error is handled: until then it holds what the pass had made on the device.
        torch.cuda.empty_cache()
        if len(batch) == 1:
            detail = f"{len(batch[0])} tokens do not fit on the device"
            return [Lost(example=batch[0], reason="out_of_memory", detail=detail)]
        middle = len(batch) // 2
        return [*self._run(batch[:middle]), *self._run(batch[middle:])]

    def _forward(self, batch: Sequence[Example]) -> torch.Tensor:
        """States [sum of lengths, L+1, H] on the CPU, without the padding."""
        torch = need("torch")
        device = self._model.get_input_embeddings().weight.device
        longest = max(len(example) for example in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, example in enumerate(batch):
            ids[row, : len(example)] = torch.from_numpy(example.input_ids)
            mask[row, : len(example)] = 1
        # Without padding there is nothing to mask, and attention may take its faster way.
        is_padded = bool((mask == 0).any())
        with torch.inference_mode():
            taken = self._taps.run(ids.to(device), mask.to(device) if is_padded else None)
            packed = torch.empty(
                sum(map(len, batch)),
                len(taken),
                self.target.hidden_size,
                dtype=taken[0].dtype,
                device=taken[-1].device,
            )
            for slot, hidden in enumerate(taken):
                start = 0
                for row, example in enumerate(batch):
                    packed[start : start + len(example), slot] = hidden[row, : len(example)]
                    start += len(example)
            return packed.cpu()


class _Taps:
    """Hooks that keep what enters the chosen layers and the final norm."""

    def __init__(self, model: Any, target: Target, layers: LayerIds) -> None:
        self.decoder, stack, self.norm = _parts(model, target)
        self._kept: dict[int, torch.Tensor] = {}
        places = [(layer, stack[layer]) for layer in layers.boundary]
        places.append((target.num_layers, self.norm))
        self._slots = [slot for slot, _ in places]
        self._handles = [
            module.register_forward_pre_hook(self._keeper(slot), with_kwargs=True)
            for slot, module in places
        ]

    def _keeper(self, slot: int) -> Any:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._kept[slot] = args[0] if args else kwargs["hidden_states"]

        return keep

    def run(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """States [B, S, H] by slot of one forward pass."""
        try:
            self.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            return [self._kept[slot] for slot in self._slots]
        finally:
            self._kept.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _load(
    target: Target, device: str, dtype: str, attention: str | None, trust_remote_code: bool
) -> Any:
    torch, transformers = need("torch"), need("transformers")
    settings: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    if attention is not None:
        settings["attn_implementation"] = attention
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(target.folder),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            dtype=getattr(torch, dtype),
            **settings,
        )
        return (model if device == "auto" else model.to(device)).eval()
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise SourceError(
            source=str(target.folder), problem=f"transformers cannot load it: {error}"
        ) from error


def _parts(model: Any, target: Target) -> tuple[Any, Any, Any]:
    """The decoder without head, its list of layers, and its final norm."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    # OPT and its like keep the layers one level deeper.
    for holder in (decoder, getattr(decoder, "decoder", None)):
        if holder is None:
            continue
        stack = _first(holder, _LAYER_LISTS)
        if stack is None or len(stack) != target.num_layers:
            continue
        norm = _final_norm(holder, target)
        if norm is not None:
            return decoder, stack, norm
    raise SourceError(
        source=str(target.folder),
        problem=f"no final norm found in {type(decoder).__name__}: looked beside a list of "
        f"{target.num_layers} layers ({', '.join(_LAYER_LISTS)}) for one of {', '.join(_NORMS)}; "
        "without it the last state's norm is unknown",
    )


def _final_norm(holder: Any, target: Target) -> Any:
    found = _first(holder, _NORMS)
    weight = getattr(found, "weight", None)
    return found if weight is not None and tuple(weight.shape) == (target.hidden_size,) else None


def _first(holder: Any, names: Sequence[str]) -> Any:
    return next((getattr(holder, name) for name in names if hasattr(holder, name)), None)


def windows(examples: Iterable[Example], *, tokens: int) -> Iterator[list[Example]]:
    """Consecutive examples, until their tokens reach `tokens`."""
    window: list[Example] = []
    held = 0
    for example in examples:
        window.append(example)
        held += len(example)
        if held >= tokens:
            yield window
            window, held = [], 0
    if window:
        yield window


def batches(examples: Sequence[Example], *, tokens: int) -> Iterator[list[Example]]:
    """Longest first, like lengths together, at most `tokens` each counted with the padding."""
    batch: list[Example] = []
    for example in sorted(examples, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > tokens:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch
