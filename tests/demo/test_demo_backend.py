"""The demo's target: trained a little, and answering behind the simulator's protocol."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from quantroute.demo import (
    Dialogue,
    ModelBackend,
    TargetSize,
    dialogues,
    questions,
    standard_library,
    train_target,
)
from quantroute.simulator import AnswerRequest, SimulatedAnswer

TEXTS = [
    Dialogue(question=f"What is {name}?", reasoning=f"It is {name}.", answer=f"{name} is a thing.")
    for name in ("a list", "a tuple", "a set", "a dict")
]
SIZE = TargetSize(
    num_layers=2, hidden_size=32, heads=2, intermediate_size=64, vocab_size=320, steps=60, batch=4,
    learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> ModelBackend:
    folder: Path = tmp_path_factory.mktemp("target")
    report = train_target(folder, size=SIZE, texts=TEXTS)
    assert report.last_loss < 0.5 * report.first_loss
    assert "PSF" in (folder / "README.txt").read_text()
    return ModelBackend(folder, batch=4)


def _request(question: str, *, seed: int = 0, limit: int = 60, **fields: Any) -> AnswerRequest:
    settings: dict[str, Any] = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": question},
        ],
        "parameters": {"temperature": 0.0},
        "is_thinking": True,
        "limit_tokens": limit,
        "prompt_id": "p",
        "sample": 0,
        "rng": random.Random(seed),
    }
    return AnswerRequest(**(settings | fields))


def _ask(backend: ModelBackend, *requests: AnswerRequest) -> list[SimulatedAnswer]:
    async def ask() -> list[SimulatedAnswer]:
        return await asyncio.gather(*(backend.answer(request) for request in requests))

    return asyncio.run(ask())


def test_it_thinks_answers_and_ends(backend: ModelBackend) -> None:
    (answer,) = _ask(backend, _request("What is a list?"))
    assert answer.finish_reason == "stop"
    assert answer.reasoning is not None
    assert answer.reasoning.startswith("It is a ")
    assert answer.content.endswith("is a thing.")
    assert 0 < answer.reasoning_tokens < answer.output_tokens


def test_an_answer_does_not_depend_on_its_neighbours(backend: ModelBackend) -> None:
    sampled = {"parameters": {"temperature": 1.0, "top_p": 0.9}}
    alone = _ask(backend, _request("What is a set?", seed=7, **sampled))[0]
    others = [_request(f"What is {'very ' * n}big?", seed=n, **sampled) for n in range(9)]
    wanted = _request("What is a set?", seed=7, **sampled)
    assert _ask(backend, *others, wanted, *others[:3])[9] == alone


def test_the_limit_cuts_and_says_so(backend: ModelBackend) -> None:
    (answer,) = _ask(backend, _request("What is a list?", limit=3))
    assert (answer.output_tokens, answer.finish_reason) == (3, "length")


def test_the_corpus_is_documentation_and_always_the_same() -> None:
    subjects = standard_library()
    assert len(subjects) > 300
    made = list(dialogues(subjects))
    assert made == list(dialogues(subjects))
    assert all(item.answer.isascii() and item.question.endswith(("?", ".")) for item in made)
    asked = questions(subjects, count=50)
    assert len(set(asked)) == 50
