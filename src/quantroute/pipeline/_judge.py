"""The stage that says what the drafter is worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from quantroute import evaluation
from quantroute.pipeline._data import held_out_states
from quantroute.pipeline._spec import PipelineSpec
from quantroute.storage import atomic_write

if TYPE_CHECKING:
    from quantroute.extraction import Example

__all__ = ["judge_drafter"]


def judge_drafter(spec: PipelineSpec) -> evaluation.Evaluation:
    """Measure the exported drafter on the held-out rows and write `evaluation.json`.

    Raises:
        ConfigurationError, DatasetError: the checkpoint or the states cannot be used.
    """
    from quantroute import extraction

    store = extraction.StateStore.open(spec.states)
    weights = evaluation.TargetWeights.read(spec.target)
    head = evaluation.DraftHead.load(
        spec.exported, embedding=weights.embedding, layers=store.layers.boundary
    )
    samples = evaluation.stored_samples(
        held_out_states(spec), norm=store.final_norm(), weights=weights
    )
    settings = spec.evaluate
    found = evaluation.evaluate(head, samples, depth=settings.depth)
    if settings.speculate_prompts:
        held = (item.example for item in held_out_states(spec))
        if prompts := list(islice(_prompts(held), settings.speculate_prompts)):
            found = replace(found, speculation=_speculate(spec, head, prompts))
    atomic_write(spec.evaluation, (json.dumps(found.as_dict(), indent=2) + "\n").encode())
    return found


def _prompts(examples: Iterable[Example]) -> Iterator[list[int]]:
    """What stands before each answer. Rows of token ids may be all answer: they have none."""
    for example in examples:
        if start := int(example.loss_mask.argmax()):
            yield example.input_ids[:start].tolist()


def _speculate(
    spec: PipelineSpec, head: evaluation.DraftHead, prompts: list[list[int]]
) -> evaluation.Speculation:
    target = evaluation.LocalTarget(spec.target)
    return evaluation.speculate(
        target,
        head,
        prompts,
        tokens=spec.evaluate.speculate_tokens,
        depth=spec.evaluate.depth,
        end=target.end,
    )
