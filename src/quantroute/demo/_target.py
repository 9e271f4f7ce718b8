"""A small target that is trained here and now: it thinks, answers, and ends its turns.

Eight layers, so that the usual layer ids of EAGLE-3 are distinct. It has learnt how documentation
sounds, not what it says: its answers are plausible and often wrong. What a drafter needs of a
target is that its text is its own and can be foreseen to a degree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantroute._extra import need
from quantroute.demo._corpus import Dialogue, dialogues, standard_library
from quantroute.errors import ConfigurationError
from quantroute.extraction import write_kimi_style_tokenizer
from quantroute.storage import atomic_write

if TYPE_CHECKING:
    import torch

__all__ = ["SYSTEM_PROMPT", "DemoTarget", "TargetSize", "train_target"]

#: Short: the template would supply its own, and every prompt pays for it.
SYSTEM_PROMPT: Final = "Answer."
_IGNORED: Final = -100
_CONTEXT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """Shape and training of the target. The least that is still worth a drafter is the default."""

    num_layers: int = 8
    hidden_size: int = 128
    heads: int = 4
    intermediate_size: int = 352
    vocab_size: int = 1_024
    steps: int = 400
    batch: int = 8
    learning_rate: float = 3e-3
    longest_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTarget:
    """A target in Hugging Face form. Losses are nats per token; `tokens` were trained on."""

    folder: Path
    parameters: int
    dialogues: int
    tokens: int
    first_loss: float
    last_loss: float
    train_s: float


def train_target(
    folder: Path | str,
    *,
    size: TargetSize | None = None,
    texts: list[Dialogue] | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> DemoTarget:
    """Train it on dialogues about the standard library and write it to `folder`.

    Args:
        texts: other dialogues than those.
        on_step: called with step, steps and loss.
    Raises:
        ConfigurationError: torch or transformers is missing, or nothing fits the length.
    """
    torch, size = need("torch"), size or TargetSize()
    folder, began_s = Path(folder), time.monotonic()
    torch.manual_seed(size.seed)
    texts = texts if texts is not None else list(dialogues(standard_library(), seed=size.seed))
    corpus = (part for item in texts for part in (item.question, item.reasoning, item.answer))
    write_kimi_style_tokenizer(folder, corpus, vocab_size=size.vocab_size)
    rows = _encode(folder, texts, longest=size.longest_tokens)
    if not rows:
        raise ConfigurationError(f"no dialogue is at most {size.longest_tokens} tokens long")
    model = _new_model(folder, size)
    losses: list[float] = []
    tokens = 0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    for step, batch in enumerate(_batches(rows, size)):
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * _schedule(step, size.steps)
        loss = _loss(model, *batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        tokens += int((batch[1] != _IGNORED).sum())
        if on_step is not None:
            on_step(step + 1, size.steps, losses[-1])
    model.save_pretrained(folder)
    recent = losses[-20:]
    report = DemoTarget(
        folder=folder,
        parameters=sum(item.numel() for item in model.parameters()),
        dialogues=len(rows),
        tokens=tokens,
        first_loss=losses[0],
        last_loss=sum(recent) / len(recent),
        train_s=time.monotonic() - began_s,
    )
    _note(report, size)
    return report


def _new_model(folder: Path, size: TargetSize) -> Any:
    transformers = need("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype="float32",
    )
    return transformers.LlamaForCausalLM(config)


def _encode(folder: Path, texts: list[Dialogue], *, longest: int) -> list[list[int]]:
    """Whole conversations as the template writes them; longer ones are left out."""
    tokenizer = need("transformers").AutoTokenizer.from_pretrained(folder)
    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    pieces = [_as_trained(tokenizer, system, item) for item in texts]
    rows = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    return [row for row in rows if len(row) <= longest]


def _as_trained(tokenizer: Any, system: list[dict[str, Any]], item: Dialogue) -> str:
    """Prompt as served, then thought, answer and end: the template would drop the thought."""
    prompt: str = tokenizer.apply_chat_template(
        [*system, item.messages()[0]], tokenize=False, add_generation_prompt=True
    )
    return f"{prompt}{item.reasoning}</think>{item.answer}{tokenizer.eos_token}"


def _batches(
    rows: list[list[int]], size: TargetSize
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels [B, S] of conversations of like length, `size.steps` times."""
    torch = need("torch")
    generator = torch.Generator().manual_seed(size.seed)
    order: list[list[int]] = []
    for _ in range(size.steps):
        if not order:
            by_length = sorted(range(len(rows)), key=lambda row: len(rows[row]))
            starts = range(0, len(by_length), size.batch)
            chunks = [by_length[start : start + size.batch] for start in starts]
            order = [chunks[place] for place in torch.randperm(len(chunks), generator=generator)]
        chosen = [rows[row] for row in order.pop()]
        longest = max(map(len, chosen))
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        labels = torch.full((len(chosen), longest), _IGNORED, dtype=torch.long)
        for place, row in enumerate(chosen):
            ids[place, : len(row)] = torch.tensor(row)
            labels[place, : len(row)] = ids[place, : len(row)]
        yield ids, labels


def _loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Mean cross entropy of the next token. Padding stands behind and is seen by nobody."""
    torch = need("torch")
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss: Any = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=_IGNORED
    )
    return loss


def _schedule(step: int, steps: int) -> float:
    """Up over the first twentieth, then along a cosine to a twentieth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _note(report: DemoTarget, size: TargetSize) -> None:
    """Where its text comes from, beside the weights."""
    lines = [
        "A toy target trained by quantroute's demo on docstrings of the Python standard library,",
        "which is under the PSF License Agreement. For rehearsals only: what it says is made up.",
        "",
        *(f"{name}: {value}" for name, value in asdict(size).items()),
        f"parameters: {report.parameters}",
        f"last_loss: {report.last_loss:.4f}",
        "",
    ]
    atomic_write(report.folder / "README.txt", "\n".join(lines).encode())
