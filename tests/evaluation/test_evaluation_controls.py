"""What goes wrong silently must show: with wrong data or wrong states a drafter accepts less.

The states are those of extraction, the head is that of evaluation; the loss is the trainers' (the
target's distribution, three steps ahead), in a few lines here, because four trainings by the
trainers' own commands would take a quarter of an hour on two cores.

The target's final norm is made uneven, as it is in targets that were trained for long: after some
hundred steps its weights are still close to one, and a norm too many is hardly felt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from quantroute.demo import (  # noqa: E402
    SYSTEM_PROMPT,
    ModelBackend,
    TargetSize,
    questions,
    standard_library,
    train_target,
)
from quantroute.evaluation import (  # noqa: E402
    DraftHead,
    Sample,
    TargetWeights,
    Wiring,
    measure,
    stored_samples,
)
from quantroute.extraction import (  # noqa: E402
    Example,
    FinalNorm,
    LayerIds,
    Lost,
    States,
    TransformersSource,
)
from quantroute.simulator import AnswerRequest  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DEPTH, EPOCHS, ANSWERS, HELD_OUT = 3, 4, 260, 40


class Bench:
    """A target, its own answers, and answers of another model that has learnt little."""

    def __init__(self, folder: Path, *, size: TargetSize, other: TargetSize) -> None:
        torch.manual_seed(0)
        train_target(folder / "target", size=size)
        train_target(folder / "other", size=other)
        self.target = folder / "target"
        _make_norm_uneven(self.target)
        self.weights = TargetWeights.read(self.target)
        self.layers = LayerIds.default(size.num_layers)
        self.own = _answers(self.target, tokenizer=self.target)
        self.foreign = _answers(folder / "other", tokenizer=self.target)
        self.norm, self.states = self.extract(self.own, self.layers)

    def extract(
        self, examples: Sequence[Example], layers: LayerIds
    ) -> tuple[FinalNorm, list[States]]:
        source = TransformersSource(self.target, layers, dtype="float32", device="cpu")

        async def collect() -> list[States]:
            found = {}
            async for item in source.states(examples):
                assert not isinstance(item, Lost)
                # Cloned: what was computed in inference mode cannot be trained on.
                found[item.example.key] = replace(item, hidden=item.hidden.clone())
            return [found[example.key] for example in examples]

        return source.final_norm(), asyncio.run(collect())

    def samples(self, states: Iterable[States]) -> list[Sample]:
        return list(stored_samples(states, norm=self.norm, weights=self.weights))

    def train(self, training: Iterable[States]) -> DraftHead:
        return _trained(self.samples(training), self.weights, self.norm, self.layers.boundary)

    def length(self, head: DraftHead, states: Iterable[States] | None = None) -> float:
        """Acceptance on held-out answers, whose states are these for the drafter."""
        right = self.samples(self.held_out)
        shown = self.held_out if states is None else states
        samples = [
            replace(sample, auxiliary=item.hidden[:, :-1].float())
            for sample, item in zip(right, shown, strict=True)
        ]
        return measure(head, samples, depth=DEPTH)[0].length

    def other_layers(self, *layers: int) -> list[States]:
        """Held-out states as from an engine that counts layers otherwise."""
        return self.extract(self.own[:HELD_OUT], LayerIds(layers))[1]

    @property
    def held_out(self) -> list[States]:
        return self.states[:HELD_OUT]

    @property
    def training(self) -> list[States]:
        return self.states[HELD_OUT:]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Bench(
            tmp_path_factory.mktemp("bench"),
            size=TargetSize(steps=300),
            other=TargetSize(steps=40, seed=1),
        )
    finally:
        torch.set_num_threads(threads)


def test_wrong_data_and_wrong_states_show_in_acceptance(bench: Bench) -> None:
    norm, own = bench.norm, bench.layers.boundary
    _, foreign = bench.extract(bench.foreign[HELD_OUT:], bench.layers)

    def last_normed(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], norm.apply(hidden[:, -1:])], dim=1)

    def other_places(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[torch.randperm(len(hidden))]

    trained = bench.train(bench.training)
    right = bench.length(trained)
    found = {
        "trained on states of other places": bench.length(
            bench.train(_changed(bench.training, other_places))
        ),
        "trained on text of another model": bench.length(bench.train(foreign)),
        "trained on last states after the norm": bench.length(
            bench.train(_changed(bench.training, last_normed))
        ),
        "given states of other places": bench.length(
            trained, _changed(bench.held_out, other_places)
        ),
        "given layers one too low": bench.length(
            trained, bench.other_layers(*(layer - 1 for layer in own))
        ),
        "given the lowest layers": bench.length(trained, bench.other_layers(0, 1, 2)),
        "given states after the norm": bench.length(trained, _changed(bench.held_out, norm.apply)),
    }
    print(f"right {right:.3f}", *(f"{name} {value:.3f}" for name, value in found.items()), sep="\n")  # noqa: T201
    # Seen on 2026-11-30: 2.99 right; then, in this order, 1.08, 1.90, 2.64, 1.45, 2.96, 2.75, 2.15.
    assert right > 2.5
    assert found["trained on states of other places"] < 1.5
    assert found["trained on text of another model"] < right - 0.5
    assert found["trained on last states after the norm"] < right - 0.15
    assert found["given states of other places"] < right - 1.0
    assert found["given states after the norm"] < right - 0.4
    # Neighbouring layers of a small target hold nearly the same states (see docs/pipeline.md): the
    # further away, the more it costs.
    assert found["given the lowest layers"] < right - 0.1
    assert found["given the lowest layers"] < found["given layers one too low"] < right + 0.02


def _changed(
    states: Iterable[States], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[States]:
    return [replace(item, hidden=change(item.hidden)) for item in states]


def _make_norm_uneven(folder: Path) -> None:
    """Other weights for the final norm, and a head that takes them back: the same function."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp(torch.randn(weights["model.norm.weight"].shape, generator=generator))
    weights["model.norm.weight"] *= spread
    weights["lm_head.weight"] /= spread
    save_file(weights, path, metadata={"format": "pt"})


def _answers(model: Path, *, tokenizer: Path) -> list[Example]:
    """What a model says to the same questions, as the first one's tokens."""
    backend = ModelBackend(model)
    reader = transformers.AutoTokenizer.from_pretrained(tokenizer)
    asked = questions(standard_library(), count=ANSWERS)
    chats = [
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        for question in asked
    ]

    async def ask() -> list[Example]:
        answers = await asyncio.gather(*(backend.answer(_request(chat)) for chat in chats))
        made = []
        for chat, answer in zip(chats, answers, strict=True):
            prompt = reader.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            text = f"{answer.reasoning}</think>{answer.content}<|im_end|>"
            said = reader(text, add_special_tokens=False)["input_ids"]
            mask = np.arange(len(prompt) + len(said)) >= len(prompt)
            made.append(Example(input_ids=np.array([*prompt, *said]), loss_mask=mask))
        return made

    return asyncio.run(ask())


def _request(chat: list[dict[str, str]]) -> AnswerRequest:
    return AnswerRequest(
        model="m",
        messages=chat,
        parameters={"temperature": 0.7},
        is_thinking=True,
        limit_tokens=110,
        prompt_id="p",
        sample=0,
        rng=random.Random(chat[1]["content"]),
    )


def _trained(
    samples: Sequence[Sample], target: TargetWeights, norm: FinalNorm, layers: tuple[int, ...]
) -> DraftHead:
    """A head after a few epochs; the loss is the cross entropy with the target's distribution."""
    vocab, width = target.embedding.shape
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc": (width, len(layers) * width),
        "lm_head": (vocab, width),
        "layers.0.mlp.gate_proj": (2 * width, width),
        "layers.0.mlp.up_proj": (2 * width, width),
        "layers.0.mlp.down_proj": (width, 2 * width),
        "layers.0.self_attn.o_proj": (width, width),
        **{f"layers.0.self_attn.{name}_proj": (width, 2 * width) for name in "qkv"},
    }
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"layers.0.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(width)
    weights["lm_head.weight"] = target.head.float().clone()
    weights["norm.weight"] = norm.weight.float().clone()  # the head's other half
    for item in weights.values():
        item.requires_grad_()
    wiring = Wiring(
        layers=layers,
        hidden_size=width,
        heads=4,
        key_heads=4,
        head_dim=width // 4,
        eps=1e-6,
        rope_theta=10_000.0,
        window_tokens=None,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    head = DraftHead(wiring, weights, embedding=target.embedding)
    optimizer = torch.optim.AdamW(weights.values(), lr=2e-3)
    order = [sample for _ in range(EPOCHS) for sample in samples]
    for place in range(0, len(order), 4):
        optimizer.zero_grad()
        for sample in order[place : place + 4]:
            (_loss(head, sample) / 4).backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
    with torch.no_grad():
        for item in weights.values():
            item.requires_grad_(False)
    return head


def _loss(head: DraftHead, sample: Sample) -> torch.Tensor:
    total = torch.zeros(())
    tokens, fused = sample.ids[1:], head.fuse(sample.auxiliary[:-1])
    wanted = sample.logits.softmax(-1)
    for step, (logits, handed) in enumerate(head.unroll(tokens, fused, depth=DEPTH)):
        inside = len(tokens) - step
        learnt = sample.mask[1 + step :]
        found = -(wanted[1 + step :] * logits[:inside].log_softmax(-1)).sum(-1)
        total = total + found[learnt].mean()
        handed.ids = torch.cat([tokens[1 + step :], tokens.new_zeros(1 + step)])
    return total
