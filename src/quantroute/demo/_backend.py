"""A small real model behind the simulator: it samples in batches what is asked at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.evaluation import cache_name
from quantroute.simulator import AnswerRequest, SimulatedAnswer

if TYPE_CHECKING:
    import torch

__all__ = ["ModelBackend"]

_CLOSER: Final = "</think>"
_GATHER_S: Final = 0.02


@dataclass(slots=True)
class _Job:
    """One request under way: `ids` is the prompt, `sampled` what was drawn so far."""

    request: AnswerRequest
    ids: list[int]
    generator: torch.Generator
    temperature: float
    top_p: float
    answered: asyncio.Future[SimulatedAnswer]
    is_ended: bool = False
    sampled: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.is_ended or len(self.sampled) >= self.request.limit_tokens


class ModelBackend:
    """A causal language model in a local folder, as a simulator's backend.

    Requests that come within a few milliseconds are sampled together, each with its own random
    numbers: which others it shares a batch with moves an answer only through rounding. Temperature
    and top_p are honoured, other sampling parameters are not.

    Args:
        target: folder with weights, tokenizer and chat template.
        batch: answers sampled at once.
        exact: compute in float64, at several times the cost: then rounding cannot move an answer
            either, and a prompt and its random numbers alone decide it.
    """

    def __init__(self, target: Path | str, *, batch: int = 64, exact: bool = False) -> None:
        torch, transformers = need("torch"), need("transformers")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(target)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float64 if exact else torch.float32
        )
        self._model = model.eval()
        self._cache_name = cache_name(model)
        self._longest = int(model.config.max_position_embeddings)
        self._batch = batch
        self._waiting: list[_Job] = []
        self._worker: asyncio.Task[None] | None = None
        self.output_tokens = 0

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        """Sample one answer within the request's limit and the model's context."""
        job = self._job(request)
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        return await job.answered

    async def _work(self) -> None:
        """Batches until nobody waits; a failure reaches everyone in the batch."""
        await asyncio.sleep(_GATHER_S)
        while self._waiting:
            jobs, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            try:
                await asyncio.to_thread(self._sample, jobs)
            except Exception as error:  # noqa: BLE001 - handed on to those who asked
                for job in jobs:
                    if not job.answered.done():
                        job.answered.set_exception(error)
                continue
            for job in jobs:
                if not job.answered.done():  # the request may have been cancelled
                    job.answered.set_result(self._finished(job))

    def _job(self, request: AnswerRequest) -> _Job:
        ids = self._tokenizer.apply_chat_template(
            [_message(item) for item in request.messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            thinking=request.is_thinking,
        )
        ids = list(ids)[-(self._longest - 1) :]
        room = self._longest - len(ids)
        torch = need("torch")
        parameters = request.parameters
        return _Job(
            request=replace(request, limit_tokens=min(room, request.limit_tokens)),
            ids=ids,
            generator=torch.Generator().manual_seed(request.rng.getrandbits(62)),
            temperature=_number(parameters, "temperature", 1.0),
            top_p=_number(parameters, "top_p", 1.0),
            answered=asyncio.get_running_loop().create_future(),
        )

    def _sample(self, jobs: list[_Job]) -> None:
        """Decode all jobs to their ends; those that have ended leave the batch by halves."""
        torch, transformers = need("torch"), need("transformers")
        active = list(jobs)
        longest = max(len(job.ids) for job in active)
        ids = torch.zeros(len(active), longest, dtype=torch.long)
        mask = torch.zeros(len(active), longest, dtype=torch.long)
        for row, job in enumerate(active):  # left padding: all rows end at the same place
            ids[row, longest - len(job.ids) :] = torch.tensor(job.ids)
            mask[row, longest - len(job.ids) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            while active:
                logits = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_name: cache},
                ).logits[:, -1]
                for row, job in enumerate(active):
                    if not job.is_done:
                        self._take(job, _draw(logits[row], job))
                keep = [row for row, job in enumerate(active) if not job.is_done]
                if not keep:
                    break
                if len(keep) <= len(active) // 2:
                    rows = torch.tensor(keep)
                    cache.batch_select_indices(rows)
                    active = [active[row] for row in keep]
                    mask, positions = mask[rows], positions[rows]
                last = [job.sampled[-1] for job in active]
                ids = torch.tensor(last).unsqueeze(1)
                mask = torch.cat([mask, torch.ones(len(active), 1, dtype=torch.long)], dim=1)
                positions = positions[:, -1:] + 1

    def _take(self, job: _Job, token: int) -> None:
        job.sampled.append(token)
        job.is_ended = token == self._tokenizer.eos_token_id

    def _finished(self, job: _Job) -> SimulatedAnswer:
        """The sampled tokens as a service tells them: text apart from thought, counts, reason."""
        self.output_tokens += len(job.sampled)
        closer = self._tokenizer.convert_tokens_to_ids(_CLOSER)
        shown = job.sampled[:-1] if job.is_ended else job.sampled
        thought: list[int] = []
        if job.request.is_thinking:
            end = shown.index(closer) if closer in shown else len(shown)
            thought, shown = shown[:end], shown[end + 1 :]
        return SimulatedAnswer(
            content=self._tokenizer.decode(shown),
            reasoning=self._tokenizer.decode(thought) if job.request.is_thinking else None,
            output_tokens=len(job.sampled),
            reasoning_tokens=len(thought),
            finish_reason="stop" if job.is_ended else "length",
        )


def _draw(logits: torch.Tensor, job: _Job) -> int:
    """One token id: greedy at temperature 0, else from the nucleus."""
    torch = need("torch")
    if job.temperature <= 0:
        return int(logits.argmax())
    shares = torch.softmax(logits.double() / job.temperature, dim=-1)
    if job.top_p < 1:
        ordered, places = shares.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered > job.top_p
        shares[places[outside]] = 0
    return int(torch.multinomial(shares, 1, generator=job.generator))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """With text for content: parts are joined."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    extra = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": message["role"], "content": content or "", **extra}


def _number(parameters: Mapping[str, Any], name: str, default: float) -> float:
    value = parameters.get(name)
    return default if value is None else float(value)
